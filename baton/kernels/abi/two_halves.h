// Sixteen lanes as two AVX2 registers, with the operators that the compiler's own vectors have. Knows nothing of ops.
// Included by vector.h alone.
//
// g++ keeps vectors that are wider than the CPU's registers in memory, whatever is done with them; two registers in a struct
// stay in registers.
#pragma once
#include "common.h"

namespace baton {

struct vi {
  __m256i low, high;
  BATON_INLINE int32_t operator[](int lane) const {
    int32_t each[16];
    std::memcpy(each, this, sizeof each);
    return each[lane];
  }
};

struct vf {
  __m256 low, high;
  BATON_INLINE float operator[](int lane) const {
    float each[16];
    std::memcpy(each, this, sizeof each);
    return each[lane];
  }
};

BATON_INLINE vf load(const void* p) {
  return {_mm256_loadu_ps((const float*)p), _mm256_loadu_ps((const float*)p + 8)};
}
BATON_INLINE vi load_words(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
BATON_INLINE void store(void* p, vf v) { _mm256_storeu_ps((float*)p, v.low), _mm256_storeu_ps((float*)p + 8, v.high); }
BATON_INLINE vf from_bits(vi v) { return {_mm256_castsi256_ps(v.low), _mm256_castsi256_ps(v.high)}; }
BATON_INLINE vi to_bits(vf v) { return {_mm256_castps_si256(v.low), _mm256_castps_si256(v.high)}; }

#define BATON_HALVES(result, type, op, half) \
  BATON_INLINE result operator op(type a, type b) { return {half(a.low, b.low), half(a.high, b.high)}; }
BATON_HALVES(vf, vf, +, _mm256_add_ps)
BATON_HALVES(vf, vf, -, _mm256_sub_ps)
BATON_HALVES(vf, vf, *, _mm256_mul_ps)
BATON_HALVES(vf, vf, /, _mm256_div_ps)
BATON_HALVES(vi, vi, +, _mm256_add_epi32)
BATON_HALVES(vi, vi, -, _mm256_sub_epi32)
BATON_HALVES(vi, vi, *, _mm256_mullo_epi32)
BATON_HALVES(vi, vi, &, _mm256_and_si256)
BATON_HALVES(vi, vi, |, _mm256_or_si256)
BATON_HALVES(vi, vi, ^, _mm256_xor_si256)
BATON_HALVES(vi, vi, >, _mm256_cmpgt_epi32)
BATON_HALVES(vi, vi, ==, _mm256_cmpeq_epi32)
#undef BATON_HALVES

BATON_INLINE vi operator~(vi a) {
  const __m256i ones = _mm256_set1_epi32(-1);
  return {_mm256_xor_si256(a.low, ones), _mm256_xor_si256(a.high, ones)};
}
BATON_INLINE vi operator<(vi a, vi b) { return b > a; }
BATON_INLINE vi operator<=(vi a, vi b) { return ~(a > b); }
BATON_INLINE vi operator>=(vi a, vi b) { return ~(b > a); }
BATON_INLINE vi operator!=(vi a, vi b) { return ~(a == b); }
BATON_INLINE vi operator<<(vi a, int bits) { return {_mm256_slli_epi32(a.low, bits), _mm256_slli_epi32(a.high, bits)}; }
BATON_INLINE vi operator>>(vi a, int bits) { return {_mm256_srai_epi32(a.low, bits), _mm256_srai_epi32(a.high, bits)}; }

#define BATON_COMPARED(op, how)                                                                         \
  BATON_INLINE vi operator op(vf a, vf b) {                                                             \
    return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, how)), _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, how))}; \
  }
BATON_COMPARED(<, _CMP_LT_OQ)
BATON_COMPARED(<=, _CMP_LE_OQ)
BATON_COMPARED(>, _CMP_GT_OQ)
BATON_COMPARED(>=, _CMP_GE_OQ)
BATON_COMPARED(==, _CMP_EQ_OQ)
BATON_COMPARED(!=, _CMP_NEQ_UQ)
#undef BATON_COMPARED

BATON_INLINE vf operator-(vf a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.low, sign), _mm256_xor_ps(a.high, sign)};
}
template <class T>
BATON_INLINE T& operator+=(T& a, T b) { return a = a + b; }
template <class T>
BATON_INLINE T& operator-=(T& a, T b) { return a = a - b; }
template <class T>
BATON_INLINE T& operator*=(T& a, T b) { return a = a * b; }
BATON_INLINE vi& operator|=(vi& a, vi b) { return a = a | b; }
BATON_INLINE vi& operator&=(vi& a, vi b) { return a = a & b; }

// An 8 x 8 block of words transposed.
BATON_INLINE void transpose_eight(__m256i (&r)[8]) {
  __m256i a[8], b[8];
  unroll<4>([&](auto i) BATON_LAMBDA {
    a[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]), a[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  });
  unroll<2>([&](auto i) BATON_LAMBDA {
    unroll<2>([&](auto j) BATON_LAMBDA {
      b[4 * i + 2 * j] = _mm256_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
    });
  });
  unroll<4>([&](auto i) BATON_LAMBDA {
    r[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20), r[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  });
}

}  // namespace baton
