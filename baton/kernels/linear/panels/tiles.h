// The inner loops of linear: up to kRows rows of activations against one chunk of one panel of 64 outputs.
// Knows nothing of threads, of where chunks come from or go to. See linear.h for the panels' layout.
#pragma once

#include <algorithm>

#include "../linear.h"

#if defined(__AVXVNNI__) && BATON_AVX2 && !BATON_AVX512
#define BATON_AVX_VNNI 1  // AVX2's registers, with AVX-512's products of bytes
#else
#define BATON_AVX_VNNI 0
#endif

namespace baton {

constexpr int kPanel = 64;

// A planted bug, which the op's tests must catch: every group takes the first one's scales.
#ifdef BATON_MUTATION_LINEAR_GROUP
constexpr int64_t kGroupStride = 0;
#else
constexpr int64_t kGroupStride = kPanel;
#endif

// What is fetched beside a step of 256 bytes of weights: four lines, `apart` bytes each from each, beside few rows (into the nearest
// cache, where a tile is alone); one beside many, where each costs and weights come from a cache. Where rows are wide, `bytes` are all that a tile fetches (wide_rows.h).
struct Ahead {
  const char* at;
  int64_t apart, bytes;  // bytes: from step to step

  template <int Rows>
  BATON_INLINE void fetch() {
    for (int line = 0; line < (Rows > 4 ? 1 : 4); ++line) __builtin_prefetch(at + line * apart, 0, Rows > 2 ? 2 : 3);
    at += bytes;
  }

  // Up to 64 `Lines` bytes, which is what `bytes` may be.
  template <int Lines>
  BATON_INLINE void fetch_lines() {
    for (int line = 0; line < Lines; ++line) __builtin_prefetch(at + 64 * line, 0, 2);
    at += bytes;
  }
};

// What one tile fetches, spread over so many steps.
inline Ahead spread(const Ahead& all, int64_t steps) { return {all.at, 0, (all.bytes + steps - 1) / steps}; }

// Rows of results that will be written, whose lines are asked for one row at a time, amid what is computed: a store to memory far
// away keeps those behind it waiting, and so does asking for all of them at once.
struct ResultRows {
  const char* at;
  int64_t stride, rows, lines;  // bytes from row to row; lines of each

  BATON_INLINE void fetch() {
    if (rows <= 0) return;
    for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(at + 64 * line, 1);
    at += stride, --rows;
  }
};
constexpr int64_t kSegment = 64;  // steps between them

// What a tile gets: its rows' activations from the chunk on, and what their integer sums begin with.
struct TileRows {
  const char* x;          // [step][row][4 bytes]: 4 int8 or 2 bf16; or widened (word_bytes)
  const int32_t* starts;  // [group][row]: -zero x the sum of the group's activations
  float* out;             // [row][64], added to
  Ahead ahead;
  ResultRows results;
};

// A chunk of a panel of integers: `groups` with `steps` each, the last one with `last`; scales and mins [group][64] or null.
struct TileWeights {
  const uint8_t* w;
  int64_t groups, steps, last;
  int32_t zero;
  const fp16 *scales, *mins;
  int64_t exact;  // groups with whole scales whose sum is exact, or 0: two such are added at once
};

enum Scales { NO_SCALES, SCALES, SCALES_AND_MINS, WHOLE_SCALES };

// A planted bug, which the op's tests must catch: what is exact is rounded group by group.
#ifdef BATON_MUTATION_LINEAR_EXACT
constexpr bool kExact = false;
#else
constexpr bool kExact = true;
#endif

#if BATON_AVX512

constexpr int kRows = 6;    // 24 accumulators, 4 of weights, 1 broadcast: of 32 registers
constexpr int kRowsW4 = 4;  // 16 accumulators, 8 of weights, 2 broadcasts, 1 mask
constexpr int kFewRows = kRows;  // none is made wider

BATON_INLINE __m512i broadcast(const void* four_bytes) {
  int32_t bits;
  std::memcpy(&bits, four_bytes, 4);
  return _mm512_set1_epi32(bits);
}

// acc += w · x by fours. Written out, since g++ 12 copies the accumulator around its intrinsic.
BATON_INLINE void dot(__m512i& acc, __m512i w, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }

template <int R>
BATON_INLINE void begin(__m512i (&acc)[R][4], const TileRows& rows, int64_t group) {
  unroll<R>([&](auto r) BATON_LAMBDA {
    __m512i start = broadcast(rows.starts + group * R + r);
    unroll<4>([&](auto j) BATON_LAMBDA { acc[r][j] = start; });
  });
}

BATON_INLINE __m512 sixteen_fp16(const fp16* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }

// What a group's activations, added up, are multiplied by, of sixteen outputs: its minimums, by way of `starts`.
BATON_INLINE __m512 sixteen_mins(const TileWeights& w, int64_t at) {
  return _mm512_div_ps(sixteen_fp16(w.mins + at), _mm512_set1_ps(float(w.zero)));
}

template <Scales S, int R>
BATON_INLINE void finish(const __m512i (&acc)[R][4], const TileRows& rows, int64_t group, const TileWeights& w) {
  unroll<4>([&](auto j) BATON_LAMBDA {
    const int64_t at = group * kGroupStride + 16 * j;
    __m512 scale = _mm512_setzero_ps(), low = scale;
    if (S != NO_SCALES) scale = sixteen_fp16(w.scales + at);
    if (S == SCALES_AND_MINS) low = sixteen_mins(w, at);
    unroll<R>([&](auto r) BATON_LAMBDA {
      float* out = rows.out + r * kPanel + 16 * j;
      __m512 whole = _mm512_cvtepi32_ps(acc[r][j]), sum = _mm512_loadu_ps(out);
      sum = S == NO_SCALES ? _mm512_add_ps(whole, sum) : _mm512_fmadd_ps(whole, scale, sum);
      if (S == SCALES_AND_MINS) sum = _mm512_fmadd_ps(low, _mm512_cvtepi32_ps(broadcast(rows.starts + group * R + r)), sum);
      _mm512_storeu_ps(out, sum);
    });
  });
}

// out += the exact sums, one or two, which are added first: what integers of both come to is rounded once, too.
template <int R>
BATON_INLINE void add_to(float* out, const float* sums, bool two) {
  unroll<4 * R>([&](auto i) BATON_LAMBDA {
    __m512 sum = _mm512_loadu_ps(sums + 16 * i);
    if (two) sum = _mm512_add_ps(sum, _mm512_loadu_ps(sums + R * kPanel + 16 * i));
    _mm512_storeu_ps(out + 16 * i, _mm512_add_ps(_mm512_loadu_ps(out + 16 * i), sum));
  });
}

// step(acc, w, x) for each of the chunk's steps, `w` and `x` moved on by it, between begin and finish for each group.
// Both structs come by value: a store of a vector may alias anything that is read through a reference.
template <Scales S, int R, class Step>
BATON_INLINE void each_group(const TileWeights weights, TileRows rows, Step&& step) {
  const uint8_t* w = weights.w;
  const char* x = rows.x;
  alignas(64) float exact[S == WHOLE_SCALES ? 2 * R * kPanel : 1];
  float* const out = rows.out;
  int64_t left = 0;  // groups until an exact sum is whole
  bool second = false;
  for (int64_t g = 0; g < weights.groups; ++g) {
    if (S == WHOLE_SCALES && !left) {
      left = std::min(weights.exact, weights.groups - g), rows.out = exact + (second ? R * kPanel : 0);
      std::memset(rows.out, 0, R * kPanel * 4);
    }
    __m512i acc[R][4];
    begin<R>(acc, rows, g);
    const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
    for (int64_t s = 0; s < steps;) {
      for (const int64_t end = std::min(s + kSegment, steps); s < end; ++s) {
        step(acc, w, x);
        rows.ahead.fetch<R>();
      }
      rows.results.fetch();
    }
    finish<S, R>(acc, rows, g, weights);
    asm volatile("" ::: "memory");  // else g++ keeps 24 sums on the stack too, from group to group
    if (S == WHOLE_SCALES && !--left) {
      if (second || g + 1 == weights.groups) add_to<R>(out, exact, second);
      second = !second;
    }
  }
}

// Steps of [64][4] bytes.
template <int R>
struct StepW8 {
  BATON_INLINE void operator()(__m512i (&acc)[R][4], const uint8_t*& w, const char*& x) const {
    __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64), w2 = _mm512_loadu_si512(w + 128),
            w3 = _mm512_loadu_si512(w + 192);
    unroll<R>([&](auto r) BATON_LAMBDA {
      __m512i b = broadcast(x + 4 * r);
      dot(acc[r][0], w0, b);
      dot(acc[r][1], w1, b);
      dot(acc[r][2], w2, b);
      dot(acc[r][3], w3, b);
    });
    w += 256, x += 4 * R;
  }
};

// What nibbles stand for: themselves, or the table's bytes that they are places of.
struct Themselves {
  BATON_INLINE __m512i operator()(__m512i nibbles) const { return nibbles; }
};
struct InTable {
  const __m512i table;
  BATON_INLINE __m512i operator()(__m512i nibbles) const { return _mm512_shuffle_epi8(table, nibbles); }
};

// Steps of [64][4] bytes with two nibbles each, taken apart in registers: free beside four rows' dot products.
template <int R, class Numbers = Themselves>
struct StepW4 {
  Numbers numbers;

  BATON_INLINE void operator()(__m512i (&acc)[R][4], const uint8_t*& w, const char*& x) const {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i both[4], first[4], second[4];
    unroll<4>([&](auto j) BATON_LAMBDA {
      both[j] = _mm512_loadu_si512(w + 64 * j);
      first[j] = numbers(_mm512_and_si512(both[j], low));
      second[j] = numbers(_mm512_and_si512(_mm512_srli_epi16(both[j], 4), low));
    });
    unroll<R>([&](auto r) BATON_LAMBDA {
      __m512i b = broadcast(x + 4 * r), c = broadcast(x + 4 * (R + r));
      unroll<4>([&](auto j) BATON_LAMBDA { dot(acc[r][j], first[j], b); });
      unroll<4>([&](auto j) BATON_LAMBDA { dot(acc[r][j], second[j], c); });
    });
    w += 256, x += 8 * R;
  }
};

template <int R, class Step>
BATON_INLINE void with_scales(const TileWeights& weights, const TileRows& rows, Step&& step) {
  if (weights.mins)
    each_group<SCALES_AND_MINS, R>(weights, rows, step);
  else if (kExact && weights.exact)
    each_group<WHOLE_SCALES, R>(weights, rows, step);
  else if (weights.scales)
    each_group<SCALES, R>(weights, rows, step);
  else
    each_group<NO_SCALES, R>(weights, rows, step);
}

template <int R>
inline void tile_w8(const TileWeights& weights, const TileRows& rows) {
  with_scales<R>(weights, rows, StepW8<R>());
}

template <int R>
inline void tile_w4(const TileWeights& weights, const TileRows& rows) {
  with_scales<R>(weights, rows, StepW4<R>());
}

// Codes, places in a `table` of sixteen bytes, aligned, each 128 more than its number.
template <int R>
inline void tile_codes(const TileWeights& weights, const TileRows& rows, const uint8_t* table) {
  const InTable numbers{_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table))};
  each_group<SCALES, R>(weights, rows, StepW4<R, InTable>{numbers});
}

// What a part's float sums begin and end with: they go on where `out` left off, so chunks don't show in them.
struct GoesOn {
  template <int R>
  BATON_INLINE void begin(__m512 (&acc)[R][4], const float* out) const {
    unroll<R>([&](auto r) BATON_LAMBDA {
      unroll<4>([&](auto j) BATON_LAMBDA { acc[r][j] = _mm512_loadu_ps(out + r * kPanel + 16 * j); });
    });
  }
  template <int R>
  BATON_INLINE void end(const __m512 (&acc)[R][4], float* out) const {
    unroll<R>([&](auto r) BATON_LAMBDA {
      unroll<4>([&](auto j) BATON_LAMBDA { _mm512_storeu_ps(out + r * kPanel + 16 * j, acc[r][j]); });
    });
  }
};

// Or a group's: they begin at zero; their scale times a row's own number, if that is one, brings them into `out`, less the minimums
// by that number.
struct OfGroup {
  const fp16 *scales, *mins;  // [64], or null
  const float* own;           // [row]
  bool scaled_rows;

  template <int R>
  BATON_INLINE void begin(__m512 (&acc)[R][4], const float*) const {
    unroll<R>([&](auto r) BATON_LAMBDA { unroll<4>([&](auto j) BATON_LAMBDA { acc[r][j] = _mm512_setzero_ps(); }); });
  }
  template <int R>
  BATON_INLINE void end(const __m512 (&acc)[R][4], float* out) const {
    if (mins) return put<R, true, false>(acc, out);
    scaled_rows ? put<R, false, true>(acc, out) : put<R, false, false>(acc, out);
  }
  template <int R, bool Mins, bool Rows>
  BATON_INLINE void put(const __m512 (&acc)[R][4], float* out) const {
    unroll<4>([&](auto j) BATON_LAMBDA {
      const __m512 scale = sixteen_fp16(scales + 16 * j), low = Mins ? sixteen_fp16(mins + 16 * j) : scale;
      unroll<R>([&](auto r) BATON_LAMBDA {
        float* to = out + r * kPanel + 16 * j;
        const __m512 by = Rows ? _mm512_mul_ps(scale, _mm512_set1_ps(own[r])) : scale;
        __m512 total = _mm512_fmadd_ps(acc[r][j], by, _mm512_loadu_ps(to));
        if (Mins) total = _mm512_fnmadd_ps(low, _mm512_set1_ps(own[r]), total);
        _mm512_storeu_ps(to, total);
      });
    });
  }
};

// w: `steps` of [64][2] bf16. What comes after is asked for as beside `Fetching` rows.
template <int R, class Sums = GoesOn, int Fetching = R>
inline void tile_bf16(const uint16_t* w, int64_t steps, const TileRows& rows, const Sums sums = {}) {
  __m512 acc[R][4];
  const char* x = rows.x;
  Ahead ahead = rows.ahead;
  ResultRows results = rows.results;
  sums.template begin<R>(acc, rows.out);
  for (int64_t s = 0; s < steps;) {
    for (const int64_t end = std::min(s + kSegment, steps); s < end; ++s, w += 128, x += 4 * R) {
      __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32),
               w2 = (__m512bh)_mm512_loadu_si512(w + 64), w3 = (__m512bh)_mm512_loadu_si512(w + 96);
      unroll<R>([&](auto r) BATON_LAMBDA {
        __m512bh b = (__m512bh)broadcast(x + 4 * r);
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, b);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, b);
        acc[r][2] = _mm512_dpbf16_ps(acc[r][2], w2, b);
        acc[r][3] = _mm512_dpbf16_ps(acc[r][3], w3, b);
      });
      ahead.fetch<Fetching>();
    }
    results.fetch();
  }
  sums.template end<R>(acc, rows.out);
}

#endif

}  // namespace baton

#if !BATON_AVX512
#include "narrow_tiles.h"
#endif

namespace baton {

// Bytes of two bf16 of a row as a tile of so many rows reads them. With AVX2 more than a few rows are widened when they are
// dealt, to floats.
constexpr int64_t word_bytes(int64_t rows) { return BATON_AVX2 && !BATON_AVX512 && rows > kFewRows ? 8 : 4; }
// The same of four int8, which AVX2 widens to int16 unless it multiplies bytes.
constexpr int64_t integer_word_bytes(int64_t rows) { return BATON_AVX_VNNI ? 4 : word_bytes(rows); }

}  // namespace baton
