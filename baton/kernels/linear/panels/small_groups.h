// Tiles of bf16 weights in small groups with AVX-512: half a panel at a time, so that the rows' sums stay in registers beside the
// group's. Storing them for every group would cost as much as a quarter of sixteen inputs' products. Knows nothing of forms.
// Included by weight_only.h.
#pragma once

#include "tiles.h"

namespace baton {

// What a panel's groups of one chunk are multiplied by: [group][64], `mins` null where there are none.
struct GroupScales {
  const fp16 *scales, *mins;
};

#if BATON_AVX512

// Inputs of a group up to which that is better, and rows of a tile from which on: sums of fewer wait for each other.
constexpr int64_t kSmallGroup = 32;
constexpr int kHalvedRows = 5;

// Groups whose scales are asked for beside a group, two lines each: hardware doesn't guess them between lines of weights.
constexpr int64_t kScalesAhead = 8;

BATON_INLINE void fetch_scales(const GroupScales& of) {
  constexpr int64_t kAt = kScalesAhead * kPanel;
  __builtin_prefetch(of.scales + kAt), __builtin_prefetch(of.scales + kAt + kPanel / 2);
  if (of.mins) __builtin_prefetch(of.mins + kAt), __builtin_prefetch(of.mins + kAt + kPanel / 2);
}

// A chunk's groups; `own`: [group][row], what minimums are multiplied by, or rows' scales if they are `scaled`.
struct Groups {
  GroupScales of;
  const float* own;
  int64_t count, steps;  // steps of each, of two inputs
  bool scaled;
};

enum class Kind { SCALES, MINS, ROWS };

// Half a panel's outputs of R rows; w: [two inputs][64][2] bf16, x: [two inputs][row][2]. The first half fetches.
template <Kind K, bool First, int R>
BATON_INLINE void half_of_groups(const uint16_t* w, Groups groups, const TileRows rows) {
  __m512 acc[R][2], sums[R][2];
  const char* x = rows.x;
  Ahead ahead = rows.ahead;
  const auto each = [&](auto&& f) BATON_LAMBDA {
    unroll<R>([&](auto r) BATON_LAMBDA { unroll<2>([&](auto j) BATON_LAMBDA { f(r, j, rows.out + r * kPanel + 16 * j); }); });
  };
  each([&](auto r, auto j, const float* out) BATON_LAMBDA { sums[r][j] = _mm512_loadu_ps(out); });
  for (int64_t g = 0; g < groups.count; ++g, groups.own += R, groups.of.scales += kGroupStride) {
    if (First) fetch_scales(groups.of);
    each([&](auto r, auto j, const float*) BATON_LAMBDA { acc[r][j] = _mm512_setzero_ps(); });
    for (int64_t s = 0; s < groups.steps; ++s, w += 128, x += 4 * R) {
      const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32);
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m512bh b = (__m512bh)broadcast(x + 4 * r);
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, b), acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, b);
      });
      if (First) ahead.fetch_lines<1>();
    }
    unroll<2>([&](auto j) BATON_LAMBDA {
      const __m512 scale = sixteen_fp16(groups.of.scales + 16 * j);
      const __m512 low = K == Kind::MINS ? sixteen_fp16(groups.of.mins + 16 * j) : scale;
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m512 by = K == Kind::ROWS ? _mm512_mul_ps(scale, _mm512_set1_ps(groups.own[r])) : scale;
        sums[r][j] = _mm512_fmadd_ps(acc[r][j], by, sums[r][j]);
        if (K == Kind::MINS) sums[r][j] = _mm512_fnmadd_ps(low, _mm512_set1_ps(groups.own[r]), sums[r][j]);
      });
    });
    if (K == Kind::MINS) groups.of.mins += kGroupStride;
  }
  each([&](auto r, auto j, float* out) BATON_LAMBDA { _mm512_storeu_ps(out, sums[r][j]); });
}

// A planted bug, which the op's tests must catch: the second half takes the first one's minimums.
#ifdef BATON_MUTATION_LINEAR_LATTER
constexpr int64_t kLatter = 0;
#else
constexpr int64_t kLatter = kPanel / 2;
#endif

// Never inlined: beside other loops g++ leaves sums on the stack.
template <Kind K, int R>
__attribute__((noinline)) inline void both_halves(const uint16_t* w, Groups groups, TileRows rows) {
  half_of_groups<K, true, R>(w, groups, rows);
  groups.of.scales += kPanel / 2, rows.out += kPanel / 2;
  if (K == Kind::MINS) groups.of.mins += kLatter;
  half_of_groups<K, false, R>(w + kPanel, groups, rows);
}

template <int R>
inline void small_groups(const uint16_t* w, const Groups& groups, const TileRows& rows) {
  if (groups.of.mins) return both_halves<Kind::MINS, R>(w, groups, rows);
  groups.scaled ? both_halves<Kind::ROWS, R>(w, groups, rows) : both_halves<Kind::SCALES, R>(w, groups, rows);
}

#endif

}  // namespace baton
