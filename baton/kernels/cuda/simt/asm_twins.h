// Host twins of asm.cuh's inlines: the same lanes hold the same registers. Knows nothing of tiles or ops. A warp's matrix
// instruction is one meeting of its 32 lanes; cp.async copies when it is waited for. PTX ISA, "Matrix Fragments".
#pragma once
#include "simt.h"

namespace baton::simt {

constexpr unsigned WARP = 0xffffffffu;

struct Rows {
  const void* row;
};

// Matrix m's element (r, 2c), (r, 2c + 1) to lane 4r + c; `trans` hands out (2c, r), (2c + 1, r).
// Each lane's read is said by touch_shared: here one lane reads for all.
template <int matrices, bool trans>
__attribute__((no_sanitize_thread)) void load_matrices(Lanes& lanes) {
  for (int lane = 0; lane < 32; lane++)
    for (int m = 0; m < matrices; m++) {
      const int r = lane / 4, c = 2 * (lane % 4);
      uint32_t word = 0;
      for (int half = 0; half < 2; half++) {
        const int row = trans ? c + half : r, column = trans ? r : c + half;
        const auto* at = static_cast<const char*>(static_cast<const Rows*>(lanes.in[8 * m + row])->row);
        uint16_t element;
        std::memcpy(&element, at + 2 * column, 2);
        word |= uint32_t(element) << (16 * half);
      }
      static_cast<uint32_t*>(lanes.out[lane])[m] = word;
    }
}

void touch_shared(const void* at, size_t bytes, bool write);

template <int matrices, bool trans>
void ldmatrix(uint32_t* r, const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) return fail("ldmatrix: a row's address is not a multiple of 16");
  if (int(lane()) < 8 * matrices) touch_shared(row, 16, false);
  Rows in{row};
  meet(WARP, load_matrices<matrices, trans>, &in, r, BATON_SITE);
}

template <class D>
struct Operands {
  const uint32_t *a, *b;
  const D* c;
};

struct Bf16 {
  static float at(const uint32_t* r, int register_, int i) { return bf16_to_float(uint16_t(r[register_] >> (16 * i))); }
};
struct F16 {
  static float at(const uint32_t* r, int register_, int i) { return half_to_float(uint16_t(r[register_] >> (16 * i))); }
};
struct E4m3 {
  static float at(const uint32_t* r, int register_, int i) { return e4m3_to_float(uint8_t(r[register_] >> (8 * i))); }
};
struct S8 {
  static int at(const uint32_t* r, int register_, int i) { return int8_t(r[register_] >> (8 * i)); }
};

// m16n8k(per_register x 8): a's register g holds row (lane / 4) + 8 (g & 1), columns from k/2 (g >> 1); b's register g
// rows from k/2 g of column lane / 4. A register has `per` neighbours along k.
template <class E, class D, int per>
void multiply(Lanes& lanes) {
  constexpr int K = 8 * per, HALF = K / 2;
  D a[16][K], b[K][8], out[32][4];
  for (int lane = 0; lane < 32; lane++) {
    const auto* in = static_cast<const Operands<D>*>(lanes.in[lane]);
    for (int g = 0; g < 4; g++)
      for (int i = 0; i < per; i++) {
        const int k = (g >> 1) * HALF + (lane % 4) * per + i;
        a[lane / 4 + 8 * (g & 1)][k] = D(E::at(in->a, g, i));
        if (g < 2) b[g * HALF + (lane % 4) * per + i][lane / 4] = D(E::at(in->b, g, i));
      }
  }
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + 8 * (i >> 1), column = 2 * (lane % 4) + (i & 1);
      std::conditional_t<std::is_same_v<D, float>, double, int> sum = static_cast<const Operands<D>*>(lanes.in[lane])->c[i];
      for (int k = 0; k < K; k++) sum += decltype(sum)(a[row][k]) * b[k][column];
      out[lane][i] = D(sum);
    }
  for (int lane = 0; lane < 32; lane++) std::memcpy(lanes.out[lane], out[lane], sizeof out[lane]);
}

template <class E, class D, int per>
void mma(D* d, const uint32_t* a, const uint32_t* b) {
  Operands<D> in{a, b, d};
  meet(WARP, multiply<E, D, per>, &in, d, BATON_SITE);
}

}  // namespace baton::simt

namespace baton {

inline void cp_async_16(void* to, const void* from, bool filled = true) { simt::copy_later(to, from, 16, filled ? 16 : 0); }
inline void cp_async_4(void* to, const void* from, bool filled = true) { simt::copy_later(to, from, 4, filled ? 4 : 0); }
inline void cp_async_8(void* to, const void* from, bool filled = true) { simt::copy_later(to, from, 8, filled ? 8 : 0); }
inline void cp_async_commit() { simt::commit_copies(); }
template <int pending>
void cp_async_wait() { simt::wait_copies(pending); }

inline void ldmatrix_x4(uint32_t r[4], const void* row) { simt::ldmatrix<4, false>(r, row); }
inline void ldmatrix_x2(uint32_t r[2], const void* row) { simt::ldmatrix<2, false>(r, row); }
inline void ldmatrix_x4_trans(uint32_t r[4], const void* row) { simt::ldmatrix<4, true>(r, row); }
inline void ldmatrix_x2_trans(uint32_t r[2], const void* row) { simt::ldmatrix<2, true>(r, row); }

inline void mma_bf16_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) { simt::mma<simt::Bf16, float, 2>(d, a, b); }
inline void mma_f16_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) { simt::mma<simt::F16, float, 2>(d, a, b); }
inline void mma_s8_16832(int d[4], const uint32_t a[4], const uint32_t b[2]) { simt::mma<simt::S8, int, 4>(d, a, b); }
inline void mma_e4m3_16832(float d[4], const uint32_t a[4], const uint32_t b[2]) { simt::mma<simt::E4m3, float, 4>(d, a, b); }

inline void named_barrier_sync(int id, int threads, simt::Site site = {__builtin_FILE(), __builtin_LINE()}) {
  simt::named_barrier(id, threads, true, site);
}
inline void named_barrier_arrive(int id, int threads, simt::Site site = {__builtin_FILE(), __builtin_LINE()}) {
  simt::named_barrier(id, threads, false, site);
}
inline void grid_wait() {}
inline void grid_launch_next() {}

inline uint4 load_once(const void* p) { return *static_cast<const uint4*>(p); }
inline uint4 load_written(const void* p) { return *static_cast<const uint4*>(p); }
inline void store_once(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
inline void prefetch_l2(const void*) {}
inline uint32_t load_acquire(const uint32_t* p) {
  simt::yield();
  return *static_cast<const volatile uint32_t*>(p);
}
inline void store_release(uint32_t* p, uint32_t v) {
  simt::maybe_yield();
  *static_cast<volatile uint32_t*>(p) = v;
}

inline uint16_t to_e4m3x2(float low, float high) {
  return uint16_t(simt::float_to_e4m3(low) | simt::float_to_e4m3(high) << 8);
}
inline float2 from_e4m3x2(uint16_t pair) { return {simt::e4m3_to_float(uint8_t(pair)), simt::e4m3_to_float(uint8_t(pair >> 8))}; }
inline uint32_t e4m3x2_to_half2(uint16_t pair) {
  const float2 v = from_e4m3x2(pair);
  return uint32_t(simt::float_to_half(v.x)) | uint32_t(simt::float_to_half(v.y)) << 16;
}
inline uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flip) { return (x & mask) ^ flip; }
inline uint32_t bf16x2_minus(uint32_t a, uint32_t b) {
  const auto part = [&](int at) { return simt::float_to_bf16(simt::bf16_to_float(uint16_t(a >> at)) - simt::bf16_to_float(uint16_t(b >> at))); };
  return uint32_t(part(0)) | uint32_t(part(16)) << 16;
}
inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

}  // namespace baton
