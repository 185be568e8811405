// lora on a GPU in two launches: `shrink` takes tiles of rows of one adapter through A, `expand` takes the sums through B and
// adds them. Knows nothing of checkpoints.
//
// Groups are read on the device alone, and the grids depend on their number and on that of all rows: a captured launch serves
// any batch of its sizes. A row's sums are those that it has alone: a lane's quads of k in order and a butterfly over the
// lanes, then a chain over the ranks.
#include "../cuda/device.cuh"
#include "../cuda/runtime.cuh"
#include "rows.cuh"

namespace baton {
namespace {

constexpr int THREADS = 128, WARPS = THREADS / 32, QUAD = 4, PANEL = int(LORA_PANEL), TILE = int(LORA_TILE), MOST_RANK = 256;
constexpr int BESIDE = THREADS / PANEL;                // panels of a block
constexpr int SHRINKERS = 16, EXPANDERS = 32;          // blocks of a tile, each with its share of ranks or panels

struct Call {
  const LoraGroup* groups;
  int64_t count, site;
  const float* x;
  int64_t x_stride;
  const int32_t* tokens;
  float* out;
  int64_t out_stride;
  float* sums;
};

// The rows of one adapter that a block takes; none where the tile isn't there.
struct Tile {
  const LoraPart* parts;
  const int32_t* rows;
  int64_t part_count;
  int count;
};

__device__ __forceinline__ Tile tile_of(const Call& c, int64_t which) {
  for (int64_t g = 0; g < c.count; g++) {
    const LoraGroup& group = c.groups[g];
    const int64_t tiles = (group.count + TILE - 1) / TILE;
    if (which >= tiles) {
      which -= tiles;
      continue;
    }
#if defined(BATON_MUTATION_CUDA_LORA_GROUP)
    const LoraSite& site = c.groups[0].sites[c.site];
#else
    const LoraSite& site = group.sites[c.site];
#endif
    const int64_t left = group.count - which * TILE;
    return {site.parts, group.rows + which * TILE, site.count, int(left < TILE ? left : TILE)};
  }
  return {nullptr, nullptr, 0, 0};
}

__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(bf16 x) { return from_bf16(x); }

// Elements i … i + 3 of n, zeros past the end. `aligned`: four may be read at once.
template <class T>
__device__ __forceinline__ float4 quad(const T* p, int64_t i, int64_t n, bool aligned) {
  if (aligned && i + QUAD <= n) return load4(p + i);
  float four[QUAD] = {0, 0, 0, 0};
#if defined(BATON_MUTATION_CUDA_LORA_TAIL)
  if (i + QUAD > n) return make_float4(0, 0, 0, 0);
#endif
#pragma unroll
  for (int j = 0; j < QUAD; j++)
    if (i + j < n) four[j] = number(p[i + j]);
  return make_float4(four[0], four[1], four[2], four[3]);
}

template <class T>
__device__ __forceinline__ bool quads(const T* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % (QUAD * sizeof(T)) == 0 && stride % QUAD == 0;
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// One rank of A by the tile's rows: a warp.
template <class T>
__device__ void shrink_rank(const Call& c, const Tile& tile, const LoraPart& p, int rank, float* sums) {
  const T* a = static_cast<const T*>(p.a) + int64_t(rank) * p.k;
  const bool by_four = quads(a, QUAD), rows_by_four = quads(c.x, c.x_stride);
  const int lane = int(threadIdx.x) % 32;
  float found[TILE] = {};
#pragma unroll 2
  for (int64_t i = QUAD * lane; i < p.k; i += QUAD * 32) {
    const float4 w = quad(a, i, p.k, by_four);
#pragma unroll
    for (int r = 0; r < TILE; r++)
      if (r < tile.count) found[r] = dot(quad(c.x + tile.rows[r] * c.x_stride, i, p.k, rows_by_four), w, found[r]);
  }
#pragma unroll
  for (int r = 0; r < TILE; r++) {
    const float sum = warp_sum(found[r]);
    if (lane == 0 && r < tile.count) sums[r * LORA_SUMS + rank] = sum * p.scale;
  }
}

// One rank of a table of tokens, for the tile's rows.
template <class T>
__device__ void look_up(const Call& c, const Tile& tile, const LoraPart& p, int rank, float* sums) {
  const int r = int(threadIdx.x) % 32;
  if (r >= tile.count) return;
  const int64_t token = c.tokens[tile.rows[r]];
  sums[r * LORA_SUMS + rank] = number(static_cast<const T*>(p.a)[token * p.rank + rank]) * p.scale;
}

template <class T>
__device__ __forceinline__ void shrink_one(const Call& c, const Tile& tile, const LoraPart& p, int rank, float* sums) {
  if (p.looked_up) look_up<T>(c, tile, p, rank, sums);
  else shrink_rank<T>(c, tile, p, rank, sums);
}

__global__ void __launch_bounds__(THREADS) shrink(const Call c) {
  grid_wait();
  grid_launch_next();
  const Tile tile = tile_of(c, blockIdx.x);
  float* sums = c.sums + int64_t(blockIdx.x) * TILE * LORA_SUMS;
  for (int64_t at = 0; at < tile.part_count; at++) {
    const LoraPart p = tile.parts[at];
    for (int rank = int(blockIdx.y) * WARPS + int(threadIdx.x) / 32; rank < p.rank; rank += SHRINKERS * WARPS) {
      if (p.dtype == BF16) shrink_one<bf16>(c, tile, p, rank, sums);
      else shrink_one<float>(c, tile, p, rank, sums);
    }
#if !defined(BATON_MUTATION_CUDA_LORA_PART)
    sums += p.rank;
#endif
  }
}

// A thread's output of a panel for the tile's rows.
template <class T>
__device__ void expand_one(const Call& c, const Tile& tile, const LoraPart& p, int64_t panel, const float* sums) {
  const int column = int(threadIdx.x) % PANEL;
  const T* b = static_cast<const T*>(p.b) + panel * p.rank * PANEL + column;
  float found[TILE] = {};
#pragma unroll 4
  for (int j = 0; j < p.rank; j++) {
    const float w = number(b[j * PANEL]);
#pragma unroll
    for (int r = 0; r < TILE; r++) found[r] = fmaf(sums[r * MOST_RANK + j], w, found[r]);
  }
  const int64_t at = panel * PANEL + column;
  if (at >= p.n) return;
#pragma unroll
  for (int r = 0; r < TILE; r++)
    if (r < tile.count) c.out[tile.rows[r] * c.out_stride + p.first + at] += found[r];
}

__global__ void __launch_bounds__(THREADS) expand(const Call c) {
  BATON_STATIC_SHARED(float, held, TILE * MOST_RANK);
  grid_wait();
  grid_launch_next();
  const Tile tile = tile_of(c, blockIdx.x);
  const float* sums = c.sums + int64_t(blockIdx.x) * TILE * LORA_SUMS;
  for (int64_t at = 0; at < tile.part_count; at++) {
    const LoraPart p = tile.parts[at];
    const int64_t panels = (p.n + PANEL - 1) / PANEL;
#if !defined(BATON_MUTATION_CUDA_LORA_REUSE)
    __syncthreads();
#endif
    for (int i = int(threadIdx.x); i < TILE * p.rank; i += THREADS) {
      const int r = i / p.rank, j = i % p.rank;
      held[r * MOST_RANK + j] = r < tile.count ? sums[r * LORA_SUMS + j] : 0.0f;
    }
#if !defined(BATON_MUTATION_CUDA_LORA_BARRIER)
    __syncthreads();
#endif
    for (int64_t panel = int64_t(blockIdx.y) * BESIDE + threadIdx.x / PANEL; panel < panels; panel += EXPANDERS * BESIDE) {
      if (p.dtype == BF16) expand_one<bf16>(c, tile, p, panel, held);
      else expand_one<float>(c, tile, p, panel, held);
    }
#if !defined(BATON_MUTATION_CUDA_LORA_PART)
    sums += p.rank;
#endif
  }
}

}  // namespace
}  // namespace baton

BATON_API int baton_lora_rows(const baton::LoraGroup* groups, int64_t count, int64_t rows, int64_t site, const float* x,
                              int64_t x_stride, const int32_t* tokens, float* out, int64_t out_stride, float* sums, void* stream) {
  using namespace baton;
  const int64_t tiles = lora_tiles(count, rows);
  if (!tiles) return 0;
  const Call c{groups, count, site, x, x_stride, tokens, out, out_stride, sums};
  const dim3 threads = dim3(THREADS);
  const int wrong = BATON_LAUNCH_PDL(shrink, dim3(unsigned(tiles), SHRINKERS), threads, 0, stream, c);
  return wrong ? wrong : BATON_LAUNCH_PDL(expand, dim3(unsigned(tiles), EXPANDERS), threads, 0, stream, c);
}

// The same with room of its own, for groups that the host can read as well: for the suite, not in a step.
BATON_API int baton_lora(const baton::LoraGroup* groups, int64_t count, int64_t site, const float* x, int64_t x_stride,
                         const int32_t* tokens, float* out, int64_t out_stride, void* stream) {
  using namespace baton;
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) rows += groups[i].count;
  Room room;
  bool moved = false;
  if (const int wrong = room.reach(size_t(lora_tiles(count, rows) * LORA_TILE * LORA_SUMS) * 4, moved)) return wrong;
  const int wrong = baton_lora_rows(groups, count, rows, site, x, x_stride, tokens, out, out_stride, static_cast<float*>(room.at), stream);
  return wrong ? wrong : stream_wait(stream);
}
