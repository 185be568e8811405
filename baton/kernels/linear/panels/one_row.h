// One row beside narrow weights in groups with AVX-512: the row's sums stay in registers from group to group, and a pair of its
// inputs is brought once for all outputs. The bits are those of a call for each group. Knows nothing of chunks. Included by
// weight_only.h.
#pragma once

#include "register_floats.h"
#include "small_groups.h"

#if BATON_AVX512

namespace baton {

// acc += both products of a pair of bf16, the second one first.
BATON_INLINE void dot_bf16(__m512& acc, __m512i w, __m512i x) { asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }

// The products of a row with a group of a panel, from its packed bytes; moves on by them.
template <class Form>
BATON_INLINE void add_products(const Form& form, int64_t steps, const uint8_t*& w, const char*& x, Ahead& ahead, __m512 (&acc)[4]) {
  constexpr int kPairs = Form::kInputs / 2;
  for (int64_t s = 0; s < steps; ++s, w += 256, x += 4 * kPairs) {
    __m512i own[kPairs];
    unroll<kPairs>([&](auto p) BATON_LAMBDA { own[p] = broadcast(x + 4 * p); });
    unroll<4>([&](auto j) BATON_LAMBDA {
      __m512i pairs[kPairs];
      form(w + 64 * j, pairs);
      unroll<kPairs>([&](auto p) BATON_LAMBDA { dot_bf16(acc[j], pairs[p], own[p]); });
    });
    ahead.fetch<1>();
  }
}

// A group's part of the sums.
template <Kind K>
BATON_INLINE void add_scaled(const __m512 (&acc)[4], const GroupScales& of, float own, __m512 (&sums)[4]) {
  unroll<4>([&](auto j) BATON_LAMBDA {
    const __m512 scale = sixteen_fp16(of.scales + 16 * j);
    sums[j] = _mm512_fmadd_ps(acc[j], K == Kind::ROWS ? _mm512_mul_ps(scale, _mm512_set1_ps(own)) : scale, sums[j]);
    if (K == Kind::MINS) sums[j] = _mm512_fnmadd_ps(sixteen_fp16(of.mins + 16 * j), _mm512_set1_ps(own), sums[j]);
  });
}

// Never inlined: see tile_looked_up.
template <Kind K, class Form>
__attribute__((noinline)) inline void one_row_of(const Form form, const uint8_t* w, Groups groups, const TileRows row) {
  const char* x = row.x;
  Ahead ahead = row.ahead;
  __m512 sums[4];
  unroll<4>([&](auto j) BATON_LAMBDA { sums[j] = _mm512_loadu_ps(row.out + 16 * j); });
  for (int64_t g = 0; g < groups.count; ++g, groups.of.scales += kGroupStride) {
    __m512 acc[4];
    unroll<4>([&](auto j) BATON_LAMBDA { acc[j] = _mm512_setzero_ps(); });
    fetch_scales(groups.of);
    add_products(form, groups.steps * 2 / Form::kInputs, w, x, ahead, acc);
    add_scaled<K>(acc, groups.of, groups.own[g], sums);
    if (K == Kind::MINS) groups.of.mins += kGroupStride;
  }
  unroll<4>([&](auto j) BATON_LAMBDA { _mm512_storeu_ps(row.out + 16 * j, sums[j]); });
}

template <class Form>
inline void groups_of_one_row(const Form form, const uint8_t* w, const Groups& groups, const TileRows& row) {
  if (groups.of.mins) return one_row_of<Kind::MINS>(form, w, groups, row);
  groups.scaled ? one_row_of<Kind::ROWS>(form, w, groups, row) : one_row_of<Kind::SCALES>(form, w, groups, row);
}

}  // namespace baton
#endif
