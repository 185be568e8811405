// CUDA's vector and 16- and 8-bit float types for g++, with the conversions that kernels use, bit for bit as on the device:
// round to nearest even, fp8 e4m3 saturating at 448. Knows nothing of threads.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define BATON_VECTOR(T, name, align2, align4)                                                     \
  struct alignas(align2) name##2 { T x, y; };                                                     \
  struct name##3 { T x, y, z; };                                                                  \
  struct alignas(align4) name##4 { T x, y, z, w; };                                               \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                      \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                              \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
BATON_VECTOR(float, float, 8, 16)
BATON_VECTOR(int, int, 8, 16)
BATON_VECTOR(unsigned, uint, 8, 16)
BATON_VECTOR(short, short, 4, 8)
BATON_VECTOR(unsigned short, ushort, 4, 8)
BATON_VECTOR(signed char, char, 2, 4)
BATON_VECTOR(unsigned char, uchar, 2, 4)
#undef BATON_VECTOR
struct alignas(16) double2 { double x, y; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };

namespace baton::simt {

template <class To, class From>
inline To cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float bf16_to_float(uint16_t x) { return cast<float>(uint32_t(x) << 16); }

inline uint16_t float_to_bf16(float x) {
  uint32_t bits = cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // as cvt.rn.bf16.f32: one NaN
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float half_to_float(uint16_t x) { return float(cast<_Float16>(x)); }
inline uint16_t float_to_half(float x) { return x != x ? uint16_t(0x7fff) : cast<uint16_t>(_Float16(x)); }

inline float e4m3_to_float(uint8_t x) {
  const int exponent = (x >> 3) & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float size = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
  return x & 0x80 ? -size : size;
}

// cvt.rn.satfinite.e4m3x2.f32: infinities saturate, NaN becomes 0x7f.
inline uint8_t float_to_e4m3(float x) {
  const uint32_t bits = cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude < 0x3c800000u) return uint8_t(sign | uint32_t(std::nearbyint(std::fabs(x) * 512.0f)));
  const uint32_t rounded = (uint64_t(magnitude) + 0x7ffffu + ((magnitude >> 20) & 1)) >> 20;
  const uint32_t code = rounded - (120u << 3);
  return uint8_t(sign | (code > 0x7e ? 0x7e : code));
}

}  // namespace baton::simt

struct __nv_bfloat16_raw { unsigned short x; };
struct __nv_bfloat16 {
  unsigned short x;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) : x(baton::simt::float_to_bf16(f)) {}
  __nv_bfloat16(const __nv_bfloat16_raw& raw) : x(raw.x) {}
  operator float() const { return baton::simt::bf16_to_float(x); }
};
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half {
  unsigned short bits;
  __half() = default;
  __half(float f) : bits(baton::simt::float_to_half(f)) {}
  operator float() const { return baton::simt::half_to_float(bits); }
};
struct alignas(4) __half2 { __half x, y; };
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16_raw{x}; }
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline float __half2float(__half x) { return float(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { return baton::simt::cast<__half>(x); }
