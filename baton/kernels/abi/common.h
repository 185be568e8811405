// What every op's cpu.cpp starts from: the ABI's types, bf16 and fp16 as uint16_t, and which instructions may be used.
// Knows nothing of any op. One source, compiled once per ISA (build.py): test BATON_AVX512, BATON_AVX2 with #if;
// the symbols are the same in each library, and the process loads one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define BATON_AVX512 1
#define BATON_AVX2 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define BATON_AVX512 0
#define BATON_AVX2 1
#else
#define BATON_AVX512 0
#define BATON_AVX2 0
#endif
#if BATON_AVX2
#include <immintrin.h>
#endif

#define BATON_API extern "C" __attribute__((visibility("default")))
#define BATON_INLINE inline __attribute__((always_inline))

namespace baton {

using bf16 = uint16_t;  // the upper half of a float
using fp16 = uint16_t;  // IEEE half

enum Dtype : int32_t { F32 = 0, BF16 = 1 };  // how an activation pointer is to be read; native.py has the same

BATON_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

BATON_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

BATON_INLINE float from_bf16(bf16 x) { return float_of(uint32_t(x) << 16); }

// Round to nearest even, NaN kept a NaN: torch's rounding.
BATON_INLINE bf16 to_bf16(float x) {
  uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

BATON_INLINE float from_fp16(fp16 x) {
#if BATON_AVX2
  return _cvtsh_ss(x);
#else
  uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return float_of(sign | ((rest << 13) + 0x38000000u));
  float small = float(rest) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -small : small;
#endif
}

// An element of a row of either dtype.
BATON_INLINE float load(const void* row, int32_t dtype, size_t at) {
  return dtype == BF16 ? from_bf16(static_cast<const bf16*>(row)[at]) : static_cast<const float*>(row)[at];
}

BATON_INLINE void store(void* row, int32_t dtype, size_t at, float x) {
  if (dtype == BF16)
    static_cast<bf16*>(row)[at] = to_bf16(x);
  else
    static_cast<float*>(row)[at] = x;
}

#if BATON_AVX512
BATON_INLINE __m512 load16_bf16(const bf16* at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}
// vcvtneps2bf16 flushes subnormals to zero; nothing else differs from to_bf16.
BATON_INLINE void store16_bf16(bf16* at, __m512 x) {
  _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(x));
}
#endif
#if BATON_AVX2
BATON_INLINE __m256 load8_bf16(const bf16* at) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
}
#endif

template <class F, int... I>
BATON_INLINE void unroll_over(F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>()), ...);
}

// f(0) … f(N - 1), unrolled before the optimizer looks: an array of vectors indexed inside stays in registers. Give f
// BATON_LAMBDA.
template <int N, class F>
BATON_INLINE void unroll(F&& f) {
  unroll_over(f, std::make_integer_sequence<int, N>());
}
#define BATON_LAMBDA __attribute__((always_inline))

}  // namespace baton
