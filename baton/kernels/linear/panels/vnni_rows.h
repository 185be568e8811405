// Bytes and nibbles by vpdpbusd where registers have 256 bits: AVX-VNNI without AVX-512. Included by narrow_tiles.h, whose helpers
// they take. Knows nothing of scales.
//
// As many columns of a panel are gone through at once as sixteen registers hold sums of, beside a vector of weights and a
// word of a row; a chunk's bytes stay in the nearest cache from pass to pass.
#pragma once

namespace baton {

// acc += w · x by fours, w unsigned. Written out, since compilers copy the accumulator around the intrinsic; in VEX's form, which
// assemblers choose only when they are told to.
BATON_INLINE void dot_fours(__m256i& acc, __m256i w, __m256i x) { asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x)); }

// A planted bug, which the op's tests must catch: high nibbles take the inputs of low ones.
#ifdef BATON_MUTATION_LINEAR_FOURS
constexpr int kHigh = 0;
#else
constexpr int kHigh = 4;
#endif

// Vectors of eight outputs at once, of R rows.
constexpr int vnni_vectors(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

// Steps of [64][4] bytes.
template <int R, int V>
struct VnniBytes {
  static constexpr bool kSigned = false;
  static constexpr int kRow = 4;

  BATON_INLINE void operator()(__m256i (&acc)[R][V], const uint8_t* w, const char* x, int64_t steps, Ahead& ahead) const {
    for (int64_t s = 0; s < steps; ++s, w += 256, x += kRow * R) {
      __m256i own[V];
      unroll<V>([&](auto v) BATON_LAMBDA { own[v] = vector_at(w + 32 * v); });
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m256i row = four_bytes(x + 4 * r);
        unroll<V>([&](auto v) BATON_LAMBDA { dot_fours(acc[r][v], own[v], row); });
      });
      R > kFewRows ? ahead.fetch_lines<(V + 1) / 2>() : ahead.fetch<R>();
    }
  }
};

// Steps of [64][4] bytes with two nibbles each.
template <int R, int V>
struct VnniNibbles {
  static constexpr bool kSigned = false;
  static constexpr int kRow = 8;
  const __m256i low = _mm256_set1_epi8(15);

  BATON_INLINE void operator()(__m256i (&acc)[R][V], const uint8_t* w, const char* x, int64_t steps, Ahead& ahead) const {
    for (int64_t s = 0; s < steps; ++s, w += 256, x += kRow * R) {
      unroll<V / 2>([&](auto pair) BATON_LAMBDA {
        constexpr int v = 2 * pair;
        const __m256i one = vector_at(w + 32 * v), other = vector_at(w + 32 * v + 32);
        add<R>(acc, v, x, _mm256_and_si256(one, low), _mm256_and_si256(other, low));
        const __m256i high = _mm256_srli_epi16(one, 4), higher = _mm256_srli_epi16(other, 4);
        add<R>(acc, v, x + kHigh * R, _mm256_and_si256(high, low), _mm256_and_si256(higher, low));
      });
      R > kFewRows ? ahead.fetch_lines<(V + 1) / 2>() : ahead.fetch<R>();
    }
  }

 private:
  // Two vectors of eight outputs, so that a row's word is brought once for both.
  template <int N>
  static BATON_INLINE void add(__m256i (&acc)[N][V], int v, const char* x, __m256i one, __m256i other) {
    unroll<N>([&](auto r) BATON_LAMBDA {
      const __m256i row = four_bytes(x + 4 * r);
      dot_fours(acc[r][v], one, row), dot_fours(acc[r][v + 1], other, row);
    });
  }
};

}  // namespace baton
