// Host twins of hopper_across.cuh's inlines, as hopper_twins.h has the others. Knows nothing of tiles or ops. A product of what threads
// copied by cp.async is refused where no proxy fence lies between.
#pragma once
#include "hopper_twins.h"

namespace baton::simt {

void come_with_copies(void* barrier, Site site);  // cp.async's of this thread, and then its arrival
void proxy_fenced();
void wgmma_issue_across(const Product& product, int columns, Site site);
void wgmma_waited_but_one(Site site);
const char* wgmma_columns(uint64_t descriptor, int row, int chunk);  // of row `row` of K, columns 8 chunk … 8 chunk + 7

// The warp's 16 rows by 16 rows of K, as multiply_group.
template <int columns>
void multiply_across(Lanes& lanes) {
  static float a[16][16], b[16][columns];
  static double sums[16][columns];
  for (int lane = 0; lane < 32; lane++) {
    const auto* in = static_cast<const Product*>(lanes.in[lane]);
    for (int g = 0; g < 4; g++)
      for (int i = 0; i < 2; i++) a[lane / 4 + 8 * (g & 1)][(g >> 1) * 8 + lane % 4 * 2 + i] = Bf16::at(in->held, g, i);
    for (int i = 0; i < columns / 2; i++) {
      float before;
      std::memcpy(&before, in->sums + 4 * i, 4);
      sums[lane / 4 + 8 * (i / 2 % 2)][i / 4 * 8 + 2 * (lane % 4) + i % 2] = in->more ? before : 0;
    }
  }
  const uint64_t descriptor = static_cast<const Product*>(lanes.in[0])->b;
  for (int k = 0; k < 16; k++)
    for (int chunk = 0; chunk < columns / 8; chunk++) {
      uint32_t words[4];
      std::memcpy(words, wgmma_columns(descriptor, k, chunk), 16);
      for (int i = 0; i < 8; i++) b[k][chunk * 8 + i] = Bf16::at(words, i / 2, i % 2);
    }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < columns; n++) sums[row][n] += double(a[row][k]) * b[k][n];
  for (int lane = 0; lane < 32; lane++) {
    auto* to = static_cast<Product*>(lanes.out[lane]);
    for (int i = 0; i < columns / 2; i++) {
      const float sum = float(sums[lane / 4 + 8 * (i / 2 % 2)][i / 4 * 8 + 2 * (lane % 4) + i % 2]);
      std::memcpy(to->sums + 4 * i, &sum, 4);
    }
  }
}

}  // namespace baton::simt

namespace baton {

#define BATON_HERE simt::Site site = {__builtin_FILE(), __builtin_LINE()}
inline void cp_async_arrive(uint64_t* barrier, BATON_HERE) { simt::come_with_copies(barrier, site); }
inline void async_proxy_fence() { simt::proxy_fenced(); }
inline void wgmma_wait_but_one(BATON_HERE) { simt::wgmma_waited_but_one(site); }
inline void stays_in_front(float) {}
template <int count>
void wgmma_bf16_across(float (&d)[count], const Word& a0, const Word& a1, const Word& a2, const Word& a3, uint64_t b, bool more, BATON_HERE) {
  simt::wgmma_issue_across({simt::multiply_across<2 * count>, d, {&a0, &a1, &a2, &a3}, {a0, a1, a2, a3}, b, more, {}}, 2 * count, site);
}
#undef BATON_HERE

}  // namespace baton
