// int4 to bytes, once for many rows of activations: as it is, or with whole scales to int8, (q - 8) x scale + 128. Knows
// nothing of rows.
#pragma once

#include "tiles.h"

namespace baton {

// `steps` of [64][4] bytes with two nibbles each -> twice as many steps of [64][4] bytes.
inline void unpack_w4(const uint8_t* w, int64_t steps, uint8_t* out) {
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    for (int i = 0; i < 256; ++i) out[i] = w[i] & 15, out[256 + i] = w[i] >> 4;
}

// A planted bug, which the op's tests must catch: a scale's sign is forgotten.
#ifdef BATON_MUTATION_LINEAR_SIGN
constexpr bool kSigned = false;
#else
constexpr bool kSigned = true;
#endif

#if BATON_AVX512

// Sixteen outputs' scale, as it is laid over their steps of 4 bytes: two bytes are multiplied at once, 15 x 15 at most each, so
// that no byte reaches into the next. A negative scale counts from the other end: (q - 8) x -s = (15 - q) x s - 7 x s.
struct Widening {
  __m512i times, flip, plus;

  explicit BATON_INLINE Widening(const fp16* scales) {
    const __m512i whole = _mm512_cvtps_epi32(sixteen_fp16(scales)), size = _mm512_abs_epi32(whole);
    const __m512i below = kSigned ? _mm512_srai_epi32(whole, 31) : _mm512_setzero_si512();
    const __m512i eight_or_seven = _mm512_sub_epi32(_mm512_slli_epi32(size, 3), _mm512_and_si512(size, below));
    times = _mm512_or_si512(size, _mm512_slli_epi32(size, 16));
    flip = _mm512_and_si512(below, _mm512_set1_epi8(15));
    plus = _mm512_mullo_epi32(_mm512_sub_epi32(_mm512_set1_epi32(128), eight_or_seven), _mm512_set1_epi32(0x01010101));
  }

  BATON_INLINE __m512i operator()(__m512i nibbles) const {
    return _mm512_add_epi8(_mm512_mullo_epi16(_mm512_xor_si512(nibbles, flip), times), plus);
  }
};

// `steps` of [64][4] bytes with two nibbles each, under one group's scales, -> twice as many steps of [64][4] bytes.
inline void widen_group(const uint8_t* w, int64_t steps, const fp16* scales, uint8_t* out) {
  const __m512i low = _mm512_set1_epi8(15);
  const Widening widening[4] = {Widening(scales), Widening(scales + 16), Widening(scales + 32), Widening(scales + 48)};
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    unroll<4>([&](auto j) BATON_LAMBDA {
      const __m512i both = _mm512_loadu_si512(w + 64 * j);
      _mm512_storeu_si512(out + 64 * j, widening[j](_mm512_and_si512(both, low)));
      _mm512_storeu_si512(out + 256 + 64 * j, widening[j](_mm512_and_si512(_mm512_srli_epi16(both, 4), low)));
    });
}

#else

inline void widen_group(const uint8_t* w, int64_t steps, const fp16* scales, uint8_t* out) {
  int16_t times[256];
  for (int i = 0; i < 256; ++i) {
    const int16_t whole = int16_t(from_fp16(scales[i / 4]));
    times[i] = kSigned ? whole : int16_t(std::abs(whole));
  }
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    for (int i = 0; i < 256; ++i) {
      out[i] = uint8_t(int16_t((w[i] & 15) - 8) * times[i] + 128);
      out[256 + i] = uint8_t(int16_t((w[i] >> 4) - 8) * times[i] + 128);
    }
}

#endif

// A chunk of a panel.
inline void widen(const TileWeights& weights, uint8_t* out) {
  for (int64_t g = 0; g < weights.groups; ++g)
    widen_group(weights.w + g * weights.steps * 256, g + 1 < weights.groups ? weights.steps : weights.last,
                weights.scales + g * kGroupStride, out + g * weights.steps * 512);
}

}  // namespace baton
