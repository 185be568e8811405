// linear on a GPU: one small kernel rounds the rows, one multiplies them by the CPU's panels on tensor cores. Knows nothing of
// models. A row's bits don't depend on its batch: K is summed in eight slices, by its length alone, in all kernels.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "wide.cuh"

namespace baton {
namespace {

constexpr int ROUNDERS = 256, MOST_K = 1 << 17;  // of more inputs an int32 might not hold the sum
constexpr float FLOOR = 1e-30f;                  // as quantize_rows.h
enum Rounding { TO_BF16, TO_BF16_FOR_INT4, TO_INT8, TO_E4M3 };

template <class X>
__device__ __forceinline__ void load_eight(const X* x, int i, int k, bool aligned, float v[8]) {
  if (aligned && i + 8 <= k) {
    const float4 a = load4(x + i), b = load4(x + i + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if constexpr (sizeof(X) == 2)
      v[j] = i + j < k ? from_bf16(x[i + j]) : 0;
    else
      v[j] = i + j < k ? x[i + j] : 0;
  }
}

// The bits of the block's largest: a NaN beats infinity beats all numbers.
__device__ __forceinline__ uint32_t block_largest(uint32_t x, uint32_t* scratch) {
  x = __reduce_max_sync(ALL_LANES, x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
#ifndef BATON_MUTATION_CUDA_LINEAR_ABSMAX
  __syncthreads();
#endif
  return __reduce_max_sync(ALL_LANES, scratch[threadIdx.x % (ROUNDERS / 32)]);
}

// A row of k numbers to `width` rounded ones, zeros behind; of integers and fp8, by the row's largest magnitude.
template <class X, int R>
__global__ void __launch_bounds__(ROUNDERS) round_rows(const X* x, int64_t stride, int k, int width, bool aligned, char* out,
                                                       float* scales) {
  BATON_STATIC_SHARED(uint32_t, scratch, ROUNDERS / 32);
  constexpr bool narrow = R == TO_INT8 || R == TO_E4M3;
  grid_wait();
  grid_launch_next();
  const size_t row = blockIdx.x;
  const X* from = x + row * stride;
  float inverse = 1, v[8];
  if constexpr (narrow) {
    uint32_t most = 0;
    for (int i = int(threadIdx.x) * 8; i < k; i += ROUNDERS * 8) {
      load_eight(from, i, k, aligned, v);
#pragma unroll
      for (int j = 0; j < 8; j++) most = max(most, __float_as_uint(v[j]) & 0x7fffffffu);
    }
    constexpr float top = R == TO_INT8 ? 127.0f : 448.0f;
    const float largest = __uint_as_float(block_largest(most, scratch));
    const bool dead = !(largest >= FLOOR);  // zero, or NaN
    inverse = dead ? 0.0f : __fdiv_rn(top, largest);
    if (threadIdx.x == 0) scales[row] = largest != largest ? largest : dead ? 0.0f : __fdiv_rn(largest, top);
  }
  char* to = out + row * width * (narrow ? 1 : 2);
  for (int i = int(threadIdx.x) * 8; i < width; i += ROUNDERS * 8) {
    load_eight(from, i, k, aligned, v);
    if constexpr (narrow) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = fminf(fmaxf(v[j] * inverse, -448.0f), R == TO_INT8 ? 127.0f : 448.0f);
      const uint2 eight = R == TO_INT8 ? make_uint2(to_int8x4(v[0], v[1], v[2], v[3]), to_int8x4(v[4], v[5], v[6], v[7]))
                                       : make_uint2(to_e4m3x4(v[0], v[1], v[2], v[3]), to_e4m3x4(v[4], v[5], v[6], v[7]));
      *reinterpret_cast<uint2*>(to + i) = eight;
    } else if constexpr (R == TO_BF16) {
      *reinterpret_cast<uint4*>(to + 2 * i) =
          make_uint4(to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]), to_bf16x2(v[4], v[5]), to_bf16x2(v[6], v[7]));
    } else {
      *reinterpret_cast<uint4*>(to + 2 * i) =
          make_uint4(to_bf16x2(v[0], v[2]), to_bf16x2(v[1], v[3]), to_bf16x2(v[4], v[6]), to_bf16x2(v[5], v[7]));
    }
  }
}

int up(int x, int to) { return (x + to - 1) / to * to; }
int parts(int64_t x, int64_t of) { return int((x + of - 1) / of); }

struct Input {
  const void* x;
  int32_t dtype;
  int64_t stride;
};

template <int R>
int round_to(Call& c, const Input& in, void* stream) {
  constexpr bool narrow = R == TO_INT8 || R == TO_E4M3;
  const int k = int(c.w.k), width = up(k, 16), size = in.dtype == BF16 ? 2 : 4;
  c.x_bytes = c.valid = width * (narrow ? 1 : 2);
  char* memory = (char*)workspace(WORKSPACE_ROWS, size_t(c.m) * (c.x_bytes + 4), stream);
  if (!memory) return 2;  // cudaErrorMemoryAllocation
  float* scales = (float*)(memory + size_t(c.m) * c.x_bytes);
  c.x = memory, c.x_scales = narrow ? scales : nullptr;
  const bool aligned = (uintptr_t(in.x) | size_t(in.stride) * size) % 16 == 0;
  const dim3 grid(unsigned(c.m)), block(ROUNDERS);
  if (in.dtype == BF16)
    return BATON_LAUNCH_PDL((round_rows<bf16, R>), grid, block, 0, stream, (const bf16*)in.x, in.stride, k, width, aligned, memory, scales);
  return BATON_LAUNCH_PDL((round_rows<float, R>), grid, block, 0, stream, (const float*)in.x, in.stride, k, width, aligned, memory, scales);
}

template <int F, int MODE, int NT>
int run_skinny(const Call& c, int columns, void* stream) {
  const dim3 grid(unsigned(columns), unsigned(parts(c.m, NT * 8)));
  return BATON_LAUNCH_PDL((skinny<F, MODE, NT>), grid, dim3(THREADS), (Ring<F, MODE, NT>::BYTES), stream, c);
}

// The wide kernel from where it fills half the device.
template <int F, int MODE>
int run(const Call& c, void* stream) {
  const int columns = parts(c.inner ? c.inner : c.w.n, c.inner ? PLACES / 2 : PLACES);
  const int high = parts(c.m, WIDE_ROWS), across = parts(columns, WIDE_GROUPS);
  if (c.m > 64 && int64_t(high) * across * 2 >= processors())
    return BATON_LAUNCH_PDL((wide<F, MODE>), dim3(unsigned(high), unsigned(across)), dim3(THREADS), (Stages<F, MODE>::BYTES), stream, c);
  if (c.m <= 8) return run_skinny<F, MODE, 1>(c, columns, stream);
  if (c.m <= 16) return run_skinny<F, MODE, 2>(c, columns, stream);
  if (c.m <= 32) return run_skinny<F, MODE, 4>(c, columns, stream);
  return run_skinny<F, MODE, 8>(c, columns, stream);
}

template <int F>
int by_mode(const Call& c, void* stream) {
  if (!c.w.group) return run<F, PLAIN>(c, stream);
  if (c.w.group % 32 == 0 && !c.w.mins) return run<F, GROUPS>(c, stream);
  return run<F, ANY>(c, stream);
}

int least_common(int a, int b) {
  int x = a, y = b;
  while (y) {
    const int rest = x % y;
    x = y, y = rest;
  }
  return a / x * b;
}

struct Output {
  void* out;
  int32_t dtype;
  int64_t stride;
};

// False: nothing here multiplies such a layer.
bool prepare(Call& c, const PackedLinear& w, int64_t m, const float* bias, const Output& out, bool gated) {
  const bool known = w.kind == LINEAR_BF16 || w.kind == LINEAR_W8 || w.kind == LINEAR_W4 || w.kind == LINEAR_E4M3;
  if (!known || w.k < 1 || w.k >= MOST_K || w.n < 1 || m > 1 << 22 || w.group % 16 || (w.group && !w.scales)) return false;
  if (w.kind == LINEAR_BF16 || w.kind == LINEAR_E4M3 ? w.group : !w.row_scale) return false;
  if (w.kind == LINEAR_E4M3 && !w.row_scale) return false;
  if (gated && w.n % 32) return false;
  c = Call{};
  c.w = w, c.bias = bias, c.m = int(m), c.inner = gated ? int(w.n / 2) : 0;
  c.out = out.out, c.out_dtype = out.dtype, c.out_stride = out.stride;
  c.aligned = (uintptr_t(out.out) | size_t(out.stride) * (out.dtype == BF16 ? 2 : 4)) % 16 == 0;
  c.padded = up(int(w.k), w.group ? w.group : 8);
  c.groups = w.group ? c.padded / w.group : 0;
#ifdef BATON_MUTATION_CUDA_LINEAR_BATCH
  const int slices = m > 16 ? SLICES - 2 : SLICES;
#else
  constexpr int slices = SLICES;
#endif
  c.slice = up(parts(c.padded, slices), w.group ? least_common(w.group, 32) : 32);
  return true;
}

#ifdef BATON_MUTATION_CUDA_LINEAR_SMALL
// A build for planted bugs has int4 in groups of whole blocks alone: it compiles in a fifth of the time.
int multiply(Call& c, const Input& in, bool, void* stream) {
  if (c.w.kind != LINEAR_W4 || !c.w.group || c.w.group % 32 || c.w.mins) return int(cudaErrorInvalidValue);
  const int wrong = round_to<TO_INT8>(c, in, stream);
  return wrong ? wrong : run<FORM_W4, GROUPS>(c, stream);
}

int multiply_rounded(const Call&, void*) { return int(cudaErrorInvalidValue); }
#else
int multiply_rounded(const Call& c, void* stream) {
  if (c.w.kind == LINEAR_E4M3) return run<FORM_FP8, PLAIN>(c, stream);
  return c.w.kind == LINEAR_W8 ? by_mode<FORM_W8>(c, stream) : by_mode<FORM_W4>(c, stream);
}

int multiply(Call& c, const Input& in, bool wide_rows, void* stream) {
  int wrong = 0;
  if (c.w.kind == LINEAR_BF16) {
    const bool as_it_is = in.dtype == BF16 && c.w.k % 8 == 0 && (uintptr_t(in.x) | size_t(in.stride) * 2) % 16 == 0;
    if (as_it_is)
      c.x = (const char*)in.x, c.x_bytes = in.stride * 2, c.valid = int(c.w.k) * 2;
    else
      wrong = round_to<TO_BF16>(c, in, stream);
    return wrong ? wrong : run<FORM_BF16, PLAIN>(c, stream);
  }
  if (wide_rows) {
    wrong = round_to<TO_BF16_FOR_INT4>(c, in, stream);
    return wrong ? wrong : by_mode<FORM_W4A16>(c, stream);
  }
  wrong = c.w.kind == LINEAR_E4M3 ? round_to<TO_E4M3>(c, in, stream) : round_to<TO_INT8>(c, in, stream);
  return wrong ? wrong : multiply_rounded(c, stream);
}
#endif

}  // namespace
}  // namespace baton

BATON_API int baton_linear(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                           const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  Call c;
  if (!prepare(c, *w, m, bias, {out, out_dtype, out_stride}, false)) return int(cudaErrorInvalidValue);
  return multiply(c, {x, x_dtype, x_stride}, false, stream);
}

// int4 weights by rows of bf16 (W4A16).
BATON_API int baton_linear_a16(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                               const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  Call c;
  if (w->kind != LINEAR_W4 || !prepare(c, *w, m, bias, {out, out_dtype, out_stride}, false)) return int(cudaErrorInvalidValue);
  return multiply(c, {x, x_dtype, x_stride}, true, stream);
}

// w is a gate over what it is for, n / 2 rows each (a multiple of 16): out (m, n / 2) = silu(gate) x up.
BATON_API int baton_linear_swiglu(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                                  const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  Call c;
  if (!prepare(c, *w, m, bias, {out, out_dtype, out_stride}, true)) return int(cudaErrorInvalidValue);
  return multiply(c, {x, x_dtype, x_stride}, false, stream);
}

// q (m, k) int8 (e4m3 for e4m3 weights) and a scale per row, as baton_rms_norm_quantized writes them; k a multiple of 16, q at
// an address that is one.
BATON_API int baton_linear_rounded(const baton::PackedLinear* w, const void* q, const float* scales, int64_t m, const float* bias,
                                   void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  Call c;
  if (w->kind == LINEAR_BF16 || w->k % 16 || uintptr_t(q) % 16) return int(cudaErrorInvalidValue);
  if (!prepare(c, *w, m, bias, {out, out_dtype, out_stride}, false)) return int(cudaErrorInvalidValue);
  c.x = (const char*)q, c.x_bytes = c.valid = int(w->k), c.x_scales = scales;
  return multiply_rounded(c, stream);
}
