// The inner loops of linear: up to kRows rows of activations against one chunk of one panel of 64 outputs.
// Knows nothing of threads, of where chunks come from or go to. See linear.h for the panels' layout.
#pragma once

#include "linear.h"

namespace baton {

constexpr int kPanel = 64;

// A planted bug, which the op's tests must catch: every group takes the first one's scales.
#ifdef BATON_MUTATION_LINEAR_GROUP
constexpr int64_t kGroupStride = 0;
#else
constexpr int64_t kGroupStride = kPanel;
#endif

// What a tile gets: its rows' activations from the chunk on, and what their integer sums begin with.
struct TileRows {
  const char* x;          // [step][row][4 bytes]: 4 int8 or 2 bf16
  const int32_t* starts;  // [group][row]: -zero x the sum of the group's activations
  float* out;             // [row][64], added to
  const char* ahead;    // what will be read from far away after this,
  int64_t ahead_bytes;  // and how much of it to fetch per step: a cache line, or nothing
};

// A chunk of a panel of integers: `groups` with `steps` each, the last one with `last`; scales and mins [group][64] or null.
struct TileWeights {
  const uint8_t* w;
  int64_t groups, steps, last;
  int32_t zero;
  const fp16 *scales, *mins;
  int64_t exact;  // groups with whole scales whose sum is added at once, or 0
};

#if BATON_AVX512

constexpr int kRows = 6;    // 24 accumulators, 4 of weights, 1 broadcast: of 32 registers
constexpr int kRowsW4 = 4;  // 16 accumulators, 8 of weights, 2 broadcasts, 1 mask

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

enum Scales { NO_SCALES, SCALES, SCALES_AND_MINS, WHOLE_SCALES };

// A planted bug, which the op's tests must catch: what is exact is rounded group by group.
#ifdef BATON_MUTATION_LINEAR_EXACT
constexpr bool kExact = false;
#else
constexpr bool kExact = true;
#endif

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

template <int R>
BATON_INLINE void add_to(float* out, const float* sums) {
  unroll<4 * R>([&](auto i) BATON_LAMBDA {
    _mm512_storeu_ps(out + 16 * i, _mm512_add_ps(_mm512_loadu_ps(out + 16 * i), _mm512_loadu_ps(sums + 16 * i)));
  });
}

// step(acc, w, x) for each of the chunk's steps, `w` and `x` moved on by it, between begin and finish for each group.
// Both structs come by value: a store of a vector may alias anything that is read through a reference.
template <Scales S, int R, class Step>
BATON_INLINE void each_group(const TileWeights weights, TileRows rows, Step&& step) {
  const uint8_t* w = weights.w;
  const char *x = rows.x, *ahead = rows.ahead;
  alignas(64) float exact[S == WHOLE_SCALES ? R * kPanel : 1];
  float* const out = rows.out;
  if (S == WHOLE_SCALES) rows.out = exact;
  for (int64_t g = 0; g < weights.groups; ++g) {
    if (S == WHOLE_SCALES && g % weights.exact == 0) std::memset(exact, 0, sizeof exact);
    __m512i acc[R][4];
    begin<R>(acc, rows, g);
    const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
    for (int64_t s = 0; s < steps; ++s) {
      step(acc, w, x);
      _mm_prefetch(ahead, _MM_HINT_T1);
      ahead += rows.ahead_bytes;
    }
    finish<S, R>(acc, rows, g, weights);
    asm volatile("" ::: "memory");  // else g++ keeps 24 sums on the stack too, from group to group
    if (S == WHOLE_SCALES && ((g + 1) % weights.exact == 0 || g + 1 == weights.groups)) add_to<R>(out, exact);
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

// Steps of [64][4] bytes with two nibbles each, taken apart in registers: free beside four rows' dot products.
template <int R>
struct StepW4 {
  BATON_INLINE void operator()(__m512i (&acc)[R][4], const uint8_t*& w, const char*& x) const {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i both[4], first[4], second[4];
    unroll<4>([&](auto j) BATON_LAMBDA {
      both[j] = _mm512_loadu_si512(w + 64 * j);
      first[j] = _mm512_and_si512(both[j], low);
      second[j] = _mm512_and_si512(_mm512_srli_epi16(both[j], 4), low);
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

// w: `steps` of [64][2] bf16. The sum goes on where `out` left off, so chunks don't show in it.
template <int R>
inline void tile_bf16(const uint16_t* w, int64_t steps, const TileRows& rows) {
  __m512 acc[R][4];
  const char *x = rows.x, *ahead = rows.ahead;
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<4>([&](auto j) BATON_LAMBDA { acc[r][j] = _mm512_loadu_ps(rows.out + r * kPanel + 16 * j); });
  });
  for (int64_t s = 0; s < steps; ++s, w += 128, x += 4 * R) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32),
             w2 = (__m512bh)_mm512_loadu_si512(w + 64), w3 = (__m512bh)_mm512_loadu_si512(w + 96);
    unroll<R>([&](auto r) BATON_LAMBDA {
      __m512bh b = (__m512bh)broadcast(x + 4 * r);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, b);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, b);
      acc[r][2] = _mm512_dpbf16_ps(acc[r][2], w2, b);
      acc[r][3] = _mm512_dpbf16_ps(acc[r][3], w3, b);
    });
    _mm_prefetch(ahead, _MM_HINT_T1);
    ahead += rows.ahead_bytes;
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<4>([&](auto j) BATON_LAMBDA { _mm512_storeu_ps(rows.out + r * kPanel + 16 * j, acc[r][j]); });
  });
}

#elif BATON_AVX2

constexpr int kRows = 4, kRowsW4 = 4;

// No VNNI: bytes widen to 16 bits, whose products add up in pairs without saturating. An accumulator holds two partial
// sums per output.
template <int R>
BATON_INLINE void eight_outputs(const TileWeights& weights, const TileRows& rows, int64_t g, int j) {
  const __m256i none = _mm256_setzero_si256();
  __m256i acc[R][2];
  unroll<R>([&](auto r) BATON_LAMBDA { acc[r][0] = acc[r][1] = none; });
  const uint8_t* w = weights.w + g * weights.steps * 256 + 32 * j;
  const char* x = rows.x + g * weights.steps * 4 * R;
  const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
  for (int64_t s = 0; s < steps; ++s, w += 256, x += 4 * R) {
    __m256i bytes = _mm256_loadu_si256((const __m256i*)w);
    __m256i w0 = _mm256_unpacklo_epi8(bytes, none), w1 = _mm256_unpackhi_epi8(bytes, none);
    unroll<R>([&](auto r) BATON_LAMBDA {
      int32_t four;
      std::memcpy(&four, x + 4 * r, 4);
      __m256i b = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
      acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(w0, b));
      acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(w1, b));
    });
  }
  int64_t at = g * kGroupStride + 8 * j;
  __m256 scale = weights.scales ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(weights.scales + at))) : _mm256_set1_ps(1);
  unroll<R>([&](auto r) BATON_LAMBDA {
    const int32_t start = rows.starts[g * R + r];
    __m256i whole = _mm256_hadd_epi32(acc[r][0], acc[r][1]);  // outputs 0 1 2 3 | 4 5 6 7, as the bytes lie
    __m256 exact = _mm256_cvtepi32_ps(_mm256_add_epi32(whole, _mm256_set1_epi32(start)));
    float* out = rows.out + r * kPanel + 8 * j;
    __m256 total = _mm256_fmadd_ps(exact, scale, _mm256_loadu_ps(out));
    if (weights.mins) {
      __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(weights.mins + at)));
      total = _mm256_fmadd_ps(low, _mm256_set1_ps(float(start) / float(weights.zero)), total);
    }
    _mm256_storeu_ps(out, total);
  });
}

template <int R>
inline void tile_w8(const TileWeights& weights, const TileRows& rows) {
  for (int64_t g = 0; g < weights.groups; ++g)
    for (int j = 0; j < 8; ++j) eight_outputs<R>(weights, rows, g, j);
}

template <int R>
inline void tile_bf16(const uint16_t* w, int64_t steps, const TileRows& rows) {
  const __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
  for (int j = 0; j < 8; ++j) {
    __m256 acc[R];
    unroll<R>([&](auto r) BATON_LAMBDA { acc[r] = _mm256_loadu_ps(rows.out + r * kPanel + 8 * j); });
    const bf16* x = (const bf16*)rows.x;
    for (int64_t s = 0; s < steps; ++s, x += 2 * R) {
      __m256i pair = _mm256_loadu_si256((const __m256i*)(w + 128 * s + 16 * j));
      __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), w1 = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
      unroll<R>([&](auto r) BATON_LAMBDA {
        acc[r] = _mm256_fmadd_ps(w0, _mm256_set1_ps(from_bf16(x[2 * r])), acc[r]);
        acc[r] = _mm256_fmadd_ps(w1, _mm256_set1_ps(from_bf16(x[2 * r + 1])), acc[r]);
      });
    }
    unroll<R>([&](auto r) BATON_LAMBDA { _mm256_storeu_ps(rows.out + r * kPanel + 8 * j, acc[r]); });
  }
}

#else

constexpr int kRows = 1, kRowsW4 = 1;

template <int R>
inline void tile_w8(const TileWeights& weights, const TileRows& rows) {
  const uint8_t* w = weights.w;
  const int8_t* x = (const int8_t*)rows.x;
  for (int64_t g = 0; g < weights.groups; ++g) {
    int32_t acc[kPanel] = {};
    const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
    for (int64_t s = 0; s < steps; ++s, w += 256, x += 4)
      for (int n = 0; n < kPanel; ++n)
        for (int i = 0; i < 4; ++i) acc[n] += int32_t(w[4 * n + i]) * x[i];
    for (int n = 0; n < kPanel; ++n) {
      int64_t at = g * kGroupStride + n;
      float exact = float(acc[n] + rows.starts[g]);
      float total = rows.out[n] + exact * (weights.scales ? from_fp16(weights.scales[at]) : 1.0f);
      rows.out[n] = weights.mins ? total + from_fp16(weights.mins[at]) * (float(rows.starts[g]) / float(weights.zero)) : total;
    }
  }
}

template <int R>
inline void tile_bf16(const uint16_t* w, int64_t steps, const TileRows& rows) {
  const bf16* x = (const bf16*)rows.x;
  for (int64_t s = 0; s < steps; ++s, w += 128, x += 2) {
    float x0 = from_bf16(x[0]), x1 = from_bf16(x[1]);
    for (int n = 0; n < kPanel; ++n)
      rows.out[n] = rows.out[n] + from_bf16(w[2 * n]) * x0 + from_bf16(w[2 * n + 1]) * x1;
  }
}

#endif

// `steps` of [64][4] bytes with two nibbles each -> twice as many steps of [64][4] bytes.
inline void unpack_w4(const uint8_t* w, int64_t steps, uint8_t* out) {
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    for (int i = 0; i < 256; ++i) out[i] = w[i] & 15, out[256 + i] = w[i] >> 4;
}

}  // namespace baton
