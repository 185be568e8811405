// The inner loops of linear with AVX2 beside two rows and more. Included by narrow_tiles.h, whose helpers they take.
//
//   A block of a chunk stays in the nearest cache while passes go over it, 8 or 16 outputs each, whose sums for all R rows are in
//   registers. Meanwhile what the tile was told to fetch comes from memory, evenly over its passes: so a tile
//   costs what its products do or what memory does, not both.
//
// Bits: integers' sums are exact, and a float sum takes its inputs in one order whatever the passes are: pair by pair, a pair's
// second product first, as vdpbf16ps does.
#pragma once

namespace baton {

constexpr int64_t kBlockSteps = 64;  // of 256 bytes: half of the nearest cache

// Planted bugs, which the op's tests must catch: odd bytes take even ones' inputs; a float sum's order depends on how many rows there
// are; and a later block forgets the ones before.
#ifdef BATON_MUTATION_LINEAR_ODD
constexpr int kOdd = 0;
#else
constexpr int kOdd = 4;
#endif
#ifdef BATON_MUTATION_LINEAR_COMPANY
constexpr int kSwapped = 4;  // rows
#else
constexpr int kSwapped = 0;
#endif
#ifdef BATON_MUTATION_LINEAR_BLOCK
constexpr int kKept = 0;
#else
constexpr int kKept = 1;
#endif

// Sixteen outputs of up to four widened rows, [step][row]: the int16 of inputs 0 and 2, then 1 and 3. A vector of weights gives its
// even bytes and its odd ones, both eight outputs by pairs of inputs.
template <int R>
BATON_INLINE void sixteen_sums(const uint8_t* w, int64_t steps, const char* x, int32_t* sums, Ahead& ahead) {
  const __m256i even = _mm256_set1_epi16(0xff);
  __m256i acc[R][2];
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<2>([&](auto v) BATON_LAMBDA { acc[r][v] = vector_at(sums + r * kPanel + 8 * v); });
  });
  for (int64_t s = 0; s < steps; ++s, w += 256, x += 8 * R) {
    const __m256i one = vector_at(w), other = vector_at(w + 32);
    const __m256i first[2] = {_mm256_and_si256(one, even), _mm256_and_si256(other, even)};
    const __m256i second[2] = {_mm256_srli_epi16(one, 8), _mm256_srli_epi16(other, 8)};
    unroll<R>([&](auto r) BATON_LAMBDA {
      const __m256i b = four_bytes(x + 8 * r);
      dot(acc[r][0], first[0], b), dot(acc[r][1], first[1], b);
      const __m256i c = four_bytes(x + 8 * r + kOdd);
      dot(acc[r][0], second[0], c), dot(acc[r][1], second[1], c);
    });
    ahead.fetch_lines<1>();
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<2>([&](auto v) BATON_LAMBDA { _mm256_storeu_si256((__m256i*)(sums + r * kPanel + 8 * v), acc[r][v]); });
  });
}

// Eight outputs of more rows: an accumulator holds two partial sums of four outputs, so that one load brings all of a row's word.
template <int R>
BATON_INLINE void eight_sums(const uint8_t* w, int64_t steps, const char* x, int32_t* sums, Ahead& ahead) {
  const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 2, -1, 1, -1, 3, -1, 4, -1, 6, -1, 5, -1, 7, -1));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(8, -1, 10, -1, 9, -1, 11, -1, 12, -1, 14, -1, 13, -1, 15, -1));
  __m256i acc[R][2];
  unroll<R>([&](auto r) BATON_LAMBDA { acc[r][0] = acc[r][1] = _mm256_setzero_si256(); });
  for (int64_t s = 0; s < steps; ++s, w += 256, x += 8 * R) {
    const __m256i four = vector_at(w), w0 = _mm256_shuffle_epi8(four, low), w1 = _mm256_shuffle_epi8(four, high);
    unroll<R>([&](auto r) BATON_LAMBDA {
      const __m256i b = eight_bytes(x + 8 * r);
      dot(acc[r][0], w0, b), dot(acc[r][1], w1, b);
    });
    ahead.fetch_lines<1>();
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    const __m256i sum = _mm256_add_epi32(vector_at(sums + r * kPanel), _mm256_hadd_epi32(acc[r][0], acc[r][1]));
    _mm256_storeu_si256((__m256i*)(sums + r * kPanel), sum);
  });
}

template <Scales S, int R>
inline void wide_rows_of(const TileWeights& weights, const TileRows& rows) {
  constexpr int kOutputs = R <= 4 ? 16 : 8;  // of a pass, as far as sums fit sixteen registers beside weights and products
  alignas(32) int32_t sums[R * kPanel];
  Ahead ahead = spread(rows.ahead, ((weights.groups - 1) * weights.steps + weights.last) * (kPanel / kOutputs));
  for (int64_t g = 0; g < weights.groups; ++g) {
    for (int r = 0; r < R; ++r) std::fill_n(sums + r * kPanel, kPanel, rows.starts[g * R + r]);
    const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
    for (int64_t s = 0; s < steps; s += kBlockSteps) {
      if (!kKept) std::memset(sums, 0, sizeof sums);
      const int64_t from = g * weights.steps + s, count = std::min(kBlockSteps, steps - s);
      for (int n = 0; n < kPanel; n += kOutputs) {
        const auto pass = R <= 4 ? sixteen_sums<R> : eight_sums<R>;
        pass(weights.w + from * 256 + 4 * n, count, rows.x + from * 8 * R, sums + n, ahead);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 8; ++j)
        add_scaled<S>(rows.out + r * kPanel + 8 * j, vector_at(sums + r * kPanel + 8 * j), rows.starts[g * R + r], weights,
                      g * kGroupStride + 8 * j);
  }
}

// V vectors of eight outputs of R rows, [step][row][2] float.
template <int R, int V>
BATON_INLINE void pass_of_pairs(const uint16_t* w, int64_t steps, const float* x, float* out, Ahead& ahead) {
  __m256 acc[R][V];
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<V>([&](auto v) BATON_LAMBDA { acc[r][v] = _mm256_loadu_ps(out + r * kPanel + 8 * v); });
  });
  for (int64_t s = 0; s < steps; ++s, w += 128, x += 2 * R) {
    const auto add = [&](const __m256(&wide)[V], const float* at) BATON_LAMBDA {
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m256 b = _mm256_broadcast_ss(at + 2 * r);
        unroll<V>([&](auto v) BATON_LAMBDA { acc[r][v] = _mm256_fmadd_ps(wide[v], b, acc[r][v]); });
      });
    };
    __m256 first[V], second[V];
    unroll<V>([&](auto v) BATON_LAMBDA { second[v] = second_of(vector_at(w + 16 * v)); });
    if (R != kSwapped) add(second, x + 1);
    unroll<V>([&](auto v) BATON_LAMBDA { first[v] = first_of(vector_at(w + 16 * v)); });
    add(first, x);
    if (R == kSwapped) add(second, x + 1);
    ahead.fetch_lines<V / 2>();
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<V>([&](auto v) BATON_LAMBDA { _mm256_storeu_ps(out + r * kPanel + 8 * v, acc[r][v]); });
  });
}

template <int R>
inline void wide_pairs(const uint16_t* w, int64_t steps, const TileRows& rows) {
  constexpr int V = R == 2 ? 4 : 2;  // so many sums that none waits for the one before
  Ahead ahead = spread(rows.ahead, 8 / V * steps);
  for (int64_t s = 0; s < steps; s += kBlockSteps)
    for (int v = 0; v < 8; v += V)
      pass_of_pairs<R, V>(w + 128 * s + 16 * v, std::min(kBlockSteps, steps - s), (const float*)rows.x + 2 * R * s,
                          rows.out + 8 * v, ahead);
}

}  // namespace baton
