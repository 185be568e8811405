// Host twins of hopper.cuh's inlines. Knows nothing of tiles or ops. What is asynchronous happens as late as it may: a bulk copy lands
// when its barrier is waited for, until then its place is NaN; a product is computed at wgmma_wait, until then its sums are NaN,
// from what shared memory and registers hold by then. Descriptors are read as the PTX ISA draws them ("Matrix Descriptor Format").
#pragma once
#include "asm_twins.h"

namespace baton::simt {

uint32_t shared_offset(const void* at);  // in the block's window, which begins with 1 KiB of the system's
const char* shared_place(uint32_t at);

void mbarrier_begin(void* barrier, int arrivals, Site site);
void mbarrier_come(void* barrier, int64_t bytes, Site site);
void mbarrier_until(void* barrier, uint32_t parity, Site site);
void copy_bulk(void* to, const void* from, uint32_t bytes, void* barrier, Site site);

constexpr int WGMMA_COLUMNS = 128, WGMMA_SUMS = 64, WGMMA_BYTES = 32;

// One wgmma of one lane, from its issue to the wait.
struct Product {
  void (*run)(Lanes&);
  void* d;
  const uint32_t* a[4];
  uint32_t held[4];
  uint64_t b;
  bool more;
  char sums[WGMMA_SUMS * 4];  // what d was
};

void wgmma_issue(const Product& product, Site site);
void wgmma_fenced();
void wgmma_committed();
void wgmma_waited(Site site);
const char* wgmma_chunk(uint64_t descriptor, int row, int chunk);  // of 16 bytes

// The warp's 16 rows: every lane's `in` is its Product; sums go to Product.sums.
template <class E, class D, int per>
void multiply_group(Lanes& lanes) {
  constexpr int K = WGMMA_BYTES * per / 4, HALF = K / 2;
  static D a[16][K], b[K][WGMMA_COLUMNS];
  for (int lane = 0; lane < 32; lane++) {
    const auto* in = static_cast<const Product*>(lanes.in[lane]);
    for (int g = 0; g < 4; g++)
      for (int i = 0; i < per; i++) a[lane / 4 + 8 * (g & 1)][(g >> 1) * HALF + lane % 4 * per + i] = D(E::at(in->held, g, i));
  }
  const uint64_t descriptor = static_cast<const Product*>(lanes.in[0])->b;
  for (int n = 0; n < WGMMA_COLUMNS; n++)
    for (int chunk = 0; chunk < 2; chunk++) {
      uint32_t words[4];
      std::memcpy(words, wgmma_chunk(descriptor, n, chunk), 16);
      for (int i = 0; i < HALF; i++) b[chunk * HALF + i][n] = D(E::at(words, i / per, i % per));
    }
  using Wide = std::conditional_t<std::is_same_v<D, float>, double, int>;
  static Wide sums[16][WGMMA_COLUMNS];
  for (int lane = 0; lane < 32; lane++) {
    const auto* in = static_cast<const Product*>(lanes.in[lane]);
    for (int i = 0; i < WGMMA_SUMS; i++) {
      D before;
      std::memcpy(&before, in->sums + 4 * i, 4);
      sums[lane / 4 + 8 * (i / 2 % 2)][i / 4 * 8 + 2 * (lane % 4) + i % 2] = in->more ? Wide(before) : Wide(0);
    }
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < K; k++) {
      const Wide x = a[row][k];
      for (int n = 0; n < WGMMA_COLUMNS; n++) sums[row][n] += x * b[k][n];
    }
  for (int lane = 0; lane < 32; lane++) {
    auto* to = static_cast<Product*>(lanes.out[lane]);
    for (int i = 0; i < WGMMA_SUMS; i++) {
      const D sum = D(sums[lane / 4 + 8 * (i / 2 % 2)][i / 4 * 8 + 2 * (lane % 4) + i % 2]);
      std::memcpy(to->sums + 4 * i, &sum, 4);
    }
  }
}

template <class E, class D, int per>
void wgmma(D (&d)[WGMMA_SUMS], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2, const uint32_t& a3, uint64_t b, bool more,
           Site site) {
  wgmma_issue({multiply_group<E, D, per>, d, {&a0, &a1, &a2, &a3}, {a0, a1, a2, a3}, b, more, {}}, site);
}

}  // namespace baton::simt

namespace baton {

#define BATON_HERE simt::Site site = {__builtin_FILE(), __builtin_LINE()}
inline uint32_t shared_address(const void* p) { return simt::shared_offset(p); }
inline void mbarrier_init(uint64_t* barrier, int arrivals, BATON_HERE) { simt::mbarrier_begin(barrier, arrivals, site); }
inline void mbarrier_init_done() {}
inline void mbarrier_arrive(uint64_t* barrier, BATON_HERE) { simt::mbarrier_come(barrier, 0, site); }
inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes, BATON_HERE) { simt::mbarrier_come(barrier, bytes, site); }
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity, BATON_HERE) { simt::mbarrier_until(barrier, parity, site); }
inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier, BATON_HERE) {
  simt::copy_bulk(to, from, bytes, barrier, site);
}
inline void bulk_prefetch_l2(const void*, uint32_t) {}

template <int>
void give_registers_up() {}
template <int>
void take_registers() {}

inline void wgmma_fence() { simt::wgmma_fenced(); }
inline void wgmma_commit() { simt::wgmma_committed(); }
inline void wgmma_wait(BATON_HERE) { simt::wgmma_waited(site); }
template <class D, int count>
void wgmma_hold(D (&)[count]) {}

using Word = uint32_t;
inline void wgmma_bf16(float (&d)[64], const Word& a0, const Word& a1, const Word& a2, const Word& a3, uint64_t b, bool more, BATON_HERE) {
  simt::wgmma<simt::Bf16, float, 2>(d, a0, a1, a2, a3, b, more, site);
}
inline void wgmma_e4m3(float (&d)[64], const Word& a0, const Word& a1, const Word& a2, const Word& a3, uint64_t b, bool more, BATON_HERE) {
  simt::wgmma<simt::E4m3, float, 4>(d, a0, a1, a2, a3, b, more, site);
}
inline void wgmma_s8(int (&d)[64], const Word& a0, const Word& a1, const Word& a2, const Word& a3, uint64_t b, bool more, BATON_HERE) {
  simt::wgmma<simt::S8, int, 4>(d, a0, a1, a2, a3, b, more, site);
}
#undef BATON_HERE

}  // namespace baton
