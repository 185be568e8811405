// Sixteen elements of rows that are float32, bf16 or fp16. Knows nothing of ops.
#pragma once
#include "vector.h"

namespace baton {

struct Half {  // a type of its own, since bf16 and fp16 are one
  fp16 bits;
};

BATON_INLINE vf sixteen(const Half* p) { return load_halves((const fp16*)p); }
BATON_INLINE vf sixteen(const float* p) { return load(p); }

BATON_INLINE vf sixteen(const bf16* p) {
#if BATON_AVX512
  return (vf)load16_bf16(p);
#elif BATON_AVX2
  return {load8_bf16(p), load8_bf16(p + 8)};
#else
  float each[LANES];
  for (int i = 0; i < LANES; i++) each[i] = from_bf16(p[i]);
  return load(each);
#endif
}

// The first n of them, the rest zero; nothing past them is read.
template <class T>
BATON_INLINE vf elements_at(const T* p, int64_t n) {
  if (n >= LANES) return sixteen(p);
  T some[LANES] = {};
  std::memcpy(some, p, size_t(n) * sizeof(T));
  return sixteen(some);
}

BATON_INLINE void put_element(float* p, float x) { *p = x; }
BATON_INLINE void put_element(bf16* p, float x) { *p = to_bf16(x); }
BATON_INLINE void put_element(Half* p, float x) { p->bits = to_fp16(x); }

// 1 / (1 + e^-x), and x times that.
BATON_INLINE vf sigmoid(vf x) {
  const vf least = splat(-87.0f), size = select(x < least, least, x);
  return splat(1.0f) / (splat(1.0f) + exponential(vf{} - size));
}
BATON_INLINE vf silu(vf x) { return x * sigmoid(x); }

}  // namespace baton
