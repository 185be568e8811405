// How KV elements are stored in a page: float32, bfloat16, float16, int8 and fp8 (e4m3), the last two with one float32 scale per
// (token, head). Knows nothing of attention. A plane (K or V of one layer) is
//
//   [token 0..15][kv_head][head_dim]  elements, then for int8 and fp8  [token 0..15][kv_head]  float32 scales
#pragma once
#include "paged.h"
#include "vector.h"

namespace baton {

constexpr int KV_F16 = 4;  // a KvType of a CPU alone

template <int T>
constexpr int kv_bytes() {
  return T == KV_F32 ? 4 : T == KV_BF16 || T == KV_F16 ? 2 : 1;
}

template <int T>
constexpr bool kv_scaled() {
  return T == KV_INT8 || T == KV_FP8;
}

struct KvPlane {
  int kv_heads, head_dim;

  template <int T>
  size_t bytes() const {
    return size_t(PAGE) * kv_heads * (size_t(head_dim) * kv_bytes<T>() + (kv_scaled<T>() ? 4 : 0));
  }
  template <int T>
  size_t row(int token, int head) const {
    return (size_t(token) * kv_heads + head) * head_dim * kv_bytes<T>();
  }
  template <int T>
  size_t scale(int token, int head) const {
    return size_t(PAGE) * kv_heads * head_dim * kv_bytes<T>() + (size_t(token) * kv_heads + head) * 4;
  }
};

// What stored elements must be multiplied by: fp8 comes out of its bits 2^-120 too small, subnormals included. The two
// halves of that factor go where nothing can overflow: one to what it is multiplied with, one to the result.
template <int T>
constexpr float kv_unit() {
  return T == KV_FP8 ? 0x1p60f : 1.0f;
}

// The byte at the top of each word, e4m3, to floats 2^-120 too small.
BATON_INLINE vf from_e4m3(vi x) { return from_bits((x >> 4) & splat_word(int32_t(0x87f00000))); }

// Element part (0 … 4 / size - 1) of each word, as floats.
template <int T>
BATON_INLINE vf unpack(vi words, int part) {
  if constexpr (T == KV_F32) return from_bits(words);
  if constexpr (T == KV_BF16) return from_bits(part ? (words & splat_word(int32_t(0xffff0000))) : (words << 16));
  if constexpr (T == KV_F16) return from_halves(part ? words >> 16 : words);
  if constexpr (T == KV_INT8) return to_float((words << (24 - 8 * part)) >> 24);
  return from_e4m3(words << (24 - 8 * part));
}

// Sixteen elements (n of them, the rest zero) in order, without scale and unit.
template <int T>
BATON_INLINE vf widen(const char* p, int n) {
  if constexpr (T == KV_F32) return load_part((const float*)p, n);
  if constexpr (T == KV_F16) {
    fp16 part[LANES] = {};
    return load_halves(n >= LANES ? (const fp16*)p : (const fp16*)std::memcpy(part, p, size_t(n) * 2));
  }
#if BATON_AVX512
  if constexpr (T == KV_BF16) {
    __m256i half = n >= LANES ? _mm256_loadu_si256((const __m256i*)p)
                  : _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p);
    return from_bits((vi)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  } else {
    __m128i quarter = n >= LANES ? _mm_loadu_si128((const __m128i*)p)
                   : _mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), p);
    if constexpr (T == KV_INT8) return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(quarter));
    return from_e4m3((vi)_mm512_cvtepi8_epi32(quarter) << 24);
  }
#elif BATON_AVX2
  char part[2 * LANES] = {};
  if (n < LANES) p = (const char*)std::memcpy(part, p, size_t(n) * kv_bytes<T>());
  if constexpr (T == KV_BF16) {
    const __m128i *half = (const __m128i*)p, low = _mm_loadu_si128(half), high = _mm_loadu_si128(half + 1);
    return from_bits(vi{_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)} << 16);
  } else {
    const __m128i quarter = _mm_loadu_si128((const __m128i*)p);
    const vi words{_mm256_cvtepi8_epi32(quarter), _mm256_cvtepi8_epi32(_mm_srli_si128(quarter, 8))};
    return T == KV_INT8 ? to_float(words) : from_e4m3(words << 24);
  }
#else
  vi words{};
  if constexpr (T == KV_BF16) {
    uint16_t x[LANES] = {};
    std::memcpy(x, p, size_t(n < LANES ? n : LANES) * 2);
    for (int i = 0; i < LANES; i++) words[i] = int32_t(x[i]);
    return from_bits(words << 16);
  } else {
    int8_t x[LANES] = {};
    std::memcpy(x, p, size_t(n < LANES ? n : LANES));
    for (int i = 0; i < LANES; i++) words[i] = x[i];
    return T == KV_INT8 ? to_float(words) : from_e4m3(words << 24);
  }
#endif
}

// |x| <= 448, nearest, ties to even.
BATON_INLINE uint8_t to_e4m3(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  uint32_t sign = (u >> 24) & 0x80, magnitude = u & 0x7fffffff;
  if (magnitude < 0x3c800000) {  // below 2^-6: steps of 2^-9
    float steps = std::nearbyint(std::fabs(x) * 512.0f);
    return uint8_t(sign | uint32_t(steps));
  }
  uint32_t rounded = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  uint32_t code = rounded - (120u << 3);
  return uint8_t(sign | (code > 0x7e ? 0x7e : code));
}

// Write one (token, head) of head_dim floats into a plane. A row with a NaN or infinity keeps its NaNs in its scale.
template <int T>
BATON_INLINE void put(char* plane, const KvPlane& shape, int token, int head, const float* x) {
  char* row = plane + shape.row<T>(token, head);
  const int n = shape.head_dim;
  if constexpr (T == KV_F32) {
    std::memcpy(row, x, size_t(n) * 4);
  } else if constexpr (T == KV_BF16) {
    for (int i = 0; i < n; i++) {
      uint16_t y = to_bf16(x[i]);
      std::memcpy(row + 2 * i, &y, 2);
    }
  } else if constexpr (T == KV_F16) {
    for (int i = 0; i < n; i++) {
      const fp16 y = to_fp16(x[i]);
      std::memcpy(row + 2 * i, &y, 2);
    }
  } else {
    float most = 0;
    bool fine = true;
    for (int i = 0; i < n; i++) {
      float a = std::fabs(x[i]);
      fine &= a <= 3.4e38f;
      most = a > most ? a : most;
    }
    const float top = T == KV_INT8 ? 127.0f : 448.0f;
    float scale = fine ? most / top : NAN, inverse = fine && most > 0 ? top / most : 0;
    std::memcpy(plane + shape.scale<T>(token, head), &scale, 4);
    for (int i = 0; i < n; i++) {
      float y = fine ? x[i] * inverse : 0;
      if constexpr (T == KV_INT8) {
        row[i] = char(int8_t(std::nearbyint(y > 127 ? 127 : y < -127 ? -127 : y)));
      } else {
        row[i] = char(to_e4m3(y > 448 ? 448 : y < -448 ? -448 : y));
      }
    }
  }
}

}  // namespace baton
