// Rows sorted by expert times their experts' weights, on tensor cores. Included by cuda.cu alone.
//
// A unit of work is (expert, 128 of its weight rows, up to 64 of its rows, or 16 where it has no more); blocks take units in turn. Both
// operands come 64 inputs at a time by cp.async, three stages deep. A row's sums are taken in one order, whatever is beside it.
#pragma once
#include "../cuda/scan.cuh"
#include "../cuda/silu.cuh"
#include "route.cuh"

namespace baton {
namespace {

constexpr int DEPTH = 64, STRIDE = DEPTH + 8, STAGES = 3, WEIGHT_ROWS = 128, MOST_TILE = 64, FEW = 16;
constexpr int STAGE = (WEIGHT_ROWS + MOST_TILE) * STRIDE;  // elements: weights, then rows
constexpr size_t GROUPED_BYTES = size_t(STAGES) * STAGE * 2;

// One of the two layers. Up to the first's end a tile's weight rows are 16 of the gate and their 16 of up, in turn, so that a lane
// has both; the second's are as they lie.
struct Layer {
  const uint16_t *weights, *rows;
  int64_t inputs, outputs;  // outputs: after SwiGLU
  bool gated;
  const int* order;         // null: rows lie by place
  int chosen;

  __device__ int per_tile() const { return gated ? WEIGHT_ROWS / 2 : WEIGHT_ROWS; }
  __device__ int tiles() const { return int((outputs + per_tile() - 1) / per_tile()); }
  // Weight row `i` of the tile at `first`, and whether there is one.
  __device__ bool weight_row(int64_t first, int i, int64_t& row) const {
    const int64_t output = gated ? first + i / 32 * 16 + i % 16 : first + i;
    row = gated && i % 32 >= 16 ? outputs + output : output;
    return output < outputs;
  }
};

struct Unit {
  int expert, first, rows;  // first place
  int64_t output;           // first of the tile
};

// ends[e]: units up to the last of expert e. Returns how many there are.
__device__ int count_units(const Layer& layer, const int* places, int experts, int* ends, int* scratch) {
  constexpr int each = MOST_EXPERTS / THREADS;
  const int begin = int(threadIdx.x) * each;
  int mine[each], sum = 0;
#pragma unroll
  for (int i = 0; i < each; i++) {
    const int e = begin + i, rows = e < experts ? places[e] - (e ? places[e - 1] : 0) : 0;
    mine[i] = sum += (rows + MOST_TILE - 1) / MOST_TILE * layer.tiles();
  }
  int total;
  const int before = sum_before<WARPS>(sum, threadIdx.x, scratch, total, [] { __syncthreads(); });
#pragma unroll
  for (int i = 0; i < each; i++) ends[begin + i] = before + mine[i];
  __syncthreads();
  return total;
}

// An expert's units: weight tile by weight tile, so that its rows meet a tile while it is in L2.
__device__ Unit unit_of(const Layer& layer, const int* places, const int* ends, int experts, int unit) {
  const int expert = first_behind(ends, experts, unit);
  const int from = expert ? places[expert - 1] : 0, rows = places[expert] - from, blocks = (rows + MOST_TILE - 1) / MOST_TILE;
  const int within = unit - (expert ? ends[expert - 1] : 0), block = within % blocks;
  Unit u;
  u.expert = expert, u.first = from + block * MOST_TILE, u.output = int64_t(within / blocks) * layer.per_tile();
  u.rows = rows - block * MOST_TILE < MOST_TILE ? rows - block * MOST_TILE : MOST_TILE;
  return u;
}

// Inputs from … from + DEPTH - 1 of both operands; what there isn't is zero.
template <int M>
__device__ void load_stage(const Layer& layer, const Unit& u, const int* sources, int64_t from, uint16_t* stage) {
  constexpr int CHUNKS = DEPTH / 8;
#pragma unroll
  for (int n = 0; n < WEIGHT_ROWS * CHUNKS / THREADS; n++) {
    const int i = (n * THREADS + int(threadIdx.x)) / CHUNKS, chunk = int(threadIdx.x) % CHUNKS;
    int64_t row;
    const bool has = layer.weight_row(u.output, i, row) && from + chunk * 8 < layer.inputs;
    const int64_t all = layer.gated ? 2 * layer.outputs : layer.outputs;
    cp_async_16(stage + i * STRIDE + chunk * 8, layer.weights + (has ? (u.expert * all + row) * layer.inputs + from + chunk * 8 : 0), has);
  }
#pragma unroll
  for (int n = 0; n < M * CHUNKS / THREADS; n++) {
    const int i = (n * THREADS + int(threadIdx.x)) / CHUNKS, chunk = int(threadIdx.x) % CHUNKS;
    const bool has = i < u.rows && from + chunk * 8 < layer.inputs;
    cp_async_16(stage + (WEIGHT_ROWS + i) * STRIDE + chunk * 8, layer.rows + (has ? sources[i] * layer.inputs + from + chunk * 8 : 0), has);
  }
}

// sums[m][n]: rows 16 m … of the unit by eight of the warp's 32 weight rows.
template <int M>
__device__ void multiply_unit(const Layer& layer, const Unit& u, const int* sources, uint16_t* stages, float (&sums)[M / 16][4][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = int((layer.inputs + DEPTH - 1) / DEPTH);
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < steps) load_stage<M>(layer, u, sources, int64_t(s) * DEPTH, stages + s * STAGE);
    cp_async_commit();
  }
  for (int step = 0; step < steps; step++) {
    cp_async_wait<STAGES - 2>();
#ifndef BATON_MUTATION_CUDA_MOE_STAGE_BARRIER
    __syncthreads();  // the stage is whole, and nobody is at the one before
#endif
    const int next = step + STAGES - 1;
    if (next < steps) load_stage<M>(layer, u, sources, int64_t(next) * DEPTH, stages + next % STAGES * STAGE);
    cp_async_commit();
    const uint16_t* weights = stages + step % STAGES * STAGE + (warp * 32 + lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
    const uint16_t* rows = stages + step % STAGES * STAGE + (WEIGHT_ROWS + lane % 16) * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
      uint32_t b[2][4];
      ldmatrix_x4(b[0], weights + 16 * k);
      ldmatrix_x4(b[1], weights + 16 * STRIDE + 16 * k);
#pragma unroll
      for (int m = 0; m < M / 16; m++) {
        uint32_t a[4];
        ldmatrix_x4(a, rows + m * 16 * STRIDE + 16 * k);
#pragma unroll
        for (int n = 0; n < 4; n++) mma_bf16_16816(sums[m][n], a, b[n / 2] + n % 2 * 2);
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();
}

// What adapters add to gates and ups, by place.
struct Added {
  const LoraSite* sites;  // of those that have anything
  const float* values;
};

template <int M, bool adapted>
__device__ void one_unit(const Layer& layer, const Unit& u, const Added& added, int* sources, uint16_t* stages, void* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  for (int i = threadIdx.x; i < u.rows; i += THREADS) sources[i] = layer.order ? layer.order[u.first + i] / layer.chosen : u.first + i;
  __syncthreads();
  float sums[M / 16][4][4] = {};
  multiply_unit<M>(layer, u, sources, stages, sums);
#pragma unroll
  for (int m = 0; m < M / 16; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = 16 * m + g + 8 * half;
      if (row >= u.rows) continue;
      const int64_t at = (u.first + row) * layer.outputs;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float *a = sums[m][n] + 2 * half, *up = sums[m][(n + 2) % 4] + 2 * half;
        const int64_t output = u.output + (layer.gated ? warp * 16 : warp * 32) + 8 * n + 2 * t;
        if (output >= layer.outputs || (layer.gated && n >= 2)) continue;
        if (adapted && added.sites[u.first + row].count) {
          const float* more = added.values + 2 * at + output;
          a[0] += more[0], a[1] += more[1], up[0] += more[layer.outputs], up[1] += more[layer.outputs + 1];
        }
        if (layer.gated)
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + at + output) = to_bf16x2(silu(a[0]) * up[0], silu(a[1]) * up[1]);
        else
          *reinterpret_cast<float2*>(static_cast<float*>(out) + at + output) = make_float2(a[0], a[1]);
      }
    }
}

// `adapted`: of the first layer alone, where rows may have adapters.
template <bool gated, bool adapted>
__global__ void __launch_bounds__(THREADS) grouped(Moe m, Routed r) {
  BATON_SHARED(uint16_t, stages);
  BATON_STATIC_SHARED(int, ends, MOST_EXPERTS);
  BATON_STATIC_SHARED(int, sources, MOST_TILE);
  BATON_STATIC_SHARED(int, scratch, WARPS);
  const Layer layer = gated ? Layer{m.gate_up, r.x, m.hidden, m.inner, true, r.order, m.chosen}
                            : Layer{m.down, r.between, m.inner, m.hidden, false, nullptr, 1};
  void* out = gated ? static_cast<void*>(r.between) : static_cast<void*>(r.y);
  const Added added{r.beside_gates, r.added};
  grid_wait();
  grid_launch_next();
  const int units = count_units(layer, r.ends, m.experts, ends, scratch);
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Unit u = unit_of(layer, r.ends, ends, m.experts, unit);
    if (u.rows <= FEW)
      one_unit<FEW, adapted>(layer, u, added, sources, stages, out);
    else
      one_unit<MOST_TILE, adapted>(layer, u, added, sources, stages, out);
  }
}

}  // namespace
}  // namespace baton
