// Values of few rows beside bf16 pages without tiles, to the bit what tiles make of them: even tokens in one chain, odd ones in another,
// both from zero every 32 tokens, subnormal numbers as zeros. Knows nothing of scores. Included by key_splits.h alone.
#pragma once
#include "values.h"

#if BATON_AMX
namespace baton {
namespace {

constexpr int STEP_TOKENS = 32;  // of a product of tiles, at absolute positions
constexpr int BLOCK_DIMS = 32;   // whose sums lie as [even dims][odd dims]

// The 32 tokens' values of one head: of sixteen and sixteen, a row of `stride` bytes each; and what to fetch meanwhile.
struct StepValues {
  const char* halves[2];
  size_t stride;
  const char* ahead[2];
};

// sums[r][B blocks] += a step's weights by its values of dims from `at` on, of which `bytes` are there.
template <int R, int B>
BATON_INLINE void add_dims(const StepValues& v, int at, int bytes, const float* weights, float* sums, size_t row) {
  vf chains[R][B][2][2];  // even dims and odd ones, even tokens and odd ones
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<B>([&](auto b) BATON_LAMBDA {
      chains[r][b][0][0] = chains[r][b][0][1] = chains[r][b][1][0] = chains[r][b][1][1] = vf{};
    });
  });
  for (int half = 0; half < 2; half++) {
    const char *from = v.halves[half] + 2 * at, *ahead = v.ahead[half] + LANES * 2 * at;
    for (int t = 0; t < PAGE; t += 2, from += 2 * v.stride, weights += 2, ahead += 2 * B * 64)
      unroll<2>([&](auto odd) BATON_LAMBDA {
        unroll<B>([&](auto b) BATON_LAMBDA {
          fetch(ahead + (odd * B + b) * 64);
          const vi words = load_bytes(from + odd * v.stride + 64 * b, B > 1 ? 64 : bytes);
          const vf dims[2] = {from_bits(words << 16), from_bits(words & splat_word(int32_t(0xffff0000)))};
          unroll<R>([&](auto r) BATON_LAMBDA {
            const vf w = splat(weights[r * SPLIT + odd]);
            unroll<2>([&](auto i) BATON_LAMBDA { chains[r][b][i][odd] = fma(w, dims[i], chains[r][b][i][odd]); });
          });
        });
      });
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<B>([&](auto b) BATON_LAMBDA {
      unroll<2>([&](auto i) BATON_LAMBDA {
        float* to = sums + r * row + at + BLOCK_DIMS * b + LANES * i;
        store(to, load(to) + (chains[r][b][i][0] + chains[r][b][i][1]));
      });
    });
  });
}

// All dims of one head.
template <int R>
void few_values(const StepValues& v, int d, const float* weights, float* sums, size_t row) {
  constexpr int B = R > 3 ? 1 : 2;
  int at = 0;
  for (; at + B * BLOCK_DIMS <= d; at += B * BLOCK_DIMS) add_dims<R, B>(v, at, 64, weights, sums, row);
  for (; at < d; at += BLOCK_DIMS) add_dims<R, 1>(v, at, 2 * (d - at), weights, sums, row);
}

// Where the values of a step's tokens lie that begin at `token`: in the pages, or, with zeros for those before `begin` and from `stop`
// on, in r.values.
inline StepValues step_values(const Call& c, Rows& r, int h, int token, int begin, int stop) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const int block = token / PAGE, bytes = 2 * c.kv.head_dim;
  const auto page = [&](int p) { return plane<KV_BF16>(c, *r.item, block + p, true) + shape.row<KV_BF16>(0, h); };
  const auto ahead = [&](int p) { return after_values<KV_BF16>(c, r, std::min(block + p, (stop - 1) / PAGE), h, stop).lines; };
  StepValues v{{}, shape.row<KV_BF16>(1, 0), {ahead(0), ahead(1)}};
  if (token >= begin && token + STEP_TOKENS <= stop) {
    v.halves[0] = page(0), v.halves[1] = page(1);
    return v;
  }
  const size_t row = (bytes + 63) / 64 * 64;
  std::memset(r.values, 0, STEP_TOKENS * row);
  for (int t = std::max(token, begin); t < std::min(token + STEP_TOKENS, stop); t++)
    std::memcpy(r.values + (t - token) * row, page((t - token) / PAGE) + (t - token) % PAGE * v.stride, bytes);
  return {{r.values, r.values + PAGE * row}, row, {v.ahead[0], v.ahead[1]}};
}

// A block's sums of even and of odd steps, as numbers of dims `at` and after.
inline void in_order(const float* even, const float* odd, int at, int padded, float* to) {
  const vf sums[2] = {load(even + at) + load(odd + at), load(even + at + LANES) + load(odd + at + LANES)};
#if BATON_AVX512
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  store(to + at, (vf)_mm512_permutex2var_ps((__m512)sums[0], low, (__m512)sums[1]));
  if (at + LANES < padded)
    store(to + at + LANES, (vf)_mm512_permutex2var_ps((__m512)sums[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), (__m512)sums[1]));
#else
  for (int i = 0; i < BLOCK_DIMS && at + i < padded; i++) to[at + i] = sums[i % 2][i / 2];
#endif
}

template <int R>
void values_of_rows(const Call& c, Rows& r, int key, int begin, int stop, int first, int last) {
  const size_t row = few_dims(c);
  std::memset(r.few, 0, size_t(r.heads) * R * 2 * row * sizeof(float));
  {
    const Flushed sums;
    for (int at = first; at < last; at += STEP_TOKENS)
      for (int h = 0; h < r.heads; h++)
        few_values<R>(step_values(c, r, r.head + h, key + at, begin, stop), c.kv.head_dim, r.scores + size_t(h) * R * SPLIT + at,
                      r.few + (at / STEP_TOKENS - first / STEP_TOKENS) % 2 * row + size_t(h) * R * 2 * row, 2 * row);
  }
  for (int i = 0; i < r.heads * R; i++)
    for (int at = 0; at < c.padded; at += BLOCK_DIMS)
      in_order(r.few + 2 * i * row, r.few + (2 * i + 1) * row, at, c.padded, r.acc + size_t(i) * c.padded);
}

// As values_in_tiles, for rows that are_few.
inline void values_of_few(const Call& c, Rows& r, int key, int begin, int stop, int from, int to) {
  const int rows = r.rows(c), first = from / STEP_TOKENS * STEP_TOKENS, last = whole_steps(to, STEP_TOKENS);
  weights_in_parts<KV_BF16>(c, r, key, begin, stop, from, to);
  for (int i = 0; i < r.heads * rows; i++)
    for (int at = first; at < last; at += LANES)
      store(r.scores + size_t(i) * SPLIT + at, widen<KV_BF16>((const char*)((const bf16*)r.weight_high + size_t(i) * SPLIT + at), LANES));
  of_few(rows, [&](auto count) { values_of_rows<count()>(c, r, key, begin, stop, first, last); });
}

}  // namespace
}  // namespace baton
#endif
