// Scores of few rows beside bf16 keys without tiles, to the bit what tiles make of them: the first numbers of pairs in one chain, the
// second ones in another, both from zero every 32 dims, subnormal numbers as zeros. Knows nothing of values. Included by the folder's
// scores.h alone.
//
// A tile has sixteen rows, and lays out keys and values first; few rows wait for that longer than they take by vectors.
#pragma once
#include "../words.h"

#if BATON_AMX
#include "flushed.h"

namespace baton {
namespace {

constexpr int STEP_DIMS = 32;  // of a product of tiles

// A word's pair of bf16 as floats: the first one, or the second one.
BATON_INLINE vf first_of_pair(vi words) { return from_bits(words << 16); }
BATON_INLINE vf second_of_pair(vi words) {
#ifdef BATON_MUTATION_AMX_FEW
  return from_bits(words);  // a planted bug: the first number's bits are left below the second one's
#else
  return from_bits(words & splat_word(int32_t(0xffff0000)));
#endif
}

// What rows of q, whole steps long, come to with a page's sixteen keys: even steps' sums to sums[r], odd ones' to sums[r + R].
template <int R>
BATON_INLINE void few_products(const char* keys, size_t stride, int d, const float* q, int row, const char* ahead, float* sums) {
  std::memset(sums, 0, 2 * R * LANES * sizeof(float));
  for (int at = 0; at < d; at += STEP_DIMS, keys += 2 * STEP_DIMS, q += STEP_DIMS) {
    vi words[LANES];
    transpose_rows(keys, stride, 2 * (d - at), words);
    vf chains[R][2];
    unroll<R>([&](auto r) BATON_LAMBDA { chains[r][0] = chains[r][1] = vf{}; });
    unroll<LANES>([&](auto w) BATON_LAMBDA {
      if (at + 2 * w < d) fetch(ahead + (at / 2 + w) * 64);
      const vf first = first_of_pair(words[w]), second = second_of_pair(words[w]);
      unroll<R>([&](auto r) BATON_LAMBDA {
        chains[r][0] = fma(splat(q[r * row + 2 * w]), first, chains[r][0]);
        chains[r][1] = fma(splat(q[r * row + 2 * w + 1]), second, chains[r][1]);
      });
    });
    float* to = sums + at / STEP_DIMS % 2 * R * LANES;
    unroll<R>([&](auto r) BATON_LAMBDA { store(to + r * LANES, load(to + r * LANES) + (chains[r][0] + chains[r][1])); });
  }
}

// As score_tile, for rows that are_few.
template <int R>
void score_few(const Call& c, Rows& r, int h, const char* const (&pages)[2], int count, const char* const (&ahead)[2], float* scores) {
  const int row = 2 * part_words(c, 2);
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const float* q = r.rounded + size_t(h - r.head) * R * row;
  {
    const Flushed sums;
    for (int p = 0; p < count; p++)
      few_products<R>(pages[p] + shape.row<KV_BF16>(0, h), shape.row<KV_BF16>(1, 0), c.kv.head_dim, q, row, ahead[p],
                      (float*)r.products + p * 2 * R * LANES);
  }
  for (int p = 0; p < count; p++)
    unroll<R>([&](auto i) BATON_LAMBDA {
      const float* sums = (const float*)r.products + (p * 2 * R + i) * LANES;
      store(scores + i * SPLIT + p * LANES, (load(sums) + load(sums + R * LANES)) * splat(c.scale));
    });
}

}  // namespace
}  // namespace baton
#endif
