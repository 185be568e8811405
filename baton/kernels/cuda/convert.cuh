// Stored numbers to floats and back: bf16 as uint16_t, e4m3 and int8 bytes, int4 nibbles; 16-byte vectors of them.
// Knows nothing of pages or weights.
#pragma once

namespace baton {

using bf16 = uint16_t;

__device__ __forceinline__ float from_bf16(bf16 x) { return __uint_as_float(uint32_t(x) << 16); }
__device__ __forceinline__ bf16 to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32_t to_bf16x2(float low, float high) {
  return uint32_t(to_bf16(low)) | uint32_t(to_bf16(high)) << 16;
}

// Byte i of a word of four int8.
__device__ __forceinline__ float int8_at(uint32_t word, int i) { return float(int(word << (24 - 8 * i)) >> 24); }

__device__ __forceinline__ uint32_t to_int8x4(float a, float b, float c, float d) {
  return uint32_t(uint8_t(__float2int_rn(a))) | uint32_t(uint8_t(__float2int_rn(b))) << 8 |
         uint32_t(uint8_t(__float2int_rn(c))) << 16 | uint32_t(uint8_t(__float2int_rn(d))) << 24;
}

__device__ __forceinline__ uint32_t to_e4m3x4(float a, float b, float c, float d) {
  return uint32_t(to_e4m3x2(a, b)) | uint32_t(to_e4m3x2(c, d)) << 16;
}

__device__ __forceinline__ float from_e4m3(uint8_t x) { return from_e4m3x2(x).x; }

// Eight int4 of a word, each plus 8 (stored 0 … 15), as bf16 pairs: nibble i and i + 4 make pair i. 128 + n has n in the
// low bits of its bf16 mantissa, so a mask and an or make the number, and one subtraction of 136 its sign.
__device__ __forceinline__ void int4_to_bf16x2(uint32_t word, uint32_t pair[4]) {
  for (int i = 0; i < 4; i++) pair[i] = bf16x2_minus((word >> (4 * i) & 0x000f000fu) | 0x43004300u, 0x43084308u);
}

// How an activation pointer is to be read: abi/common.h has the same.
enum Dtype : int32_t { F32 = 0, BF16 = 1 };

// Four neighbours as floats; `at` is a multiple of four.
__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float4 load4(const bf16* p) {
  const uint2 v = *reinterpret_cast<const uint2*>(p);
  return make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
}
__device__ __forceinline__ void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }
__device__ __forceinline__ void store4(bf16* p, float4 v) {
  *reinterpret_cast<uint2*>(p) = make_uint2(to_bf16x2(v.x, v.y), to_bf16x2(v.z, v.w));
}

}  // namespace baton
