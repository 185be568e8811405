// Sixteen float lanes that stay in registers also where a register has eight: vector.h's 64-byte vectors go through memory
// there as soon as several are sums. Knows nothing of ops.
#pragma once
#include "../abi/vector.h"

namespace baton {

#if BATON_AVX2 && !BATON_AVX512
struct Lanes {
  __m256 low, high;
};
BATON_INLINE Lanes no_lanes() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
BATON_INLINE Lanes all_lanes(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BATON_INLINE Lanes lanes(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
BATON_INLINE Lanes lanes(const bf16* p) { return {load8_bf16(p), load8_bf16(p + 8)}; }
BATON_INLINE Lanes plus(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
BATON_INLINE Lanes plus_product(Lanes a, Lanes b, Lanes c) {  // a x b + c, rounded once
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
BATON_INLINE void put(float* p, Lanes v) { _mm256_storeu_ps(p, v.low), _mm256_storeu_ps(p + 8, v.high); }
BATON_INLINE float total(Lanes v) {  // as vector.h's sum
  const __m256 eight = _mm256_add_ps(v.low, v.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
using Lanes = vf;
BATON_INLINE Lanes no_lanes() { return vf{}; }
BATON_INLINE Lanes all_lanes(float x) { return splat(x); }
BATON_INLINE Lanes lanes(const float* p) { return load(p); }
BATON_INLINE Lanes lanes(const bf16* p) {
#if BATON_AVX512
  return (vf)load16_bf16(p);
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = from_bf16(p[i]);
  return v;
#endif
}
BATON_INLINE Lanes plus(Lanes a, Lanes b) { return a + b; }
BATON_INLINE Lanes plus_product(Lanes a, Lanes b, Lanes c) { return fma(a, b, c); }
BATON_INLINE void put(float* p, Lanes v) { store(p, v); }
BATON_INLINE float total(Lanes v) { return sum(v); }
#endif

// The first n < 16 lanes, the rest zero; nothing past them is read.
template <class T>
BATON_INLINE Lanes some_lanes(const T* p, int64_t n) {
  T some[LANES] = {};
  std::memcpy(some, p, size_t(n) * sizeof(T));
  return lanes(some);
}

// p[0 … n - 1] += the first n lanes.
BATON_INLINE void add_lanes(float* p, Lanes v, int64_t n) {
  if (n >= LANES) return put(p, plus(lanes(p), v));
  float some[LANES] = {};
  std::memcpy(some, p, size_t(n) * 4);
  put(some, plus(lanes(some), v));
  std::memcpy(p, some, size_t(n) * 4);
}

}  // namespace baton
