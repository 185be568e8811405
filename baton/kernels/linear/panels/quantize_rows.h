// Rows of activations to what the linear kernels multiply: int8 with a scale and sums per group, or bf16.
// Knows nothing of weights. The integers are the same on every ISA.
#pragma once

#include <cmath>

#include "../../abi/common.h"

namespace baton {

constexpr float kFloor = 1e-30f;  // rows whose largest value is below count as zero: 127 / absmax stays finite

// The bits of the largest magnitude: a NaN beats infinity beats all numbers. What will be looked at a tile of rows later, at
// `ahead` (any address), is fetched meanwhile: the rows of a large batch come from far away.
inline uint32_t absmax_bits(const void* x, const char* ahead, int32_t dtype, int64_t k) {
  uint32_t most = 0;
  int64_t i = 0;
#if BATON_AVX512
  __m512i high[4], mask = _mm512_set1_epi32(0x7fffffff);
  unroll<4>([&](auto part) BATON_LAMBDA { high[part] = _mm512_setzero_si512(); });
  auto look = [&](__m512i& so_far, int64_t at) BATON_LAMBDA {
    __m512 v = dtype == BF16 ? load16_bf16((const bf16*)x + at) : _mm512_loadu_ps((const float*)x + at);
    so_far = _mm512_max_epu32(so_far, _mm512_and_si512(_mm512_castps_si512(v), mask));
  };
  const int64_t size = dtype == BF16 ? 2 : 4;
  for (; i + 64 <= k; i += 64)
    unroll<4>([&](auto part) BATON_LAMBDA {
      look(high[part], i + 16 * part);
      if (part < size) _mm_prefetch(ahead + i * size + 64 * part, _MM_HINT_T1);
    });
  for (; i + 16 <= k; i += 16) look(high[0], i);
  most = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_max_epu32(high[0], high[1]), _mm512_max_epu32(high[2], high[3])));
#endif
  for (; i < k; ++i) {
    uint32_t bits = bits_of(load(x, dtype, i)) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}

// What a row's integer sums begin with, one number per group, `stride` apart: weights are stored with a zero added.
struct Starts {
  int32_t* at;
  int64_t stride;
  int32_t zero;
};

// q (padded) gets round(x * 127 / absmax), zeros past k; `starts` -zero x the sum of each group. Returns the scale.
inline float quantize_row(const void* x, const char* ahead, int32_t dtype, int64_t k, int64_t padded, int64_t group, int8_t* q, Starts starts) {
#ifdef BATON_MUTATION_LINEAR_ABSMAX
  float most = float_of(absmax_bits(x, ahead, dtype, k - k % 16));  // the row's tail is forgotten
#else
  float most = float_of(absmax_bits(x, ahead, dtype, k));
#endif
  bool dead = !(most >= kFloor);  // zero or NaN
  float inverse = dead ? 0.0f : 127.0f / most;
  int64_t i = 0;
#if BATON_AVX512
  __m512 times = _mm512_set1_ps(inverse);
  for (; i + 16 <= k; i += 16) {
    __m512 v = dtype == BF16 ? load16_bf16((const bf16*)x + i) : _mm512_loadu_ps((const float*)x + i);
    _mm_storeu_si128((__m128i*)(q + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, times))));
  }
#elif BATON_AVX2
  __m256 times = _mm256_set1_ps(inverse);
  for (; i + 8 <= k; i += 8) {
    __m256 v = dtype == BF16 ? load8_bf16((const bf16*)x + i) : _mm256_loadu_ps((const float*)x + i);
    __m256i wide = _mm256_cvtps_epi32(_mm256_mul_ps(v, times));
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i*)(q + i), _mm_packs_epi16(half, half));
  }
#endif
  for (; i < k; ++i) {
    float v = load(x, dtype, i) * inverse;
    q[i] = v == v ? int8_t(std::nearbyintf(v < 127.0f ? v : 127.0f)) : int8_t(-128);  // |v| is at most 127 and a rounding
  }
#ifndef BATON_MUTATION_LINEAR_PAD
  std::memset(q + k, 0, padded - k);
#endif
  for (int64_t at = 0; at < padded; at += group, starts.at += starts.stride) {
    int64_t end = at + group < padded ? at + group : padded;
    int32_t sum = 0;
    int64_t j = at;
#if BATON_AVX512
    __m512i total = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
    for (; j + 64 <= end; j += 64) total = _mm512_dpbusd_epi32(total, ones, _mm512_loadu_si512(q + j));
    sum = _mm512_reduce_add_epi32(total);
#endif
    for (; j < end; ++j) sum += q[j];
    *starts.at = -starts.zero * sum;
  }
  return most != most ? most : dead ? 0.0f : most / 127.0f;
}

// x as bf16, zeros past k.
inline void round_row(const void* x, int32_t dtype, int64_t k, int64_t padded, bf16* out) {
  int64_t i = 0;
  if (dtype == BF16) {
    std::memcpy(out, x, k * 2), i = k;
  } else {
#if BATON_AVX512
    for (; i + 16 <= k; i += 16) store16_bf16(out + i, _mm512_loadu_ps((const float*)x + i));
#endif
    for (; i < k; ++i) out[i] = to_bf16(((const float*)x)[i]);
  }
  std::memset(out + k, 0, (padded - k) * 2);
}

}  // namespace baton
