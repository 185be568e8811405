// K and V of a page as operands of mma: 16 bytes of memory per lane to registers of two 16-bit numbers each, and floats
// as sums of such numbers. Knows nothing of softmax.
//
// bf16 keeps its format and a float is three bf16. int8 and e4m3 become f16, exactly, and a float whose row is brought
// below 1 is two f16. So products are exact and sums are float32's: as near to float64 as the CPU's kernel.
#pragma once
#include "attention.h"

namespace baton {

template <int T>
__host__ __device__ constexpr bool scaled() {
  return T != KV_BF16;
}
template <int T>
__host__ __device__ constexpr int chunk_elements() {  // in 16 bytes
  return T == KV_BF16 ? 8 : 16;
}
template <int T>
__host__ __device__ constexpr int parts_of_float() {
  return T == KV_BF16 ? 3 : 2;
}
template <int T>
__host__ __device__ constexpr int most_rows() {  // of queries x group in the 16 rows of an mma
  return 16 / parts_of_float<T>();
}
// What an e4m3 read as f16 must be multiplied by.
template <int T>
__host__ __device__ constexpr float stored_unit() {
  return T == KV_FP8 ? 256.0f : 1.0f;
}

#ifdef BATON_SIMT
inline uint32_t half2_minus(uint32_t a, uint32_t b) {
  uint32_t found = 0;
  for (int i = 0; i < 32; i += 16)
    found |= uint32_t(simt::float_to_half(simt::half_to_float(uint16_t(a >> i)) - simt::half_to_float(uint16_t(b >> i)))) << i;
  return found;
}
inline uint16_t half_bits(float x) { return simt::float_to_half(x); }
inline float half_value(uint16_t x) { return simt::half_to_float(x); }
#else
__device__ __forceinline__ uint32_t half2_minus(uint32_t a, uint32_t b) {
  const __half2 found = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&found);
}
__device__ __forceinline__ uint16_t half_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
__device__ __forceinline__ float half_value(uint16_t x) { return __half2float(__ushort_as_half(x)); }
#endif

// Bytes 0 and 2 (odd: 1 and 3) of a word as two f16.
template <int T>
__device__ __forceinline__ uint32_t to_halves(uint32_t w, bool odd) {
  if constexpr (T == KV_INT8) {
    w ^= 0x80808080u;
    return half2_minus((odd ? w >> 8 : w) & 0x00ff00ffu | 0x64006400u, 0x64806480u);  // 1024 + (x + 128) - 1152
  } else {
    return odd ? (w & 0x80008000u) | (w & 0x7f007f00u) >> 1 : (w & 0x00800080u) << 8 | (w & 0x007f007fu) << 7;
  }
}

// Where element d of a row of q lies, so that a chunk of K in memory's order meets it: 8-bit words come out as
// elements 0, 2 and 1, 3.
template <int T>
__device__ __forceinline__ int query_place(int d) {
  if constexpr (T == KV_BF16) return d;
  return (d & ~3) | (d & 1) << 1 | (d & 2) >> 1;
}

template <int T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  if constexpr (T == KV_BF16)
    mma_bf16_16816(c, a, b);
  else
    mma_f16_16816(c, a, b);
}

// The part of x that the parts before have left: called in order of parts.
template <int T>
__device__ __forceinline__ uint16_t take_part(float& x) {
  const uint16_t bits = T == KV_BF16 ? to_bf16(x) : half_bits(x);
  x -= T == KV_BF16 ? from_bf16(bits) : half_value(bits);
  return bits;
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// 2^n > x >= 2^(n-1) for positive finite x: 2^n and 2^-n. Outside of what floats can turn over, 1.
__device__ __forceinline__ void power_above(float x, float& power, float& inverse) {
  const uint32_t exponent = __float_as_uint(x) >> 23;
  const bool fine = exponent > 2 && exponent < 252;
  power = fine ? __uint_as_float((exponent + 1) << 23) : 1.0f;
  inverse = fine ? __uint_as_float((253 - exponent) << 23) : 1.0f;
}

// A page's plane of K (or V), rows of head_dim elements by token and KV head, then for 8 bits their scales.
template <int T>
struct Plane {
  const char* at;
  int kv_heads, head_dim;

  __device__ __forceinline__ Plane(const PagedKv& kv, int page, bool values) : kv_heads(kv.kv_heads), head_dim(kv.head_dim) {
    at = kv.pages + int64_t(page) * kv.page_bytes + kv.layer_offset + (values ? bytes() : 0);
  }
  __device__ __forceinline__ int64_t elements() const { return int64_t(PAGE) * kv_heads * head_dim * (T == KV_BF16 ? 2 : 1); }
  __device__ __forceinline__ int64_t bytes() const { return elements() + (scaled<T>() ? int64_t(PAGE) * kv_heads * 4 : 0); }
  __device__ __forceinline__ uint4 chunk(int token, int head, int c) const {
    const char* from = at + (int64_t(token) * kv_heads + head) * head_dim * (T == KV_BF16 ? 2 : 1) + c * 16;
#ifdef BATON_MEGAKERNEL  // what this very launch appended is among it
    return load_written(from);
#else
    return load_once(from);
#endif
  }
  __device__ __forceinline__ float scale(int token, int head) const {
    return *reinterpret_cast<const float*>(at + elements() + (int64_t(token) * kv_heads + head) * 4);
  }
};

}  // namespace baton
