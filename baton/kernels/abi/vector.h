// Sixteen float lanes on any x86 (or none): AVX-512 and AVX2 by intrinsics, plain by the compiler's own vectors.
// Knows nothing of ops. Every function gives the same bits for the same lanes, whatever calls it: multiply-adds are
// explicit (the build turns contraction off), and sums have one order.
#pragma once
#include <cmath>

#include "common.h"

#pragma GCC diagnostic ignored "-Wpsabi"

namespace baton {

constexpr int LANES = 16;

#if BATON_AVX2 && !BATON_AVX512
}  // namespace baton
#include "two_halves.h"
namespace baton {
#else
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
#endif

#if !BATON_AVX2 || BATON_AVX512
BATON_INLINE vf load(const void* p) {
  vf v;
  std::memcpy(&v, p, 64);
  return v;
}

BATON_INLINE vi load_words(const void* p) {
  vi v;
  std::memcpy(&v, p, 64);
  return v;
}

BATON_INLINE void store(void* p, vf v) { std::memcpy(p, &v, 64); }

BATON_INLINE vf from_bits(vi v) {
  vf x;
  std::memcpy(&x, &v, 64);
  return x;
}

BATON_INLINE vi to_bits(vf v) {
  vi x;
  std::memcpy(&x, &v, 64);
  return x;
}
#endif

BATON_INLINE vf splat(float x) {
#if BATON_AVX512
  return (vf)_mm512_set1_ps(x);
#elif BATON_AVX2
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
#else
  return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#endif
}

BATON_INLINE vi splat_word(int32_t x) {
#if BATON_AVX2 && !BATON_AVX512
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
#else
  return vi{} + x;
#endif
}

// 0 … 15.
BATON_INLINE vi lane_numbers() {
  const int32_t each[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_words(each);
}

// Round to nearest even, NaN kept a NaN; what is finite stays so, up to 65504.
BATON_INLINE fp16 to_fp16(float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return fp16(sign | 0x7e00);
  if (size == 0x7f800000u) return fp16(sign | 0x7c00);
  if (size >= 0x477ff000u) return fp16(sign | 0x7bff);
  if (size < 0x38800000u) return fp16(sign | (bits_of(float_of(size) + 0.5f) & 0xffff));  // whose last bit is 2^-24
  return fp16(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1)) >> 13));
}

// Sixteen halves as floats.
BATON_INLINE vf load_halves(const fp16* p) {
#if BATON_AVX512
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif BATON_AVX2
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = from_fp16(p[i]);
  return v;
#endif
}

// The same of the low half of each word.
BATON_INLINE vf from_halves(vi x) {
#if BATON_AVX512
  return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x));
#elif BATON_AVX2
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i mixed = _mm256_packus_epi32(_mm256_and_si256(x.low, low), _mm256_and_si256(x.high, low));
  const __m256i all = _mm256_permute4x64_epi64(mixed, 0xd8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(all)), _mm256_cvtph_ps(_mm256_extracti128_si256(all, 1))};
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = from_fp16(fp16(x[i]));
  return v;
#endif
}

// The first n lanes, the rest `beside`; nothing past them is touched.
BATON_INLINE vf load_part(const float* p, int n, float beside = 0) {
  if (n >= LANES) return load(p);
  vf v = splat(beside);
  std::memcpy(&v, p, size_t(n) * 4);
  return v;
}

BATON_INLINE void store_part(float* p, vf v, int n) {
  if (n >= LANES) return store(p, v);
  std::memcpy(p, &v, size_t(n) * 4);
}

// The first n bytes (at most 64) as sixteen words, the rest zero.
BATON_INLINE vi load_bytes(const char* p, int n) {
  if (n >= 64) return load_words(p);
#if BATON_AVX512
  __mmask64 mask = (n <= 0) ? 0 : (~0ull >> (64 - n));
  return (vi)_mm512_maskz_loadu_epi8(mask, p);
#else
  vi v{};
  if (n > 0) std::memcpy(&v, p, size_t(n));
  return v;
#endif
}

// a x b + c, rounded once (without the instruction: by way of double, which all but never shows).
BATON_INLINE vf fma(vf a, vf b, vf c) {
#if BATON_AVX512
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif BATON_AVX2
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
#else
  typedef double vd __attribute__((vector_size(128)));
  const vd x = __builtin_convertvector(a, vd), y = __builtin_convertvector(b, vd), z = __builtin_convertvector(c, vd);
  return __builtin_convertvector(x * y + z, vf);
#endif
}

BATON_INLINE vf maximum(vf a, vf b) {
#if BATON_AVX512
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif BATON_AVX2
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
#else
  return a > b ? a : b;
#endif
}

// `mask`: all ones or zeros in every lane.
BATON_INLINE vf select(vi mask, vf yes, vf no) {
#if BATON_AVX2 && !BATON_AVX512
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(mask.high))};
#else
  return mask ? yes : no;
#endif
}

// Lanes summed pairwise: i with i + 8, then + 4, + 2, + 1.
BATON_INLINE float sum(vf v) {
#if BATON_AVX2
#if BATON_AVX512
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 eight = _mm256_add_ps(v.low, v.high);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float x[LANES];
  store(x, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) x[i] = x[i] + x[i + width];
  return x[0];
#endif
}

// Of lanes without a NaN.
BATON_INLINE float largest(vf v) {
#if BATON_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#elif BATON_AVX2
  const __m256 eight = _mm256_max_ps(v.low, v.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float x[LANES], best;
  store(x, v);
  best = x[0];
  for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
  return best;
#endif
}

BATON_INLINE vf to_float(vi v) {
#if BATON_AVX2 && !BATON_AVX512
  return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)};
#else
  return __builtin_convertvector(v, vf);
#endif
}

// Towards zero.
BATON_INLINE vi to_words(vf v) {
#if BATON_AVX2 && !BATON_AVX512
  return {_mm256_cvttps_epi32(v.low), _mm256_cvttps_epi32(v.high)};
#else
  return __builtin_convertvector(v, vi);
#endif
}

// Nearest integers, ties to even, of |x| < 2^22.
BATON_INLINE vf nearest(vf x) {
#if BATON_AVX512
  return (vf)_mm512_roundscale_ps((__m512)x, 8);
#else
  const vf magic = splat(12582912.0f);
  return (x + magic) - magic;
#endif
}

// e^x for x <= 88, about one unit in the last place; below -87.3 exactly 0, also for -inf.
BATON_INLINE vf exponential(vf x) {
  const vi small = x < splat(-87.3f);
#if BATON_AVX512
  x = (vf)_mm512_max_ps(_mm512_set1_ps(-87.3f), (__m512)x);  // of a NaN: the second operand, NaN
#else
  x = select(small, splat(-87.3f), x);
#endif
  vf n = nearest(x * splat(1.44269504088896341f));
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
#if BATON_AVX512
  return select(small, vf{}, (vf)_mm512_scalef_ps((__m512)p, (__m512)n));
#else
  vi scale = (to_words(n) + splat_word(127)) << 23;
  return select(small, vf{}, p * from_bits(scale));
#endif
}

BATON_INLINE float exponential(float x) {
  vf v = exponential(splat(x));
  return v[0];
}

// e^x for x <= 0, within 3e-7 of it down to -10; below -87.3 exactly 0, also for -inf. Half of what the other takes.
BATON_INLINE vf decay(vf x) {
  const vf magic = splat(12582912.0f + 127.0f), octaves = splat(1.44269504088896341f);
  const vf n = fma(x, octaves, magic), r = fma(x, octaves, magic - n), scale = from_bits(to_bits(n) << 23);
  vf p = fma(splat(1.326472731e-3f), r, splat(9.671512991e-3f));
  p = fma(p, r, splat(5.550733581e-2f));
  p = fma(p, r, splat(2.402224243e-1f));
  p = fma(p, r, splat(6.931470037e-1f));
  p = fma(p, r, splat(1.0f));
#if BATON_AVX512
  return (vf)_mm512_maskz_mul_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), (__m512)p, (__m512)scale);
#else
  return select(x < splat(-87.3f), vf{}, p * scale);
#endif
}

// 16 x 16 words transposed, in place.
BATON_INLINE void transpose(vi r[LANES]) {
#if BATON_AVX512
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)r[i], (__m512i)r[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)r[i], (__m512i)r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    r[i] = (vi)_mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    r[i + 8] = (vi)_mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
#elif BATON_AVX2
  __m256i blocks[4][8];  // upper left and right, lower left and right
  unroll<8>([&](auto i) BATON_LAMBDA {
    blocks[0][i] = r[i].low, blocks[1][i] = r[i].high, blocks[2][i] = r[i + 8].low, blocks[3][i] = r[i + 8].high;
  });
  for (auto& block : blocks) transpose_eight(block);
  unroll<8>([&](auto i) BATON_LAMBDA { r[i] = {blocks[0][i], blocks[2][i]}, r[i + 8] = {blocks[1][i], blocks[3][i]}; });
#else
  int32_t from[16][16], to[16][16];
  std::memcpy(from, r, sizeof from);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[j][i] = from[i][j];
  std::memcpy(r, to, sizeof to);
#endif
}

}  // namespace baton
