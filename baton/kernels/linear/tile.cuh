// A warp's tile of a product: 32 outputs by NT x 8 rows, a block of K at a time. Outputs are mma's rows, so that one row costs half
// of what 16 do. Knows nothing of where operands come from.
// Integers are exact within a group; its scale is applied in float, group by group. So a row's bits depend on K alone.
#pragma once
#include "form.cuh"

namespace baton {
namespace {

__device__ __forceinline__ float half_of(uint2 v, int i) {
  return __half2float(__ushort_as_half(uint16_t((i < 2 ? v.x : v.y) >> (16 * (i % 2)))));
}

// mma's A for a lane's outputs 2o and 2o + 1 of its four; W4: 16 times the value, so that nibbles need no sign extension.
template <int F>
__device__ __forceinline__ void operand(uint32_t a[4], const uint4 (&w)[2], int o, int half) {
  const uint32_t p = o ? w[0].z : w[0].x, q = o ? w[0].w : w[0].y, r = o ? w[1].z : w[1].x, s = o ? w[1].w : w[1].y;
  if constexpr (F == FORM_W4) {
#ifdef BATON_MUTATION_CUDA_LINEAR_ZERO
    constexpr uint32_t zero = 0x70707070u;
#else
    constexpr uint32_t zero = 0x80808080u;
#endif
    a[0] = and_xor(p << 4, 0xf0f0f0f0u, zero), a[1] = and_xor(q << 4, 0xf0f0f0f0u, zero);
    a[2] = and_xor(p, 0xf0f0f0f0u, zero), a[3] = and_xor(q, 0xf0f0f0f0u, zero);
  } else if constexpr (F == FORM_W4A16) {
    uint32_t first[4], second[4];
    int4_to_bf16x2(p, first);
    int4_to_bf16x2(q, second);
    a[0] = first[half], a[1] = second[half], a[2] = first[half + 2], a[3] = second[half + 2];
  } else {
    constexpr uint32_t flip = F == FORM_W8 ? 0x80808080u : 0;
    a[0] = p ^ flip, a[1] = q ^ flip, a[2] = r ^ flip, a[3] = s ^ flip;
  }
}

template <int F>
__device__ __forceinline__ void multiply_add(typename Traits<F>::Sum d[4], const uint32_t a[4], const uint32_t b[2]) {
  if constexpr (Traits<F>::integers)
    mma_s8_16832(d, a, b);
  else if constexpr (F == FORM_FP8)
    mma_e4m3_16832(d, a, b);
  else
    mma_bf16_16816(d, a, b);
}

// Of a lane (g, t): output 4g + 2o + i / 2 by row 8 nt + 2t + i % 2 is sums[o][nt][i].
template <int F, int MODE, int NT>
struct Tile {
  using Sum = typename Traits<F>::Sum;
  static constexpr int WORDS = Traits<F>::PIECE / 4;  // of a row's piece
  static constexpr float UNIT = F == FORM_W4 ? 0.0625f : 1.0f;  // of a sum: a power of two, which rounds nothing
  Sum sums[2][NT][4];
  float chain[2][MODE == PLAIN ? 1 : NT][4];
  Sum rows[MODE == ANY ? NT : 1][4];  // the rows' own sums over the group, for mins

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < NT * 8; i++) sums[i / 4 % 2][i / 8][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < (MODE == ANY ? NT * 4 : 0); i++) rows[i / 4][i % 4] = 0;
  }
  __device__ __forceinline__ void clear_chain() {
#pragma unroll
    for (int i = 0; i < (MODE == PLAIN ? 0 : NT * 8); i++) chain[i / 4 % 2][i / 8][i % 4] = 0;
  }

  // One block: b[nt] is the lane's piece of row 8 nt + g. `part` 0 or 1: the first or second 16 inputs alone; -1: all.
  __device__ __forceinline__ void multiply(const uint32_t (&b)[NT][WORDS], const uint4 (&w)[2], int part) {
    const bool mine = MODE != ANY || part < 0 || int(threadIdx.x) % 4 / 2 == part;
#pragma unroll
    for (int half = 0; half < WORDS / 2; half++) {
#pragma unroll
      for (int o = 0; o < (MODE == ANY ? 3 : 2); o++) {
        uint32_t a[4];
        if (o == 2)
          a[0] = a[1] = a[2] = a[3] = F == FORM_W4A16 ? 0x3f803f80u : 0x01010101u;
        else
          operand<F>(a, w, o, half);
        if (!mine) a[0] = a[1] = a[2] = a[3] = 0;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) multiply_add<F>(o == 2 ? rows[MODE == ANY ? nt : 0] : sums[o % 2][nt], a, b[nt] + 2 * half);
      }
    }
  }

  // scales, mins: of the lane's outputs 4g … 4g + 3.
  __device__ __forceinline__ void close_group(uint2 scales, uint2 mins, bool has_mins) {
    if constexpr (MODE != PLAIN) {
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float scale = half_of(scales, q) * UNIT, low = half_of(mins, q);
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int i = q % 2 * 2 + e;
            float x = __fmaf_rn(float(sums[q / 2][nt][i]), scale, chain[q / 2][nt][i]);
            if (MODE == ANY && has_mins) x = __fmaf_rn(-low, float(rows[MODE == ANY ? nt : 0][e]), x);
            chain[q / 2][nt][i] = x;
          }
      }
      clear_sums();
    }
  }

  static __device__ __forceinline__ float number(Sum x) { return float(x) * UNIT; }

  // What a slice came to, for output 4g + q and row 8 nt + 2t + e; as Sum's bits where sums go on exactly.
  __device__ __forceinline__ float value(int nt, int q, int e) const {
    if constexpr (MODE != PLAIN)
      return chain[q / 2][nt][q % 2 * 2 + e];
    else if constexpr (Traits<F>::integers)
      return __int_as_float(sums[q / 2][nt][q % 2 * 2 + e]);
    else
      return sums[q / 2][nt][q % 2 * 2 + e];
  }
};

// Slices in order: floats are added as floats, integers exactly.
template <int F, int MODE>
struct Total {
  static constexpr bool exact = MODE == PLAIN && Traits<F>::integers;
  float sum = 0;
  int whole = 0;
  __device__ __forceinline__ void add(float slice) {
    if constexpr (exact)
      whole += __float_as_int(slice);
    else
      sum = __fadd_rn(sum, slice);
  }
  __device__ __forceinline__ float get() const { return exact ? Tile<F, MODE, 1>::number(typename Traits<F>::Sum(whole)) : sum; }
};

// Scaled, biased: an output's value.
__device__ __forceinline__ float finished(const Call& c, float sum, int row, int64_t n) {
  if (c.w.row_scale) {
    if (c.x_scales) sum = __fmul_rn(sum, c.x_scales[row]);
    sum = __fmul_rn(sum, c.w.row_scale[n]);
  }
  return c.bias ? __fadd_rn(sum, c.bias[n]) : sum;
}

__device__ __forceinline__ void put(const Call& c, int row, int64_t column, float x) {
  const int64_t at = row * c.out_stride + column;
  if (c.out_dtype == BF16)
    static_cast<bf16*>(c.out)[at] = to_bf16(x);
  else
    static_cast<float*>(c.out)[at] = x;
}

}  // namespace
}  // namespace baton
