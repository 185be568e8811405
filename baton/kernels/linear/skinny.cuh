// Few rows: a block has up to NT x 8 rows and 32 outputs, and each of its warps a slice of K with a pipeline of its own, so
// that nobody waits for anybody until the slices are added, in order. A lane copies what it will read itself; only scales
// are shared, within the warp. The weights' first stages are on their way before the kernel in front has ended.
#pragma once
#include "../cuda/silu.cuh"
#include "tile.cuh"

namespace baton {
namespace {

template <int F, int MODE, int NT, int DEPTH = (NT > 4 ? 4 : 6)>
struct Ring {
  using T = Traits<F>;
  static constexpr int BLOCKS = F == FORM_W4 ? 2 : 1;  // of K per stage: 1 KB of weights (512 bytes of W4A16)
  static constexpr int PARTS = MODE == PLAIN ? 0 : MODE == ANY ? 2 * BLOCKS : BLOCKS;
  static constexpr int STAGES = DEPTH;
  static constexpr int WEIGHTS = BLOCKS * T::CHUNKS * 512, ROWS = BLOCKS * NT * 32 * T::PIECE, SCALES = PARTS * 64;
  static constexpr int STAGE = WEIGHTS + ROWS + (MODE == ANY ? 2 : 1) * SCALES;
  static constexpr int LINE = PLACES + 4;  // floats of a row of a slice's result
  static constexpr size_t RESULTS = size_t(SLICES) * NT * 8 * LINE * 4;
  static constexpr size_t BYTES = size_t(WARPS) * STAGES * STAGE > RESULTS ? size_t(WARPS) * STAGES * STAGE : RESULTS;

  const Call* c;
  char *begin, *fill, *take;  // of the warp's stages: the first, the next to be filled, the next to be multiplied
  int part, parts;            // parts of a block, of `part` inputs each
  int from, blocks;           // the warp's slice: its first input, its blocks
  const char* chunks;         // the lane's, in the stage that comes next
  int steps;                  // that the panel has from there on
  const char* rows;           // the lane's piece of the block's first row
  int bytes;                  // that the row has from there on
  uint32_t places[NT];    // from there to the lane's rows; a row that isn't there is the last one
  const fp16 *scales, *mins;  // of the next group, for the lanes that copy them
  int to_load, loaded, done;  // blocks; parts until a group is loaded, and multiplied
  int ahead, open;            // groups of the slice to be loaded, and to be closed

  __device__ Ring(const Call& call, char* at, int64_t columns, int first_row)
      : c(&call), begin(at + threadIdx.x / 32 * (STAGES * STAGE)), fill(begin), take(begin),
        part(MODE == ANY && call.w.group % 32 ? 16 : 32), parts(part == 16 ? 2 : 1) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    from = warp * call.slice;
    const int to = from + call.slice < call.padded ? from + call.slice : call.padded;
    blocks = to_load = to > from ? (to - from + T::INPUTS - 1) / T::INPUTS : 0;
    const int step = from / T::INPUTS * T::STEPS + T::CHUNKS * t;
    chunks = chunks_of<F>(call, call.output(columns, 4 * g)) + int64_t(step) * 256, steps = panel_steps<F>(call) - step;
    const int byte = from / T::INPUTS * 4 * T::PIECE + T::PIECE * t;
    rows = call.x + first_row * call.x_bytes + byte, bytes = call.valid - byte;
#pragma unroll
    for (int h = 0; h < NT; h++) places[h] = uint32_t(min(8 * h + g, call.m - 1 - first_row)) * uint32_t(call.x_bytes);
    if (MODE == PLAIN) return;
    loaded = done = call.w.group / part, ahead = open = to > from ? (to - from) / call.w.group : 0;
    const int64_t group = groups_of(call, call.output(columns, 8 * t)) + group_place(from / call.w.group);
    scales = call.w.scales + group, mins = call.w.mins + group;
  }

  __device__ __forceinline__ char* next(char* slot) const { return slot == begin + (STAGES - 1) * STAGE ? begin : slot + STAGE; }
  static __device__ __forceinline__ char* weights(char* slot, int block, int i) {
    return slot + (block * T::CHUNKS + i) * 512 + threadIdx.x % 32 * 16;
  }
  static __device__ __forceinline__ char* piece(char* slot, int block, int h) {
    return slot + WEIGHTS + (block * NT + h) * 32 * T::PIECE + threadIdx.x % 32 * T::PIECE;
  }
  static __device__ __forceinline__ char* scale_place(char* slot, int number, bool of_mins) {
    return slot + WEIGHTS + ROWS + (of_mins ? SCALES : 0) + number * 64;
  }

  // The next stage's weights and their scales: nobody's results.
  __device__ __forceinline__ void load_weights(char* slot) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
      for (int i = 0; i < T::CHUNKS; i++)
        cp_async_16(weights(slot, b, i), chunks + (b * T::STEPS + i) * 256, b < to_load && b * T::STEPS + i < steps);
      if constexpr (MODE != PLAIN)
        for (int p = 0; p < parts && b < to_load; p++)
          if (!--loaded) load_group(slot, b * (PARTS / BLOCKS) + p);
    }
    chunks += BLOCKS * T::STEPS * 256, steps -= BLOCKS * T::STEPS;
    to_load -= BLOCKS;
  }

  // Behind the last input there may be half a block, with which no group ends.
  __device__ __forceinline__ void load_group(char* slot, int number) {
    const int lane = threadIdx.x % 32;
    loaded = c->w.group / part;
    if (MODE == ANY && !ahead--) return;
    if (lane < 4) cp_async_16(scale_place(slot, number, false) + 16 * lane, scales);
    if (MODE == ANY && c->w.mins && lane < 4) cp_async_16(scale_place(slot, number, true) + 16 * lane, mins);
    scales += group_place(1), mins += group_place(1);
  }

  __device__ __forceinline__ void load_rows(char* slot) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const bool filled = b * 4 * T::PIECE < bytes;
#pragma unroll
      for (int h = 0; h < NT; h++) {
        const char* source = rows + places[h] + b * 4 * T::PIECE;
        if constexpr (T::PIECE == 16)
          cp_async_16(piece(slot, b, h), source, filled);
        else
          cp_async_8(piece(slot, b, h), source, filled);
      }
    }
    rows += BLOCKS * 4 * T::PIECE, bytes -= BLOCKS * 4 * T::PIECE;
  }

  // A stage, of which `left` blocks are the slice's.
  __device__ __forceinline__ void multiply(Tile<F, MODE, NT>& tile, int left) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      if (b >= left) break;
      uint4 w[2] = {};
      for (int i = 0; i < T::CHUNKS; i++) w[i] = *reinterpret_cast<const uint4*>(weights(take, b, i));
      uint32_t x[NT][T::PIECE / 4];
#pragma unroll
      for (int h = 0; h < NT; h++) std::memcpy(x[h], __builtin_assume_aligned(piece(take, b, h), T::PIECE), T::PIECE);
      if constexpr (MODE == PLAIN) {
        tile.multiply(x, w, -1);
      } else {
        for (int p = 0; p < parts; p++) {
          tile.multiply(x, w, part == 32 ? -1 : p);
          if (--done) continue;
          done = c->w.group / part;
          if (MODE == ANY && !open--) continue;
          const int number = b * (PARTS / BLOCKS) + p;
          uint2 low = make_uint2(0, 0);
          if (MODE == ANY && c->w.mins) low = *reinterpret_cast<const uint2*>(scale_place(take, number, true) + 8 * g);
          tile.close_group(*reinterpret_cast<const uint2*>(scale_place(take, number, false) + 8 * g), low, c->w.mins);
        }
      }
    }
    take = next(take);
  }
};

// Every warp's slice of the tile, to [slice][row][place].
template <int F, int MODE, int NT>
__device__ __forceinline__ void give(const Tile<F, MODE, NT>& tile, float* results) {
  constexpr int LINE = Ring<F, MODE, NT>::LINE;
  const int lane = threadIdx.x % 32;
  float* to = results + (threadIdx.x / 32 * NT * 8 + lane % 4 * 2) * LINE + lane / 4 * 4;
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      store4(to + (8 * nt + e) * LINE, make_float4(tile.value(nt, 0, e), tile.value(nt, 1, e), tile.value(nt, 2, e), tile.value(nt, 3, e)));
}

template <int F, int MODE, int NT>
__device__ __forceinline__ float added(const Call& c, const float* results, int row, int place, int global_row, int64_t n) {
  constexpr int LINE = Ring<F, MODE, NT>::LINE;
  Total<F, MODE> total;
#ifdef BATON_MUTATION_CUDA_LINEAR_SLICE
  constexpr int count = SLICES - 1;
#else
  constexpr int count = SLICES;
#endif
#pragma unroll
  for (int s = 0; s < count; s++) total.add(results[(s * NT * 8 + row) * LINE + place]);
  return finished(c, total.get(), global_row, n);
}

template <int F, int MODE, int NT>
__device__ __forceinline__ void write(const Call& c, const float* results, int64_t columns, int first_row) {
  const int width = c.inner ? PLACES / 2 : PLACES;
  for (int i = threadIdx.x; i < NT * 8 * width; i += THREADS) {
    const int row = i / width, place = i % width, global_row = first_row + row;
    const int64_t n = c.output(columns, place);
#ifdef BATON_MUTATION_CUDA_LINEAR_GUARD
    constexpr int64_t over = 1;
#else
    constexpr int64_t over = 0;
#endif
    if (global_row >= c.m || n >= (c.inner ? c.inner : c.w.n + over)) continue;
    float x = added<F, MODE, NT>(c, results, row, place, global_row, n);
    if (c.inner) x = silu(x) * added<F, MODE, NT>(c, results, row, place + width, global_row, n + c.inner);
    put(c, global_row, n, x);
  }
}

template <int F, int MODE, int NT>
__global__ void __launch_bounds__(THREADS, 1) skinny(const Call c) {
  using R = Ring<F, MODE, NT>;
  BATON_SHARED(char, memory);
  const int64_t columns = blockIdx.x;
  const int first_row = blockIdx.y * NT * 8;
  R ring(c, memory, columns, first_row);
#pragma unroll
  for (int s = 0; s < R::STAGES - 1; s++) ring.load_weights(ring.begin + s * R::STAGE);
  grid_wait();
  grid_launch_next();
#pragma unroll
  for (int s = 0; s < R::STAGES - 1; s++) {
    ring.load_rows(ring.begin + s * R::STAGE);
    cp_async_commit();  // the weights of all stages so far are in the first one's
  }
  ring.fill += (R::STAGES - 1) * R::STAGE;
  Tile<F, MODE, NT> tile;
  tile.clear_sums();
  tile.clear_chain();
  for (int left = ring.blocks; left > 0; left -= R::BLOCKS) {
#ifdef BATON_MUTATION_CUDA_LINEAR_WAIT
    cp_async_wait<R::STAGES - 1>();
#else
    cp_async_wait<R::STAGES - 2>();
#endif
    __syncwarp();  // lanes 0 … 3 copied the scales; all are done with the stage that is filled next
    ring.load_weights(ring.fill);
    ring.load_rows(ring.fill);
    ring.fill = ring.next(ring.fill);
    cp_async_commit();
    ring.multiply(tile, left);
  }
  cp_async_wait<0>();
#ifndef BATON_MUTATION_CUDA_LINEAR_RING
  __syncthreads();  // results lie where the stages were
#endif
  float* results = reinterpret_cast<float*>(memory);
  give(tile, results);
#ifndef BATON_MUTATION_CUDA_LINEAR_MERGE
  __syncthreads();
#endif
  write<F, MODE, NT>(c, results, columns, first_row);
}

}  // namespace
}  // namespace baton
