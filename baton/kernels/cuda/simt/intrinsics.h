// CUDA's arithmetic, bit and caching functions for g++. Knows nothing of threads.
#pragma once
#include <algorithm>

#include "types.h"

template <class T>
T __ldg(const T* at) { return *at; }
template <class T>
T __ldcs(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
T __ldca(const T* at) { return *at; }
template <class T>
T __ldcv(const T* at) { return *at; }
template <class T>
void __stcs(T* at, T x) { *at = x; }
template <class T>
void __stcg(T* at, T x) { *at = x; }

using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return float(1.0 / std::sqrt(double(x))); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __exp2f(float x) { return std::exp2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x < 0 || x != x ? 0.0f : x > 1 ? 1.0f : x; }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline unsigned __float2uint_rn(float x) { return unsigned(std::nearbyint(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __int_as_float(int x) { return baton::simt::cast<float>(x); }
inline float __uint_as_float(unsigned x) { return baton::simt::cast<float>(x); }
inline int __float_as_int(float x) { return baton::simt::cast<int>(x); }
inline unsigned __float_as_uint(float x) { return baton::simt::cast<unsigned>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned pick = select >> (4 * i) & 15;
    unsigned byte = unsigned(both >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << (8 * i);
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (32 - (by & 31)));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int(int8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
  return c;
}
inline int __dp4a(unsigned a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int(uint8_t(a >> (8 * i))) * int(int8_t(b >> (8 * i)));
  return c;
}
