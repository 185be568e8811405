// A Llama's whole decode step but for its LM head, in one launch: a block per multiprocessor, all resident, goes through the layers'
// phases together. Knows nothing of sessions or graphs.
//
//   q, k, v    norm'd rows x weights; a head's last tile's block norms, rotates and stores the head for all rows at once, and then
//              copies what branches of drafts begin with of it
//   attention  paged_attention's units of work, two teams of 128 threads to a block
//   out        x weights
//   gate, up   x weights, with SwiGLU behind a tile
//   down       x weights
//
// Between two phases blocks meet (grid.cuh); rows are normed and rounded there (rows.cuh), and all that while the next
// matrix's weights are on their way (stream.cuh). The sums are those of the ops, in their order: the same bits.
#define BATON_MEGAKERNEL 1
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "../paged_attention/spread.cuh"
#include "../rope_append/rotate.cuh"
#include "branches.cuh"
#include "grid.cuh"
#include "layer.cuh"
#include "rows.cuh"
#include "stream.cuh"

namespace baton {
namespace {

constexpr int TEAMS = THREADS / attention::THREADS, MOST_ITEMS = attention::THREADS;
constexpr int WIDE = 2;  // blocks of 128 bytes that a head of bf16 has at most; of 8-bit KV one

struct Job {
  const Layer* layers;
  int32_t layer_count;
  Step step;
  Branches branches;
  int32_t heads, kv_heads, head_dim, hidden, inner;
  float scale;  // times log2(e)
  const void* table;
  int32_t table_dtype;
  float *x, *qkv, *attended, *gated, *delta, *mlp_delta;  // registers; gated: silu(gate) x up
  Rounded rounded;
  uint32_t *counts, *head_counts;
  float* partial;
  int* arrived;
};

__device__ __forceinline__ PagedKv kv_of(const Job& j, const Layer& layer) {
  return {j.step.pages, j.step.page_bytes, layer.layer * j.step.layer_bytes, j.step.kv_type, j.kv_heads, j.head_dim};
}

__device__ __forceinline__ void load_layer(const Job& j, int number, Layer* to) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(j.layers + number);
  for (int i = threadIdx.x; i < int(sizeof(Layer) / 4); i += THREADS) reinterpret_cast<uint32_t*>(to)[i] = from[i];
}

// Where this step's rows lie: thread i sees to matrix i.
template <int F>
__device__ __forceinline__ void place(const Job& j, Layer* layer) {
  if (threadIdx.x >= MATRICES) return;
  Call& c = layer->matrices[threadIdx.x];
  c.x = j.rounded.rows, c.x_bytes = rounded_width(int(c.w.k)) * rounded_size<F>(), c.valid = int(c.x_bytes);
  c.x_scales = F == FORM_BF16 ? nullptr : j.rounded.scales;
  c.m = int(j.step.rows);
  c.out = threadIdx.x == QKV ? j.qkv : threadIdx.x == GATE_UP ? j.gated : threadIdx.x == DOWN ? j.mlp_delta : j.delta;
  c.out_stride = threadIdx.x == GATE_UP ? c.inner : c.w.n;
}

// What branches of drafts begin with, of the heads of `mask` from head `first` on: a warp to a (head, copy).
template <int T>
__device__ __forceinline__ void begin_branches(const Job& j, const Layer& layer, int first, int mask) {
  constexpr int ELEMENT = T == KV_BF16 ? 2 : 1, SCALE = T == KV_BF16 ? 0 : 4;
  const PagedKv kv = kv_of(j, layer);
  const int bytes = j.head_dim * ELEMENT, count = j.branches.count;
  HeadRows in{kv.pages + kv.layer_offset, kv.page_bytes, j.step.layer_bytes / 2, j.kv_heads * bytes, 0, j.kv_heads * SCALE, 0};
#if !defined(BATON_MUTATION_CUDA_MEGA_BRANCH)
  __syncthreads();  // every row of these heads is in its page
#endif
  for (int unit = threadIdx.x / 32; mask >> (unit / count); unit += WARPS) {
    const int at = first + unit / count - j.heads;  // of k's heads, then of v's
    if (!(mask >> (unit / count) & 1) || at < 0) continue;
    in.row_at = at % j.kv_heads * bytes, in.scale_at = at % j.kv_heads * SCALE;
#if defined(BATON_MUTATION_CUDA_MEGA_BRANCH_PLANE)
    const int plane = 0;
#else
    const int plane = at / j.kv_heads;
#endif
    copy_token(in, j.branches.copies[unit % count], plane, bytes, SCALE);
  }
}

// Behind a tile of q, k and v: heads that it was the last of are normed, rotated and stored, a warp to a (head, row).
template <int T>
__device__ __forceinline__ void finish_heads(const Job& j, const Layer& layer, int64_t tile, int* word) {
  const int d = j.head_dim, width = (j.heads + 2 * j.kv_heads) * d;
  const int first = int(tile) * PLACES / d, last = min(width, int(tile + 1) * PLACES) - 1;
  __syncthreads();  // the tile is written
  if (threadIdx.x == 0) {
    int mask = 0;
    __threadfence();
    for (int head = first; head <= last / d; head++) {
#if defined(BATON_MUTATION_CUDA_MEGA_HEAD)
      const int tiles = (head * d + d - 1) / PLACES - head * d / PLACES;
#else
      const int tiles = (head * d + d - 1) / PLACES - head * d / PLACES + 1;
#endif
      if (int(atomicAdd(j.head_counts + head, 1u)) != tiles - 1) continue;
      j.head_counts[head] = 0;  // for the next layer, which begins behind everybody's arrival
      mask |= 1 << (head - first);
    }
    __threadfence();
    *word = mask;
  }
  __syncthreads();
  const int mask = *word, rows = int(j.step.rows);
  const rope::Call c{kv_of(j, layer), j.step.items, j.step.item_count, j.heads, j.step.angles, j.step.angles_stride,
                     layer.q_norm, layer.k_norm, layer.head_eps, j.qkv};
  for (int unit = threadIdx.x / 32; mask >> (unit / rows); unit += WARPS) {
    if (!(mask >> (unit / rows) & 1)) continue;
    for (int i = 0; i < j.step.item_count; i++) {
      const AttentionItem item = j.step.items[i];
      const int query = unit % rows - int(item.first);
      if (query >= 0 && query < item.queries) rope::head<T, 2>(c, item, query, first + unit / rows);
    }
  }
  if (j.branches.count) begin_branches<T>(j, layer, first, mask);
}

template <int T>
__device__ __forceinline__ void attend(const Job& j, const Layer& layer, char* memory, int* words) {
  const int team = threadIdx.x / attention::THREADS;
  const attention::Call c{kv_of(j, layer), j.heads, j.heads / j.kv_heads, layer.window, j.scale, j.qkv,
                          int64_t(j.heads + 2 * j.kv_heads) * j.head_dim, j.attended, int64_t(j.heads) * j.head_dim,
                          j.partial, j.arrived, attention::SLOTS};
  const attention::Shared s(memory + team * attention::team_bytes(j.head_dim), j.head_dim);
  int* mine = words + team * (2 * MOST_ITEMS + attention::WARPS);
  attention::attend_units<T, T == KV_BF16 ? WIDE : 1, MOST_ITEMS>(c, j.step.items, j.step.item_count, s, mine, mine + MOST_ITEMS,
                                                                 mine + 2 * MOST_ITEMS, team * gridDim.x + blockIdx.x, TEAMS * gridDim.x);
}

template <int F, int MODE, int T>
__global__ void __launch_bounds__(THREADS, 1) mega(const Job j) {
  using S = Stream<F, MODE>;
  BATON_SHARED(char, memory);
  BATON_STATIC_SHARED(Layer, layers, 2);
  BATON_STATIC_SHARED(int, words, TEAMS * (2 * MOST_ITEMS + attention::WARPS));
  BATON_STATIC_SHARED(float, partial, 32);
  BATON_STATIC_SHARED(uint32_t, largest, WARPS);
  BATON_STATIC_SHARED(int, word, 1);
  char* scratch = memory + S::RING;  // of a phase: results of tiles, a row, attention
  float* held = reinterpret_cast<float*>(scratch);
  const int rows = int(j.step.rows), n = j.hidden, wide = j.heads * j.head_dim;
  Grid grid(j.counts, word);
  load_layer(j, 0, layers);
  __syncthreads();
  place<F>(j, layers);
  __syncthreads();
  S stream(layers[0].matrices + QKV, memory, held);
  const auto nothing = [](int64_t) {};
  const auto norm = [&](int row, const float* delta, const float* weight, float eps) {
    norm_to(held, j.x + int64_t(row) * n, delta ? delta + int64_t(row) * n : nullptr, weight, eps, n, partial);
    round_to_place<F>(held, n, row, j.rounded, largest);
  };
  grid.arrive(rows);
  grid.serve(rows, [&](int row) {
    embed(j.table, j.table_dtype, j.step.tokens[row], n, j.x + int64_t(row) * n);
    norm(row, nullptr, layers[0].norm, layers[0].eps);
  });
  grid.enter();
  for (int number = 0; number < j.layer_count; number++) {
    const Layer& layer = layers[number % 2];
    Layer& next = layers[(number + 1) % 2];
    const bool more = number + 1 < j.layer_count;
    stream.run(layer.matrices + ATTENTION_OUT, [&](int64_t tile) { finish_heads<T>(j, layer, tile, word); });
    grid.arrive(0);
    if (more) load_layer(j, number + 1, &next);
    grid.enter();
    attend<T>(j, layer, scratch, words);
    grid.arrive(rows);
    if (more) place<F>(j, &next);
    grid.serve(rows, [&](int row) { round_to_place<F>(j.attended + int64_t(row) * wide, wide, row, j.rounded, largest); });
    grid.enter();
    stream.run(layer.matrices + GATE_UP, nothing);
    grid.arrive(rows);
    grid.serve(rows, [&](int row) { norm(row, j.delta, layer.mlp_norm, layer.mlp_eps); });
    grid.enter();
    stream.run(layer.matrices + DOWN, nothing);
    grid.arrive(rows);
    grid.serve(rows, [&](int row) { round_to_place<F>(j.gated + int64_t(row) * j.inner, j.inner, row, j.rounded, largest); });
    grid.enter();
    stream.run(more ? next.matrices + QKV : nullptr, nothing);
    if (!more) return;
    grid.arrive(rows);
    grid.serve(rows, [&](int row) { norm(row, j.mlp_delta, next.norm, next.eps); });
    grid.enter();
  }
}

template <int F, int MODE, int T>
int launch(const Job& j, int blocks, void* stream) {
  using S = Stream<F, MODE>;
  size_t scratch = S::RESULTS;
  const size_t row = size_t(j.hidden) * 4, attending = TEAMS * attention::team_bytes(j.head_dim);
  if (row > scratch) scratch = row;
  if (attending > scratch) scratch = attending;
  return BATON_LAUNCH_RESIDENT((mega<F, MODE, T>), dim3(unsigned(blocks)), dim3(THREADS), S::RING + scratch, stream, j);
}

template <int F, int MODE>
int by_kv(const Job& j, int blocks, void* stream) {
#if !defined(BATON_MUTATION_CUDA_MEGA_SMALL)  // a build for planted bugs has one form
  if (j.step.kv_type == KV_BF16) return launch<F, MODE, KV_BF16>(j, blocks, stream);
  if (j.step.kv_type == KV_FP8) return launch<F, MODE, KV_FP8>(j, blocks, stream);
#endif
  return j.step.kv_type == KV_INT8 ? launch<F, MODE, KV_INT8>(j, blocks, stream) : int(cudaErrorInvalidValue);
}

int by_weights(const Job& j, const PackedLinear& w, int blocks, void* stream) {
#if !defined(BATON_MUTATION_CUDA_MEGA_SMALL)
  if (w.kind == LINEAR_BF16) return by_kv<FORM_BF16, PLAIN>(j, blocks, stream);
  if (w.kind == LINEAR_W8) return by_kv<FORM_W8, PLAIN>(j, blocks, stream);
#endif
  return w.kind == LINEAR_W4 ? by_kv<FORM_W4, GROUPS>(j, blocks, stream) : int(cudaErrorInvalidValue);
}

float* register_of(const Model& m, const Step& s, int32_t number) {
  int64_t before = 0;
  for (int32_t i = 0; i < number; i++) before += m.widths[i];
  return s.arena + before * s.rows;
}

size_t whole_lines(size_t bytes) { return (bytes + 127) / 128 * 128; }

}  // namespace
}  // namespace baton

BATON_API int baton_megakernel_fits(const baton::Model* model, int32_t kv_type, int32_t* op, const char** why) {
  const baton::Misfit found = baton::misfit(*model, kv_type);
  return *op = found.op, *why = found.why, 0;
}

BATON_API int baton_megakernel_layers(const baton::Model* model, void* to, int64_t* bytes) {
  const int count = baton::layers_of(*model, baton::ops_of(*model));
  *bytes = int64_t(count) * int64_t(sizeof(baton::Layer));
  for (int i = 0; to && i < count; i++) static_cast<baton::Layer*>(to)[i] = baton::layer_of(model->ops + 1 + i * baton::OPS_OF_LAYER);
  return 0;
}

BATON_API int baton_megakernel(const baton::Model* model, const baton::Step* step, const void* layers, int32_t blocks, void* stream) {
  const baton::Branches none{};
  return baton_megakernel_branches(model, step, &none, layers, blocks, stream);
}

BATON_API int baton_megakernel_branches(const baton::Model* model, const baton::Step* step, const baton::Branches* branches, const void* layers,
                                        int32_t blocks, void* stream) {
  using namespace baton;
  const Model& m = *model;
  if (step->rows < 1 || step->rows > MEGA_ROWS || step->item_count > MEGA_ROWS || misfit(m, step->kv_type).op >= 0)
    return int(cudaErrorInvalidValue);
  const Op* ops = m.ops + 1;  // of the first layer
  int64_t widest = m.hidden;
  for (int at : {QKV_AT, OUT_AT, GATE_UP_AT, DOWN_AT}) widest = widest < ops[at].weight->k ? ops[at].weight->k : widest;
  // The counts come first, of as many heads as any model has: they are as the last launch left them, whatever this one's sizes.
  constexpr size_t counts = (COUNTS + MOST_HEADS) * 4;
  const size_t rows = whole_lines(size_t(MEGA_ROWS) * size_t(rounded_width(int(widest))) * 2);
  char* memory = (char*)workspace(WORKSPACE_MEGAKERNEL, counts + rows + MEGA_ROWS * 4, stream);
  char* partial = (char*)workspace(WORKSPACE_ATTENTION, attention::workspace_bytes(m.head_dim), stream);
  if (!memory || !partial) return 2;  // cudaErrorMemoryAllocation
  Job j{};
  j.layers = (const Layer*)layers, j.layer_count = layers_of(m, ops_of(m)), j.step = *step, j.branches = *branches;
  j.heads = m.heads, j.kv_heads = m.kv_heads, j.head_dim = m.head_dim, j.hidden = int(m.hidden), j.inner = int(ops[DOWN_AT].weight->k);
  j.scale = m.scale * attention::LOG2_E, j.table = m.ops[0].table, j.table_dtype = m.ops[0].table_dtype;
  j.x = register_of(m, *step, m.ops[0].out), j.qkv = register_of(m, *step, ops[QKV_AT].out);
  j.attended = register_of(m, *step, ops[ATTENTION_AT].out), j.gated = register_of(m, *step, ops[SWIGLU_AT].out);
  j.delta = register_of(m, *step, ops[OUT_AT].out), j.mlp_delta = register_of(m, *step, ops[DOWN_AT].out);
  j.counts = (uint32_t*)memory, j.head_counts = j.counts + COUNTS;
  j.rounded = {memory + counts, (float*)(memory + counts + rows)};
  j.partial = (float*)(partial + attention::SLOTS * 4), j.arrived = (int*)partial;
  return by_weights(j, *ops[QKV_AT].weight, blocks ? blocks : resident_processors(), stream);
}
