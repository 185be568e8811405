// What adapters have beside a layer of experts, by place in the order of experts: two launches for each of the two layers. Included
// by cuda.cu alone. Knows nothing of who loads adapters.
//
// A block takes TILE places in a row. Those among them that share expert and adapter read its matrices once; a place's sums are those
// that it has alone: a lane's quads of k in order and a butterfly over the lanes, then a chain over the ranks of each part in order.
#pragma once
#include "adapted.h"
#include "grouped.cuh"

namespace baton {
namespace {

constexpr int TILE = 8, SHRINKERS = 8, EXPANDERS = 16;  // blocks of a tile, each with its share of ranks or outputs
constexpr int SUMS = 1024;  // ranks of all parts beside one expert's layer: gate, up and the parameters of both, of 256 each

// The parts beside outputs first … first + outputs - 1 of a stacked layer, which lie in their order.
__device__ LoraSite parts_beside(const LoraSite& site, int64_t first, int64_t outputs) {
  int64_t from = 0, end = site.count;
  while (from < end) {
    const int64_t middle = (from + end) / 2;
    if (site.parts[middle].first < first) from = middle + 1;
    else end = middle;
  }
  for (end = from; end < site.count && site.parts[end].first < first + outputs;) end++;
#if defined(BATON_MUTATION_CUDA_MOE_EXPERT)
  return {site.parts, end - from};
#else
  return {site.parts + from, end - from};
#endif
}

// A warp has a row: what its adapter has beside each of its experts. `first`: the number of row 0 among the step's.
__global__ void __launch_bounds__(THREADS) find_beside(Moe m, ExpertAdapters of, int rows, int64_t first, Routed r) {
  const int row = int(blockIdx.x) * WARPS + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
  grid_wait();
  grid_launch_next();
  if (row >= rows) return;  // the whole warp
  const LoraSite* sites = nullptr;
  for (int64_t g = 0; g < of.count && !sites; g++) {
    bool is = false;
#if defined(BATON_MUTATION_CUDA_MOE_FIRST)
    for (int64_t i = lane; i < of.groups[g].count; i += 32) is |= of.groups[g].rows[i] == row;
#else
    for (int64_t i = lane; i < of.groups[g].count; i += 32) is |= of.groups[g].rows[i] == first + row;
#endif
    if (__any_sync(ALL_LANES, is)) sites = of.groups[g].sites;
  }
  if (lane >= m.chosen) return;
  const int64_t expert = r.experts[row * m.chosen + lane], place = r.place[row * m.chosen + lane];
  r.beside_gates[place] = sites ? parts_beside(sites[of.gate_up], expert * 2 * m.inner, 2 * m.inner) : LoraSite{nullptr, 0};
  r.beside_down[place] = sites ? parts_beside(sites[of.down], expert * m.hidden, m.hidden) : LoraSite{nullptr, 0};
}

// One of the two layers: its rows as the experts read them, what adapters have beside each place, and where their products go.
struct Beside {
  const bf16* rows;
  int64_t inputs, outputs;  // of an expert
  const LoraSite* sites;    // by place
  const int* order;         // null: rows lie by place
  int chosen, places;
  float* sums;              // (places, SUMS)
  float* out;               // (places, outputs)

  __device__ int row(int place) const { return order ? order[place] / chosen : place; }
};

// Which of the tile's places have the same parts as place `leader`, a bit each; none where one before it leads them, or it has none.
__device__ __forceinline__ unsigned led_by(const Beside& b, int first, int leader) {
  const LoraSite own = b.sites[first + leader];
  if (!own.count) return 0;
  unsigned led = 0;
#pragma unroll
  for (int i = 0; i < TILE; i++) {
#if defined(BATON_MUTATION_CUDA_MOE_ADAPTER)
    const bool same = first + i < b.places && b.sites[first + i].count;
#else
    const bool same = first + i < b.places && b.sites[first + i].count && b.sites[first + i].parts == own.parts;
#endif
    if (same && i < leader) return 0;
    led |= unsigned(same) << i;
  }
  return led;
}

__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(bf16 x) { return from_bf16(x); }

__device__ __forceinline__ float quad_dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// One rank of A by the led places: a warp.
template <class T>
__device__ void shrink_led(const Beside& b, int first, unsigned led, const LoraPart& p, int rank, float* sums) {
  const T* a = static_cast<const T*>(p.a) + int64_t(rank) * p.k;
  const int lane = int(threadIdx.x) % 32;
  int rows[TILE];
  float found[TILE] = {};
#pragma unroll
  for (int n = 0; n < TILE; n++) rows[n] = b.row(led >> n & 1 ? first + n : first);
#pragma unroll 1
  for (int64_t i = 4 * lane; i < p.k; i += 4 * 32) {
    const float4 w = load4(a + i);
#pragma unroll
    for (int n = 0; n < TILE; n++)
      if (led >> n & 1) found[n] = quad_dot(load4(b.rows + rows[n] * p.k + i), w, found[n]);
  }
#pragma unroll
  for (int n = 0; n < TILE; n++) {
    const float sum = warp_sum(found[n]);
    if (lane == 0 && (led >> n & 1)) sums[n * SUMS + rank] = sum * p.scale;
  }
}

__global__ void __launch_bounds__(THREADS, 4) shrink_beside(const Beside b) {
  const int first = int(blockIdx.x) * TILE, warp = int(blockIdx.y) * WARPS + int(threadIdx.x) / 32;
  grid_wait();
  grid_launch_next();
  for (int leader = 0; leader < TILE && first + leader < b.places; leader++) {
    const unsigned led = led_by(b, first, leader);
    if (!led) continue;
    const LoraSite site = b.sites[first + leader];
    float* sums = b.sums + int64_t(first) * SUMS;
    for (int64_t at = 0; at < site.count; at++) {
      const LoraPart& p = site.parts[at];
      for (int rank = warp; rank < p.rank; rank += SHRINKERS * WARPS) {
        if (p.dtype == BF16) shrink_led<bf16>(b, first, led, p, rank, sums);
        else shrink_led<float>(b, first, led, p, rank, sums);
      }
      sums += p.rank;
    }
  }
}

// Output `at` of a part's panels for the led places.
template <class T>
__device__ void expand_led(unsigned led, const LoraPart& p, int64_t at, const float* sums, float (&found)[TILE]) {
  const T* w = static_cast<const T*>(p.b) + at / LORA_PANEL * p.rank * LORA_PANEL + at % LORA_PANEL;
  float own[TILE] = {};
#pragma unroll 4
  for (int j = 0; j < p.rank; j++) {
    const float by = number(w[j * LORA_PANEL]);
#pragma unroll
    for (int n = 0; n < TILE; n++)
      if (led >> n & 1) own[n] = fmaf(sums[n * SUMS + j], by, own[n]);
  }
#pragma unroll
  for (int n = 0; n < TILE; n++) found[n] += own[n];
}

// A thread has an output of the layer. `adds`: to what lies there; else places with parts get all of their outputs, zeros among them.
template <bool adds>
__global__ void __launch_bounds__(THREADS) expand_beside(const Beside b) {
  const int first = int(blockIdx.x) * TILE;
  grid_wait();
  grid_launch_next();
  for (int leader = 0; leader < TILE && first + leader < b.places; leader++) {
    const unsigned led = led_by(b, first, leader);
    if (!led) continue;
    const LoraSite site = b.sites[first + leader];
    const int64_t stacked = site.parts[0].first / b.outputs * b.outputs;  // of the expert's first output
    for (int64_t output = int64_t(blockIdx.y) * THREADS + threadIdx.x; output < b.outputs; output += EXPANDERS * THREADS) {
      const float* sums = b.sums + int64_t(first) * SUMS;
      float found[TILE] = {};
      for (int64_t part = 0; part < site.count; part++) {
        const LoraPart p = site.parts[part];
        const int64_t at = output - (p.first - stacked);
        if (at >= 0 && at < p.n) {
          if (p.dtype == BF16) expand_led<bf16>(led, p, at, sums, found);
          else expand_led<float>(led, p, at, sums, found);
        }
#if !defined(BATON_MUTATION_CUDA_MOE_PART)
        sums += p.rank;
#endif
      }
#pragma unroll
      for (int n = 0; n < TILE; n++) {
        if (!(led >> n & 1)) continue;
        float* to = b.out + int64_t(first + n) * b.outputs + output;
        *to = adds ? *to + found[n] : found[n];
      }
    }
  }
}

}  // namespace
}  // namespace baton
