// Residual add, root-mean-square norm and, for integer or fp8 GEMMs behind it, the row's rounding, in one pass: a block holds
// its row in registers. Knows nothing of layers. A row's bits depend on its length alone, not on the batch.
#include "../cuda/device.cuh"
#include "row.cuh"

namespace baton {
namespace {

using namespace norm_row;

enum Rounding : int32_t { FLOATS = 0, INT8 = 1, E4M3 = 2, HALVES = 3 };

struct Rows {
  float* x;
  const float *delta, *weight;
  float eps;
  int hidden;
  bool quads;  // whole float4 at aligned places
  void* out;   // floats, bf16, or a byte per element with `scales`
  float* scales;
};

__device__ __forceinline__ void write_bytes(uint8_t* p, int i, int n, bool quads, uint32_t word) {
  if (i >= n) return;
  if (quads) {
    *reinterpret_cast<uint32_t*>(p + i) = word;
    return;
  }
  for (int j = 0; j < QUAD && i + j < n; j++) p[i + j] = uint8_t(word >> (8 * j));
}

__device__ __forceinline__ void write_bf16(bf16* p, int i, int n, bool quads, float4 v) {
  if (i >= n) return;
  if (quads) return store4(p + i, v);
  const float four[QUAD] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < QUAD; j++)
    if (i + j < n) p[i + j] = to_bf16(four[j]);
}

__device__ __forceinline__ float largest(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// NaN compares false: true for a row of finite numbers alone.
__device__ __forceinline__ bool finite(float4 v) {
  return fabsf(v.x) <= 3.4e38f && fabsf(v.y) <= 3.4e38f && fabsf(v.z) <= 3.4e38f && fabsf(v.w) <= 3.4e38f;
}

template <int PER, int R>
__global__ void __launch_bounds__(MOST_THREADS) norm(const Rows rows) {
  BATON_STATIC_SHARED(float, scratch, 32);
  const int threads = int(blockDim.x), n = rows.hidden;
  const size_t row = blockIdx.x;
  float4 v[PER], weight[PER];
#pragma unroll
  for (int k = 0; k < PER; k++) weight[k] = read(rows.weight, QUAD * (k * threads + int(threadIdx.x)), n, rows.quads);
  grid_wait();  // the weights are nobody's result: they are on their way before the kernel in front has ended
  grid_launch_next();
  float* x = rows.x + row * n;
  float squares = 0;
#pragma unroll
  for (int k = 0; k < PER; k++) {
    const int i = QUAD * (k * threads + int(threadIdx.x));
    v[k] = read(x, i, n, rows.quads);
    if (rows.delta) {
      v[k] = sum_of(v[k], read(rows.delta + row * n, i, n, rows.quads));
      write(x, i, n, rows.quads, v[k]);
    }
    squares += squares_of(v[k]);
  }
  if (!rows.out) return;
  const float scale = scale_of(block_sum(squares, scratch), n, rows.eps);
  float most = 0;
  bool fine = true;
#pragma unroll
  for (int k = 0; k < PER; k++) {
    v[k] = normed(v[k], scale, weight[k]);
    if (R == FLOATS) {
      write(static_cast<float*>(rows.out) + row * n, QUAD * (k * threads + int(threadIdx.x)), n, rows.quads, v[k]);
    } else if (R == HALVES) {
      write_bf16(static_cast<bf16*>(rows.out) + row * n, QUAD * (k * threads + int(threadIdx.x)), n, rows.quads, v[k]);
    } else {
      most = fmaxf(most, largest(v[k]));
      fine &= finite(v[k]);
    }
  }
  if (R == FLOATS || R == HALVES) return;
  most = block_max(fine ? most : INFINITY, scratch);
  fine = most <= 3.4e38f;
  constexpr float top = R == INT8 ? 127.0f : 448.0f;
  const float inverse = fine && most > 0 ? top / most : 0.0f;
  if (threadIdx.x == 0) rows.scales[row] = fine ? most / top : NAN;
#pragma unroll
  for (int k = 0; k < PER; k++) {
    const float4 y = fine ? make_float4(v[k].x * inverse, v[k].y * inverse, v[k].z * inverse, v[k].w * inverse)
                          : make_float4(0, 0, 0, 0);
    const uint32_t word = R == INT8 ? to_int8x4(y.x, y.y, y.z, y.w) : to_e4m3x4(y.x, y.y, y.z, y.w);
    write_bytes(static_cast<uint8_t*>(rows.out) + row * n, QUAD * (k * threads + int(threadIdx.x)), n, rows.quads, word);
  }
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <int R>
int launch(Rows rows, int64_t count, void* stream) {
  if (!count || !rows.hidden) return 0;
  rows.quads = rows.hidden % QUAD == 0 && aligned(rows.x) && aligned(rows.delta) && aligned(rows.weight) && aligned(rows.out);
  const Order order(rows.hidden);
  const dim3 grid = dim3(unsigned(count)), threads = dim3(unsigned(order.threads));
  if (order.per == 1) return BATON_LAUNCH_PDL((norm<1, R>), grid, threads, 0, stream, rows);
  if (order.per == 2) return BATON_LAUNCH_PDL((norm<2, R>), grid, threads, 0, stream, rows);
  if (order.per == 4) return BATON_LAUNCH_PDL((norm<4, R>), grid, threads, 0, stream, rows);
  return cudaErrorInvalidValue;  // rows of more than 16,384
}

}  // namespace
}  // namespace baton

BATON_API int baton_rms_norm(float* x, const float* delta, const float* weight, float eps, int64_t rows, int64_t hidden,
                             float* out, void* stream) {
  using namespace baton;
  return launch<FLOATS>({x, delta, weight, eps, int(hidden), false, out, nullptr}, rows, stream);
}

// The same with the normed row rounded to int8 (rounding 1) or e4m3 (2) by its own largest magnitude: out (rows, hidden)
// bytes, scales (rows) float32. A row with a NaN or infinity has a NaN scale and zeros. Or to bf16 (3), without scales.
BATON_API int baton_rms_norm_quantized(float* x, const float* delta, const float* weight, float eps, int64_t rows,
                                       int64_t hidden, int32_t rounding, void* out, float* scales, void* stream) {
  using namespace baton;
  const Rows all{x, delta, weight, eps, int(hidden), false, out, scales};
  if (rounding == INT8) return launch<INT8>(all, rows, stream);
  if (rounding == HALVES) return launch<HALVES>(all, rows, stream);
  return rounding == E4M3 ? launch<E4M3>(all, rows, stream) : cudaErrorInvalidValue;
}
