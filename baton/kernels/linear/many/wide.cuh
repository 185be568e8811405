// Many rows: 128 rows by 128 outputs a block, through stages of two blocks of K that all warps share. A warp has 64 rows by
// 32 outputs. K is summed by the same slices as in skinny.cuh, one after the other: the same bits. Split along K (split.cuh), a block
// has a part of the slices.
#pragma once
#include "../skinny.cuh"
#include "split.cuh"

namespace baton {
namespace {

constexpr int WIDE_ROWS = 128, WIDE_GROUPS = 4, WIDE_NT = 8;  // groups: of 32 outputs

template <int F, int MODE>
struct Stages {
  using T = Traits<F>;
  static constexpr int BLOCKS = 2, STAGES = 4;
  static constexpr int LINE = BLOCKS * 4 * T::PIECE, STRIDE = LINE + LINE / 2;  // of a row: lanes' reads fall into all banks
  static constexpr int STEPS = BLOCKS * T::STEPS, CHUNKS = WIDE_GROUPS * PLACES / 4;  // chunks of 16 bytes in a step
  static constexpr int PARTS = MODE == PLAIN ? 0 : MODE == ANY ? 2 * BLOCKS : BLOCKS;
  static constexpr int ROWS = WIDE_ROWS * STRIDE, WEIGHTS = STEPS * CHUNKS * 16, SCALES = PARTS * WIDE_GROUPS * 64;
  static constexpr int STAGE = ROWS + WEIGHTS + (MODE == ANY ? 2 : 1) * SCALES;
  static constexpr bool TOTALS = !Total<F, MODE>::exact;
  static constexpr size_t BYTES = size_t(STAGES) * STAGE + (TOTALS ? WIDE_NT * 8 * THREADS * 4 : 0);

  static constexpr int INPUTS = BLOCKS * T::INPUTS;  // of a stage

  const Call& c;
  char* memory;
  int64_t first_group;
  int first_row, part, parts, blocks;  // parts: of a block, of `part` inputs each
  int first, last;                     // stages, from the first one up to the last
  Groups loaded;
  const char* chunks;                     // of this thread, in the first step
  const fp16 *group_scales, *group_mins;  // of the threads that copy them

  __device__ Stages(const Call& call, const Parts& p, char* at)
      : c(call), memory(at), first_group(int64_t(blockIdx.y) * WIDE_GROUPS), first_row(blockIdx.x * WIDE_ROWS),
        part(MODE == ANY && c.w.group % 32 ? 16 : 32), parts(part == 16 ? 2 : 1),
        blocks((c.padded + T::INPUTS - 1) / T::INPUTS), first(int(blockIdx.z) * p.stages), last(p.at ? min(first + p.stages, count()) : count()),
        loaded(c, part, first * INPUTS) {
    const int chunk = threadIdx.x % CHUNKS;
    chunks = chunks_of<F>(c, c.output(first_group + chunk / 8, chunk % 8 * 4));
    const int64_t group = groups_of(c, c.output(first_group + threadIdx.x / 4, threadIdx.x % 4 * 8));
    group_scales = c.w.scales + group, group_mins = c.w.mins + group;
  }

  __device__ __forceinline__ int count() const { return (blocks + BLOCKS - 1) / BLOCKS; }
  __device__ __forceinline__ char* slot(int stage) const { return memory + stage % STAGES * STAGE; }
  __device__ __forceinline__ char* row(int stage, int r) const { return slot(stage) + r * STRIDE; }
  // Chunks of a step change places, so that lanes that read different steps fall into different banks.
  __device__ __forceinline__ char* weights(int stage, int step, int chunk) const {
    return slot(stage) + ROWS + (step * CHUNKS + (chunk ^ (step / T::CHUNKS % 4 * 2))) * 16;
  }
  __device__ __forceinline__ char* scales(int stage, int number, bool mins) const {
    return slot(stage) + ROWS + WEIGHTS + (mins ? SCALES : 0) + number * WIDE_GROUPS * 64;
  }

  __device__ __forceinline__ void load_weights(int stage) {
    if (stage >= last) return;
    const int steps = panel_steps<F>(c);
#pragma unroll
    for (int i = threadIdx.x; i < STEPS * CHUNKS; i += THREADS) {
      const int step = stage * STEPS + i / CHUNKS, chunk = threadIdx.x % CHUNKS;
      const bool filled = step < steps && c.covers(first_group + chunk / 8);
      cp_async_16(weights(stage, i / CHUNKS, chunk), filled ? chunks + int64_t(step) * 256 : c.w.data, filled);
    }
    if constexpr (MODE != PLAIN)
      for (int p = 0; p < BLOCKS * parts; p++) {
        const int group = loaded.index;
        if (stage * BLOCKS * 32 + p * part >= c.padded || !loaded.closes() || threadIdx.x >= 4 * WIDE_GROUPS) continue;
        if (!c.covers(first_group + threadIdx.x / 4)) continue;
        cp_async_16(scales(stage, p, false) + 16 * threadIdx.x, group_scales + group_place(group));
        if (MODE == ANY && c.w.mins) cp_async_16(scales(stage, p, true) + 16 * threadIdx.x, group_mins + group_place(group));
      }
  }

  __device__ __forceinline__ void load_rows(int stage) {
    if (stage >= last) return;
#pragma unroll
    for (int i = threadIdx.x; i < WIDE_ROWS * LINE / 16; i += THREADS) {
      const int r = i / (LINE / 16), at = i % (LINE / 16) * 16, byte = stage * LINE + at;
      const bool filled = first_row + r < c.m && byte < c.valid;
      cp_async_16(row(stage, r) + at, c.x + (filled ? (first_row + r) * c.x_bytes + byte : 0), filled);
    }
  }
};

// The warp's part of a stage; `left`: inputs up to the end of the slice.
template <int F, int MODE>
__device__ __forceinline__ void multiply(const Stages<F, MODE>& s, int stage, Tile<F, MODE, WIDE_NT>& tile, Groups& done, int& left,
                                         float* totals) {
  using T = Traits<F>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int columns = warp % WIDE_GROUPS, rows = warp / WIDE_GROUPS * WIDE_NT * 8;
#pragma unroll
  for (int b = 0; b < 2; b++) {
    if (stage * 2 + b >= s.blocks) return;
    uint4 w[2] = {};
    for (int i = 0; i < T::CHUNKS; i++)
      w[i] = *reinterpret_cast<const uint4*>(s.weights(stage, b * T::STEPS + T::CHUNKS * t + i, columns * 8 + g));
    uint32_t x[WIDE_NT][T::PIECE / 4];
#pragma unroll
    for (int h = 0; h < WIDE_NT; h++)
      std::memcpy(x[h], __builtin_assume_aligned(s.row(stage, rows + 8 * h + g) + (4 * b + t) * T::PIECE, T::PIECE), T::PIECE);
    if constexpr (MODE == PLAIN) {
      tile.multiply(x, w, -1);
    } else {
      for (int p = 0; p < s.parts; p++) {
        const int number = b * s.parts + p;
        if (stage * 64 + number * s.part >= s.c.padded) break;
        tile.multiply(x, w, s.part == 32 ? -1 : p);
        if (!done.closes()) continue;
        const int at = columns * 64 + 8 * g;
        uint2 low = make_uint2(0, 0);
        if (MODE == ANY && s.c.w.mins) low = *reinterpret_cast<const uint2*>(s.scales(stage, number, true) + at);
        tile.close_group(*reinterpret_cast<const uint2*>(s.scales(stage, number, false) + at), low, s.c.w.mins);
      }
    }
    if constexpr (Stages<F, MODE>::TOTALS) {
      left -= T::INPUTS;
      if (left > 0 && stage * 2 + b + 1 < s.blocks) continue;
      left = s.c.slice;
#pragma unroll
      for (int i = 0; i < WIDE_NT * 8; i++) {
        float& total = totals[i * THREADS + threadIdx.x];
        total = __fadd_rn(total, tile.value(i / 8, i / 2 % 4, i % 2));
      }
      tile.clear_sums();
      tile.clear_chain();
    }
  }
}

template <int F, int MODE>
__device__ __forceinline__ void write_wide(const Stages<F, MODE>& s, const Parts& p, const Tile<F, MODE, WIDE_NT>& tile, const float* totals) {
  const Call& c = s.c;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  const int64_t n = c.output(s.first_group + warp % WIDE_GROUPS, 4 * g);
#pragma unroll
  for (int h = 0; h < 2 * WIDE_NT; h++) {
    const int row = s.first_row + warp / WIDE_GROUPS * WIDE_NT * 8 + h / 2 * 8 + lane % 4 * 2 + h % 2;
    const auto sum = [&](int q) {
      return Stages<F, MODE>::TOTALS ? totals[((h / 2 * 4 + q) * 2 + h % 2) * THREADS + threadIdx.x] : tile.value(h / 2, q, h % 2);
    };
    if (p.at) {
      leave_four(p, c, row, n, sum);
      continue;
    }
    write_four(c, g, row, n, [&](int q) {
      Total<F, MODE> total;
      if (Stages<F, MODE>::TOTALS)
        total.sum = sum(q);
      else
        total.add(sum(q));
      return total.get();
    });
  }
}

template <int F, int MODE>
__global__ void __launch_bounds__(THREADS, 1) wide(const Call c, const Parts p) {
  using S = Stages<F, MODE>;
  BATON_SHARED(char, memory);
  S stages(c, p, memory);
  Groups done(c, stages.part, stages.first * S::INPUTS);
  float* totals = reinterpret_cast<float*>(memory + S::STAGES * S::STAGE);
#pragma unroll
  for (int s = 0; s < S::STAGES - 1; s++) stages.load_weights(stages.first + s);
  grid_wait();
  grid_launch_next();
#pragma unroll
  for (int s = 0; s < S::STAGES - 1; s++) {
    stages.load_rows(stages.first + s);
    cp_async_commit();
  }
  Tile<F, MODE, WIDE_NT> tile;
  tile.clear_sums();
  tile.clear_chain();
  if (S::TOTALS)
    for (int i = 0; i < WIDE_NT * 8; i++) totals[i * THREADS + threadIdx.x] = 0;
  const int warp = threadIdx.x / 32;
  const bool idle = !c.covers(stages.first_group + warp % WIDE_GROUPS) ||
                    stages.first_row + warp / WIDE_GROUPS * WIDE_NT * 8 >= c.m;  // it only copies
  int left = c.slice;
  for (int s = stages.first; s < stages.last; s++) {
    cp_async_wait<S::STAGES - 2>();
#ifndef BATON_MUTATION_CUDA_LINEAR_STAGE
    __syncthreads();
#endif
    stages.load_weights(s + S::STAGES - 1);
    stages.load_rows(s + S::STAGES - 1);
    cp_async_commit();
    if (!idle) multiply<F, MODE>(stages, s, tile, done, left, totals);
  }
  cp_async_wait<0>();
  if (!idle) write_wide<F, MODE>(stages, p, tile, totals);
}

}  // namespace
}  // namespace baton
