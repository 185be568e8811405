// bf16 weights row by row, as libraries take them: (n rounded up to 64, k rounded up to 8), zeros there. Few rows by our own kernel:
// a warp's slice of K in stages of 32 inputs, of which a lane copies eight of each of its four outputs, 64 bytes beside one another
// of an output. Slices, their order and what becomes of their sum are skinny.cuh's. Knows nothing of libraries (library.cuh).
#pragma once
#include "prepare.cuh"
#include "many/finish.cuh"
#include "skinny.cuh"

namespace baton {
namespace {

constexpr int32_t BY_ROW = -1;  // PackedLinear.group of such weights; what multiplies panels alone refuses it

template <int NT>
struct RowRing {
  static constexpr int INPUTS = 32, OUTPUTS = 4, PIECE = 16;  // of K per stage; a lane's outputs, and its bytes of each
  static constexpr int STAGES = NT == 4 ? 3 : 4;              // two blocks of up to 32 rows on a multiprocessor, one of 64
  static constexpr int WEIGHTS = OUTPUTS * 32 * PIECE, STAGE = WEIGHTS + NT * 32 * PIECE;
  static constexpr size_t RESULTS = Ring<FORM_BF16, PLAIN, NT>::RESULTS;
  static constexpr size_t BYTES = size_t(WARPS) * STAGES * STAGE > RESULTS ? size_t(WARPS) * STAGES * STAGE : RESULTS;

  char *begin, *fill, *take;  // of the warp's stages: the first, the next to be filled, the next to be multiplied
  int blocks;                 // of the warp's slice
  const char *weights, *rows;  // the lane's next piece of its first output, and of the block's first row
  int64_t pitch;               // bytes from output to output
  int left, bytes;             // of the slice, and of the row, from there on
  uint32_t places[NT];         // from `rows` to the lane's rows; a row that isn't there is the last one

  __device__ RowRing(const Call& c, char* at, int64_t columns, int first_row)
      : begin(at + threadIdx.x / 32 * (STAGES * STAGE)), fill(begin), take(begin) {
    const int lane = threadIdx.x % 32, g = lane / 4, from = threadIdx.x / 32 * c.slice;
    const int to = from + c.slice < c.padded ? from + c.slice : c.padded;
    blocks = to > from ? (to - from + INPUTS - 1) / INPUTS : 0;
    const int byte = from * 2 + lane % 4 * PIECE;
#ifdef BATON_MUTATION_CUDA_LINEAR_ROW_PITCH
    pitch = int64_t(c.padded) * 2 + (c.padded % 16 ? 16 : 0);
#else
    pitch = int64_t(c.padded) * 2;
#endif
    weights = static_cast<const char*>(c.w.data) + c.output(columns, 4 * g) * pitch + byte, left = to * 2 - byte;
    rows = c.x + first_row * c.x_bytes + byte, bytes = c.valid - byte;
#pragma unroll
    for (int h = 0; h < NT; h++) places[h] = uint32_t(min(8 * h + g, c.m - 1 - first_row)) * uint32_t(c.x_bytes);
  }

  __device__ __forceinline__ char* next(char* slot) const { return slot == begin + (STAGES - 1) * STAGE ? begin : slot + STAGE; }
  static __device__ __forceinline__ char* place(char* slot, int i) { return slot + (i * 32 + threadIdx.x % 32) * PIECE; }

  __device__ __forceinline__ void load_weights(char* slot) {
#pragma unroll
    for (int q = 0; q < OUTPUTS; q++) cp_async_16(place(slot, q), weights + q * pitch, left > 0);
    weights += INPUTS * 2, left -= INPUTS * 2;
  }

  __device__ __forceinline__ void load_rows(char* slot) {
#pragma unroll
    for (int h = 0; h < NT; h++) cp_async_16(place(slot, OUTPUTS + h), rows + places[h], bytes > 0);
    rows += INPUTS * 2, bytes -= INPUTS * 2;
  }

  // A stage. Of a lane's eight inputs the first four are one product's, the others the next one's, in weights and rows alike.
  __device__ __forceinline__ void multiply(Tile<FORM_BF16, PLAIN, NT>& tile) {
    uint4 outputs[OUTPUTS], pieces[NT];
#pragma unroll
    for (int q = 0; q < OUTPUTS; q++) outputs[q] = *reinterpret_cast<const uint4*>(place(take, q));
#pragma unroll
    for (int h = 0; h < NT; h++) pieces[h] = *reinterpret_cast<const uint4*>(place(take, OUTPUTS + h));
    const uint4 low[2] = {make_uint4(outputs[0].x, outputs[1].x, outputs[2].x, outputs[3].x),
                          make_uint4(outputs[0].y, outputs[1].y, outputs[2].y, outputs[3].y)};
    const uint4 high[2] = {make_uint4(outputs[0].z, outputs[1].z, outputs[2].z, outputs[3].z),
                           make_uint4(outputs[0].w, outputs[1].w, outputs[2].w, outputs[3].w)};
    uint32_t x[NT][2];
#pragma unroll
    for (int h = 0; h < NT; h++) x[h][0] = pieces[h].x, x[h][1] = pieces[h].y;
    tile.multiply(x, low, -1);
#pragma unroll
    for (int h = 0; h < NT; h++) x[h][0] = pieces[h].z, x[h][1] = pieces[h].w;
#ifdef BATON_MUTATION_CUDA_LINEAR_ROW_HALF
    tile.multiply(x, low, -1);
#else
    tile.multiply(x, high, -1);
#endif
    take = next(take);
  }
};

template <int NT>
__global__ void __launch_bounds__(THREADS, NT > 4 ? 1 : 2) by_row(const Call c) {
  using R = RowRing<NT>;
  BATON_SHARED(char, memory);
  const int first_row = blockIdx.y * NT * 8;
  R ring(c, memory, blockIdx.x, first_row);
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
  Tile<FORM_BF16, PLAIN, NT> tile;
  tile.clear_sums();
  for (int block = 0; block < ring.blocks; block++) {
#ifdef BATON_MUTATION_CUDA_LINEAR_ROW_WAIT
    cp_async_wait<R::STAGES - 1>();
#else
    cp_async_wait<R::STAGES - 2>();
#endif
    ring.load_weights(ring.fill);
    ring.load_rows(ring.fill);
    ring.fill = ring.next(ring.fill);
    cp_async_commit();
    ring.multiply(tile);
  }
  cp_async_wait<0>();
#ifndef BATON_MUTATION_CUDA_LINEAR_ROW_RING
  __syncthreads();  // results lie where the stages were
#endif
  float* results = reinterpret_cast<float*>(memory);
  give(tile, results);
  __syncthreads();
  write<FORM_BF16, PLAIN, NT>(c, results, blockIdx.x, first_row);
}

template <int NT>
int run_by_row(const Call& c, void* stream) {
  const dim3 grid(unsigned(parts(c.inner ? c.inner : c.w.n, c.inner ? PLACES / 2 : PLACES)), unsigned(parts(c.m, NT * 8)));
  return BATON_LAUNCH_PDL((by_row<NT>), grid, dim3(THREADS), (RowRing<NT>::BYTES), stream, c);
}

// A library's product in bf16, rows of `stride`, to the op's output: scaled, biased, with a gate silu(gate) x up. A block to a row and
// 4 x FINISHERS of its columns.
__global__ void __launch_bounds__(FINISHERS) finish_rows(const Call c, const bf16* product, int64_t stride) {
  grid_wait();
  grid_launch_next();
  const int row = int(blockIdx.x);
  const int64_t columns = c.inner ? c.inner : c.w.n, n = (int64_t(blockIdx.y) * FINISHERS + threadIdx.x) * 4;
  if (n >= columns) return;
  const bf16* from = product + row * stride + n;
  const float4 first = load4(from), second = c.inner ? load4(from + c.inner) : make_float4(0, 0, 0, 0);
  const float gates[4] = {first.x, first.y, first.z, first.w}, ups[4] = {second.x, second.y, second.z, second.w};
  finish_four(c, row, n, columns, gates, ups);
}

}  // namespace
}  // namespace baton
