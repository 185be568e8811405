// The projection to the vocabulary and the choice of tokens: logits stay on the chip. Knows nothing of seeds or text.
//
// Three launches for up to 64 rows: `prepare` packs the rows for mma and counts their histories; `project` passes the panels
// over a grid as large as the device and leaves of each row and panel its largest logit, that one's token and the panel's
// mass; `choose`, a block per row, takes the best, or draws the panel and computes its 64 logits again. Only rows with
// top_k, top_p or min_p, or whose logits are asked for, are written out. Choices are read on the device alone.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "choose.cuh"
#include "panel.cuh"

namespace baton {
namespace {

constexpr int PREPARERS = 256, MOST_ROWS = 64, PREFETCHED = 32 << 10;

struct Call {
  Panels p;
  Inputs in;
  Choice* choices;
  Stat* stats;  // [row][panel]
  float* kept;  // [row][vocab]: of filtered rows
  int* counts;  // [row][vocab]: zero but for what a row counts, and zero again behind it
  const float* beside;  // [row][vocab]: what adapters add to each row's products; or null

  __device__ __forceinline__ Row row(int at) const { return {choices[at], counts + int64_t(at) * p.w.n, p.w.n}; }
};

__device__ __forceinline__ int known(const Call& c, const Choice& ask, int i) {
  const int token = ask.history[i];
  return token >= 0 && token < c.p.w.n ? token : -1;
}

// A row's bytes: bf16, or int8 or e4m3 by its largest magnitude as quantize_rows.h does. Rows that aren't there are zeros.
template <int KIND>
__device__ void pack(const Call& c, int row, float* scratch) {
  char* tile = c.in.packed + row / TILE * c.p.tile_bytes();
  const int bytes = c.p.units * UNIT, k = row < c.in.rows ? int(c.p.w.k) : 0;
  const float* x = c.in.x + row * c.in.stride;
  if constexpr (KIND == LINEAR_BF16) {
    for (int i = threadIdx.x; i < bytes / 2; i += PREPARERS)
      *reinterpret_cast<bf16*>(tile + place(2 * i, row % TILE)) = i < k ? to_bf16(x[i]) : bf16(0);
  } else {
    float most = 0;
    bool fine = true;
    for (int i = threadIdx.x; i < k; i += PREPARERS) most = fmaxf(most, fabsf(x[i])), fine &= x[i] == x[i];
    most = block_max(fine ? most : INFINITY, scratch);
    const bool alive = most >= 1e-30f && most < INFINITY;
    constexpr float top = KIND == LINEAR_E4M3 ? 448.0f : 127.0f;
    const float inverse = alive ? __fdiv_rn(top, most) : 0.0f;
    for (int i = threadIdx.x; i < bytes; i += PREPARERS) {
      const float v = i < k && alive ? fminf(__fmul_rn(x[i], inverse), top) : 0.0f;
      tile[place(i, row % TILE)] = KIND == LINEAR_E4M3 ? char(to_e4m3x2(v, 0)) : char(__float2int_rn(v));
    }
    if (threadIdx.x == 0) c.in.scales[row] = alive ? __fdiv_rn(most, top) : most == INFINITY ? NAN : 0.0f;
    __syncthreads();
    if (!c.p.w.mins) return;
    for (int g = threadIdx.x; g < c.p.groups; g += PREPARERS) {
      int sum = 0;
      for (int i = 0; i < c.p.w.group; i++) sum += int8_t(tile[place(g * c.p.w.group + i, row % TILE)]);
      c.in.sums[int64_t(row) * c.p.groups + g] = sum;
    }
  }
}

template <int KIND>
__global__ void __launch_bounds__(PREPARERS) prepare(const Call c) {
  BATON_STATIC_SHARED(float, scratch, 32);
  grid_wait();
  grid_launch_next();
  const int at = blockIdx.x;
  if constexpr (KIND != LINEAR_F32) pack<KIND>(c, at, scratch);
  if (at >= c.in.rows) return;
  const Row row = c.row(at);
  if (!row.penalised()) return;
  int* counts = c.counts + int64_t(at) * c.p.w.n;
  for (int i = threadIdx.x; i < row.ask.history_count; i += PREPARERS) {
    const int token = known(c, row.ask, i);
    if (token < 0) continue;
    atomicOr(counts + token, 1);
    if (i >= row.ask.prompt_count) atomicAdd(counts + token, 2);
  }
}

// What a row's adapter adds to a panel's logits.
__device__ __forceinline__ void add_beside(const Call& c, int at, int which, float (&x)[2]) {
  if (!c.beside) return;
  const int n = int(c.p.w.n), first = which * PANEL + int(threadIdx.x) % 32;
  const float* own = c.beside + at * n + first;  // MOST_ROWS rows at most
  if (first < n) x[0] += own[0];
  if (first + 32 < n) x[1] += own[32];
}

// A warp's row of the panel: raw logits to whoever asked, else what the choice will need.
__device__ __forceinline__ void take(const Call& c, int at, int which, float (&x)[2]) {
  const Row row = c.row(at);
  const int64_t first = int64_t(which) * PANEL;
  const int lane = threadIdx.x % 32;
  if (row.ask.logits) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (first + lane + 32 * i < row.vocab) row.ask.logits[first + lane + 32 * i] = x[i];
    return;
  }
  edit(row, first, x);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (first + lane + 32 * i >= row.vocab)
      x[i] = -INFINITY;
    else if (row.filtered())
      c.kept[at * row.vocab + first + lane + 32 * i] = x[i];
  }
  const Stat found = stat_of(row, first, x);
  if (lane == 0) c.stats[int64_t(at) * c.p.count + which] = found;
}

constexpr int resident(int tiles) { return tiles > 1 ? 2 : 4; }  // blocks per processor: as many as registers allow

template <int KIND, bool GROUPED, int R>
__global__ void __launch_bounds__(32 * WARPS, resident(R)) project(const Call c) {
  BATON_SHARED(float, slabs);
  const int64_t ahead = c.p.bytes < PREFETCHED ? c.p.bytes : PREFETCHED;
  for (int64_t i = threadIdx.x * 128; i < ahead; i += 32 * WARPS * 128) prefetch_l2(c.p.panel(blockIdx.x) + i);
  grid_wait();  // weights are nobody's result: they are on their way by now
  grid_launch_next();
  const int lane = threadIdx.x % 32;
  for (int which = blockIdx.x; which < c.p.count; which += gridDim.x) {
    panel_product<KIND, GROUPED, R>(c.p, c.in, 0, which, slabs);
#ifndef BATON_MUTATION_CUDA_HEAD_SLABS
    __syncthreads();
#endif
    for (int at = threadIdx.x / 32; at < c.in.rows; at += WARPS) {
      float x[2] = {logit<KIND, GROUPED, R>(c.p, c.in, 0, which, slabs, at, lane),
                    logit<KIND, GROUPED, R>(c.p, c.in, 0, which, slabs, at, lane + 32)};
      add_beside(c, at, which, x);
      take(c, at, which, x);
    }
    __syncthreads();
  }
}

__device__ u64 best_of(const Stat* stats, int panels, u64* scratch) {
  u64 best = 0;
  bool wrong = false;
  for (int p = threadIdx.x; p < panels; p += CHOOSERS) {
    const Stat s = stats[p];
    wrong |= s.most != s.most;
    const u64 mine = rank(s.most, s.token);
    best = s.most == s.most && mine > best ? mine : best;
  }
  if (wrong) best = ~0ull;
  return block_most(best, scratch);
}

template <int KIND, bool GROUPED>
__global__ void __launch_bounds__(CHOOSERS) choose(const Call c) {
  BATON_SHARED(float, slabs);  // while a row is filtered: its likely tokens
  BATON_STATIC_SHARED(u64, scratch, CHOOSERS / 32);
  BATON_STATIC_SHARED(Drawn, found, 1);
  BATON_STATIC_SHARED(int, held, 1);
  BATON_STATIC_SHARED(float, edge, 1);
  grid_wait();
  grid_launch_next();
  const int at = blockIdx.x, lane = threadIdx.x % 32;
  const Row row = c.row(at);
  const Stat* stats = c.stats + int64_t(at) * c.p.count;
  int token = -1;
  if (!row.ask.logits) {
    const u64 best = best_of(stats, c.p.count, scratch);
    const float most = value_of(best);
    if (best != ~0ull && fabsf(most) < INFINITY) {
      token = token_of(best);
      if (row.filtered()) {
        token = filter(row, c.kept + int64_t(at) * row.vocab, most, {scratch, slabs, held, edge, found});
      } else if (row.drawn()) {
        double part;
        const int which = panel_of(row, stats, c.p.count, most, scratch, found, part), first = at / TILE * TILE;
        if (threadIdx.x < 32 * WARPS) panel_product<KIND, GROUPED, 1>(c.p, c.in, first, which, slabs);
        __syncthreads();
        if (threadIdx.x < 32) {
          float x[2] = {logit<KIND, GROUPED, 1>(c.p, c.in, first, which, slabs, at - first, lane),
                        logit<KIND, GROUPED, 1>(c.p, c.in, first, which, slabs, at - first, lane + 32)};
#if !defined(BATON_MUTATION_CUDA_HEAD_BESIDE)
          add_beside(c, at, which, x);
#endif
          const int64_t begin = int64_t(which) * PANEL;
          edit(row, begin, x);
          if (begin + lane >= row.vocab) x[0] = -INFINITY;
          if (begin + lane + 32 >= row.vocab) x[1] = -INFINITY;
          token = within(row, begin, x, part);
        }
      }
    }
  }
  if (threadIdx.x == 0) c.choices[at].token = token;
  if (!row.penalised()) return;
  __syncthreads();
  for (int i = threadIdx.x; i < row.ask.history_count; i += CHOOSERS)
    if (const int seen = known(c, row.ask, i); seen >= 0) c.counts[int64_t(at) * row.vocab + seen] = 0;
}

int64_t up(int64_t x) { return (x + 255) / 256 * 256; }

// R tiles of rows at once.
template <int KIND, bool GROUPED, int R>
int run(Call c, const float* x, int32_t rows, Choice* choices, void* stream) {
  const int most = rows < R * TILE ? rows : R * TILE;
  const int64_t n = c.p.w.n, sizes[] = {R * c.p.tile_bytes(), R * TILE * 4, int64_t(R) * TILE * c.p.groups * 4,
                                        int64_t(most) * c.p.count * int64_t(sizeof(Stat)), int64_t(most) * n * 4};
  int64_t bytes = 0;
  for (int64_t size : sizes) bytes += up(size);
  char* memory = static_cast<char*>(workspace(WORKSPACE_HEAD, size_t(bytes), stream));
  c.counts = static_cast<int*>(workspace(WORKSPACE_COUNTS, size_t(most) * n * 4, stream));
  if (!memory || !c.counts) return int(cudaErrorInvalidValue);
  c.in.packed = memory, memory += up(sizes[0]);
  c.in.scales = reinterpret_cast<float*>(memory), memory += up(sizes[1]);
  c.in.sums = reinterpret_cast<int*>(memory), memory += up(sizes[2]);
  c.stats = reinterpret_cast<Stat*>(memory), memory += up(sizes[3]);
  c.kept = reinterpret_cast<float*>(memory);
  constexpr size_t own = slab_bytes(1) > CANDIDATES * 4 ? slab_bytes(1) : CANDIDATES * 4;
  const int wide = processors() * resident(R);
  const float* beside = c.beside;
  for (int at = 0; at < rows; at += R * TILE) {
    c.in.x = x + at * c.in.stride, c.choices = choices + at, c.in.rows = rows - at < R * TILE ? rows - at : R * TILE;
    c.beside = beside ? beside + int64_t(at) * n : nullptr;
    const dim3 grid = dim3(unsigned(c.p.count < wide ? c.p.count : wide));
    int wrong = BATON_LAUNCH_PDL((prepare<KIND>), dim3(R * TILE), dim3(PREPARERS), 0, stream, c);
    if (!wrong) wrong = BATON_LAUNCH_PDL((project<KIND, GROUPED, R>), grid, dim3(32 * WARPS), slab_bytes(R), stream, c);
    if (!wrong) wrong = BATON_LAUNCH_PDL((choose<KIND, GROUPED>), dim3(unsigned(c.in.rows)), dim3(CHOOSERS), own, stream, c);
    if (wrong) return wrong;
  }
  return 0;
}

template <int KIND>
int by_scales(const Call& c, const float* x, int32_t rows, Choice* choices, void* stream) {
  if (c.p.w.group == 0) {
    if (rows <= TILE) return run<KIND, false, 1>(c, x, rows, choices, stream);
    return run<KIND, false, 4>(c, x, rows, choices, stream);
  }
  if (rows <= TILE) return run<KIND, true, 1>(c, x, rows, choices, stream);
  return run<KIND, true, 2>(c, x, rows, choices, stream);
}

}  // namespace
}  // namespace baton

// w is a host struct; what it points at, x, choices and what they point at lie in device memory.
// `beside` (rows, vocab), added to the products before anything else looks at them; or null.
BATON_API int baton_lm_head_beside(const baton::PackedLinear* w, const float* x, int64_t x_stride, int32_t rows, const float* beside,
                                   baton::Choice* choices, void* stream) {
  using namespace baton;
  if (!rows) return 0;
  Call c{Panels(*w), {}, nullptr, nullptr, nullptr, nullptr, beside};
  c.in.stride = x_stride;
  switch (w->kind) {
    case LINEAR_F32: return run<LINEAR_F32, false, 1>(c, x, rows, choices, stream);
    case LINEAR_BF16:
      if (rows <= TILE) return run<LINEAR_BF16, false, 1>(c, x, rows, choices, stream);
      return run<LINEAR_BF16, false, 4>(c, x, rows, choices, stream);
    case LINEAR_E4M3:
      if (rows <= TILE) return run<LINEAR_E4M3, false, 1>(c, x, rows, choices, stream);
      return run<LINEAR_E4M3, false, 2>(c, x, rows, choices, stream);
    case LINEAR_W8: return by_scales<LINEAR_W8>(c, x, rows, choices, stream);
    case LINEAR_W4: return by_scales<LINEAR_W4>(c, x, rows, choices, stream);
    default: return int(cudaErrorInvalidValue);
  }
}

BATON_API int baton_lm_head(const baton::PackedLinear* w, const float* x, int64_t x_stride, int32_t rows, baton::Choice* choices,
                            void* stream) {
  return baton_lm_head_beside(w, x, x_stride, rows, nullptr, choices, stream);
}
