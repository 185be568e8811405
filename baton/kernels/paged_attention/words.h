// K as words, with AVX-512: four int8 or two bf16 of a key in 32 bits, keys in lanes, which meet as many of q at once. Knows
// nothing of values. Included by scores.h alone.
//
// Beside bf16 keys q is rounded as they are, to bf16. Beside int8 keys it is taken apart into 15 bits, of which nothing is lost
// beside K's own precision; the sums are exact.
#pragma once
#include "task_rows.h"

namespace baton {
namespace {

template <int T>
constexpr bool in_words() {
  return BATON_AVX512 && (T == KV_INT8 || T == KV_BF16);
}

// Whether q and weights are rounded to what meets such keys and values in words.
template <int T>
constexpr bool in_parts() {
  return (BATON_AVX512 || BATON_AMX) && (T == KV_INT8 || T == KV_BF16);
}

// Words of q, and of weights, that meet one of keys or values: a high and a low one, or one.
template <int T>
constexpr int parts() {
  return T == KV_INT8 ? 2 : 1;
}

#if BATON_AVX512

// The first n of sixteen bytes, or bf16.
BATON_INLINE void store_bytes(void* to, __m128i bytes, int n) {
  n >= LANES ? _mm_storeu_si128((__m128i*)to, bytes) : _mm_mask_storeu_epi8(to, __mmask16((1u << n) - 1), bytes);
}
BATON_INLINE void store_halves(void* to, __m256i halves, int n) {
  n >= LANES ? _mm256_storeu_si256((__m256i*)to, halves) : _mm256_mask_storeu_epi16(to, __mmask16((1u << n) - 1), halves);
}

// A row of q as step x (256 high + low), both int8. A row with an infinity or a NaN has a step of NaN.
void split_into_bytes(const float* q, int d, int8_t* high, int8_t* low, float& step, int32_t* offsets) {
  vf peak{};
  __mmask16 numbers = 0xffff;
  for (int k = 0; k < d; k += LANES) {
    const vf x = from_bits(to_bits(load_part(q + k, d - k)) & splat_word(0x7fffffff));
    numbers &= _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    peak = maximum(x, peak);
  }
  const float most = numbers == 0xffff ? _mm512_reduce_max_ps((__m512)peak) : 0;
  step = numbers == 0xffff ? most / 32512.0f : NAN;
  const vf inverse = splat(most > 0 ? 32512.0f / most : 0);
  vi ups{}, lows{};
  for (int k = 0; k < d; k += LANES) {
    const int n = d - k < LANES ? d - k : LANES;
    const vi x = __builtin_convertvector(nearest(load_part(q + k, n) * inverse), vi), up = (x + 128) >> 8;
    const __m128i high8 = _mm512_cvtepi32_epi8((__m512i)up), low8 = _mm512_cvtepi32_epi8((__m512i)(x - 256 * up));
    store_bytes(high + k, high8, n), store_bytes(low + k, low8, n);
    ups += up, lows += x - 256 * up;
  }
  offsets[0] = 128 * _mm512_reduce_add_epi32((__m512i)ups);
  offsets[1] = 128 * _mm512_reduce_add_epi32((__m512i)lows);
  offsets[2] = int32_t(256u * uint32_t(offsets[0]) + uint32_t(offsets[1]));
}

// A row of q as bf16.
void round_into_pairs(const float* q, int d, bf16* to) {
  for (int k = 0; k < d; k += LANES) {
    const int n = d - k < LANES ? d - k : LANES;
    store_halves(to + k, (__m256i)_mm512_cvtneps_pbh((__m512)load_part(q + k, n)), n);
  }
}

// Stores sixteen numbers as bf16, and returns them as they are then.
BATON_INLINE vf store_rounded(vf x, bf16* to) {
  const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  _mm256_storeu_si256((__m256i*)to, halves);
  return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

#elif BATON_AMX

void split_into_bytes(const float* q, int d, int8_t* high, int8_t* low, float& step, int32_t*) {
  float most = 0;
  bool fine = true;
  for (int k = 0; k < d; k++) fine &= std::fabs(q[k]) < INFINITY, most = std::fabs(q[k]) > most ? std::fabs(q[k]) : most;
  step = fine ? most / 32512.0f : NAN;
  const float inverse = fine && most > 0 ? 32512.0f / most : 0;
  for (int k = 0; k < d; k++) {
    const int x = fine ? int(std::nearbyint(q[k] * inverse)) : 0, up = (x + 128) >> 8;
    high[k] = int8_t(up), low[k] = int8_t(x - 256 * up);
  }
}

void round_into_pairs(const float* q, int d, bf16* to) {
  for (int k = 0; k < d; k++) to[k] = to_bf16(q[k]);
}

BATON_INLINE vf store_rounded(vf x, bf16* to) {
  float each[LANES];
  store(each, x);
  for (int i = 0; i < LANES; i++) to[i] = to_bf16(each[i]), each[i] = from_bf16(to[i]);
  return load(each);
}

#endif
#if BATON_AVX512 || BATON_AMX

template <int T>
void split_queries(const Call& c, Rows& r) {
  const int d = c.kv.head_dim, words = part_words(c, kv_bytes<T>());
  const size_t rows = size_t(r.heads) * r.rows(c);
  std::memset(r.high, 0, rows * words * 4);
  if constexpr (parts<T>() == 2) std::memset(r.low, 0, rows * words * 4);
  for (size_t i = 0; i < rows; i++) {
    int32_t* high = r.high + i * words;
    if constexpr (T == KV_INT8)
      split_into_bytes(r.q + i * d, d, (int8_t*)high, (int8_t*)(r.low + i * words), r.steps[i], r.offsets + 3 * i);
    else
      round_into_pairs(r.q + i * d, d, (bf16*)high);
  }
  if (are_few(c, r))
    for (size_t i = 0; i < 2 * rows * words; i++) r.rounded[i] = from_bf16(((const bf16*)r.high)[i]);
}

#endif
#if BATON_AVX512

// Of a page's words (its lines are as many) `w` is one: the lines to fetch while they are transposed, the first half, and
// beside their products, the others.
constexpr int early_line(int w) { return w / 2; }
constexpr int late_line(int w, int words) {
  const int block = w / LANES * LANES, count = words - block < LANES ? words - block : LANES;
  return block + (count + w - block) / 2;
}

// One page's K of one head, keys in lanes: transposed[word][column …] of TILE columns. Of int8, + 128.
template <int T>
void transpose_words(const Call& c, const char* keys, int head, int32_t* transposed, const char* ahead) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const char* rows = keys + shape.row<T>(0, head);
  const vi flip = splat_word(T == KV_INT8 ? int32_t(0x80808080) : 0);
  int left = c.kv.head_dim * kv_bytes<T>();
  for (; left > 0; left -= 64, rows += 64, ahead += LANES * 64, transposed += LANES * TILE) {
    vi words[LANES];
    transpose_rows(rows, shape.row<T>(1, 0), left, words);
    const int count = left < 64 ? (left + 3) / 4 : LANES;
    for (int w = 0; w < count; w++) {
      if (w % 2 == 0) fetch(ahead + early_line(w) * 64);
      const vi word = words[w] ^ flip;
      std::memcpy(transposed + w * TILE, &word, 64);
    }
  }
}

// acc += the products of a word's parts. Written out, since g++ 12 copies the accumulator around its intrinsics.
BATON_INLINE void dot(__m512i& acc, __m512i w, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }
BATON_INLINE void dot_pairs(__m512i& acc, __m512i w, __m512i x) { asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }

// Rows of q, `count` words each, and what is fetched beside their products, of each of a tile's pages. Low words, offsets and steps
// are of int8 alone.
struct Words {
  const int32_t *high, *low, *offsets;
  const float* steps;
  int count;
  const char* ahead[2];

  Words past(int rows) const {
    return {high + rows * count, low + rows * count, offsets + 3 * rows, steps + rows, count, {ahead[0], ahead[1]}};
  }
};

// A row's products with sixteen keys, its high and its low words apart.
template <int T>
BATON_INLINE vf joined(const Words& q, int row, __m512i up, __m512i down) {
  if constexpr (T == KV_BF16) return (vf)_mm512_castsi512_ps(up);
  return fma(to_float((vi)up), splat(256.0f), to_float((vi)down)) * splat(q.steps[row]);
}

// scores[r][0..31] = q[r] · the tile's keys, times the keys' scales.
template <int T, int R, bool FETCH>
void score_words(const int32_t* transposed, const Words& q, const vf (&scales)[2], float* scores) {
  __m512i up[R][2], down[R][2];
  unroll<R>([&](auto r) BATON_LAMBDA {
    up[r][0] = up[r][1] = T == KV_INT8 ? _mm512_set1_epi32(-q.offsets[3 * r]) : _mm512_setzero_si512();
    down[r][0] = down[r][1] = T == KV_INT8 ? _mm512_set1_epi32(-q.offsets[3 * r + 1]) : _mm512_setzero_si512();
  });
  const int count = q.count;
  const int32_t *high = q.high, *low = q.low;
  const auto word = [&](int w) BATON_LAMBDA {
    const __m512i keys[2] = {_mm512_loadu_si512(transposed + w * TILE), _mm512_loadu_si512(transposed + w * TILE + LANES)};
    unroll<R>([&](auto r) BATON_LAMBDA {
      const __m512i x = _mm512_set1_epi32(high[r * count + w]);
      if constexpr (T == KV_BF16) {
        dot_pairs(up[r][0], keys[0], x), dot_pairs(up[r][1], keys[1], x);
      } else {
        const __m512i y = _mm512_set1_epi32(low[r * count + w]);
        unroll<2>([&](auto half) BATON_LAMBDA { dot(up[r][half], keys[half], x), dot(down[r][half], keys[half], y); });
      }
    });
  };
  int w = 0;
  for (; w + LANES <= count; w += LANES) {
    const char *first = q.ahead[0] + (w + LANES / 2) * 64, *second = q.ahead[1] + (w + LANES / 2) * 64;
    for (int i = w; i < w + LANES; i += 2, first += 64, second += 64) {
      if (FETCH) fetch(first);
      word(i);
      if (FETCH) fetch(second);
      word(i + 1);
    }
  }
  for (; w < count; w++) {
    if (FETCH) fetch(q.ahead[w % 2] + late_line(w, count) * 64);
    word(w);
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<2>([&](auto half) BATON_LAMBDA {
      store(scores + r * SPLIT + half * LANES, joined<T>(q, r, up[r][half], down[r][half]) * scales[half]);
    });
  });
}

template <int T, int R = 8 / parts<T>(), bool FETCH = true>
void score_word_rows(int rows, const int32_t* transposed, const Words& q, const vf (&scales)[2], float* scores) {
  if constexpr (R > 0) {
    if (rows < R) return score_word_rows<T, R - 1, FETCH>(rows, transposed, q, scales, scores);
    score_words<T, R, FETCH>(transposed, q, scales, scores);
    score_word_rows<T, R, false>(rows - R, transposed, q.past(R), scales, scores + R * SPLIT);
  }
}

// Few rows meet keys that are transposed in registers, as far as is worth while for them: four keys' 64 bytes become four vectors, of
// which vector i has in its 128-bit lane L word 4 L + i of each key. They meet words of q in the same places; a key's four sums
// are added at the end. That takes half of the shuffles of a whole transposition, and neither stores nor loads of what is transposed; each
// row pays with nine instructions for sixteen keys.
#if defined(BATON_MUTATION_NEAR)
constexpr int NEAR_SHIFT = 7;  // a planted bug: what is high counts half
#else
constexpr int NEAR_SHIFT = 8;
#endif

// One page's keys of one head, and the lines to fetch meanwhile.
struct NearKeys {
  const char *rows, *ahead;
  size_t stride;
  int bytes;  // of a row
};

// Rows of q in two parts, and what makes scores of their integer sums.
struct NearRows {
  const int32_t *high, *low, *offsets;
  const float* steps;
  int count;  // words of a row
};

// 64 bytes of four keys, of which `wanted` are theirs.
template <bool WHOLE>
BATON_INLINE void four_keys(const char* rows, size_t stride, __mmask64 wanted, __m512i flip, __m512i (&words)[4]) {
  const auto key = [&](int j) BATON_LAMBDA {
    const char* at = rows + j * stride;
    return _mm512_xor_si512(WHOLE ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(wanted, at), flip);
  };
  const __m512i a = key(0), b = key(1), c = key(2), d = key(3);
  const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
  words[0] = _mm512_unpacklo_epi64(ab, cd), words[1] = _mm512_unpackhi_epi64(ab, cd);
  words[2] = _mm512_unpacklo_epi64(ab2, cd2), words[3] = _mm512_unpackhi_epi64(ab2, cd2);
}

// Sixteen words of a row of q, of which `left` are there.
template <bool WHOLE>
BATON_INLINE __m512i near_words(const int32_t* words, int left) {
  return WHOLE ? _mm512_loadu_si512(words) : _mm512_maskz_loadu_epi32(__mmask16(0xffff >> (LANES - left)), words);
}

// Fours of keys that are in registers together: at most sixteen vectors of them, beside one sum for each four and row.
constexpr int near_fours(int rows, int blocks) { return blocks > 2 ? 1 : blocks == 2 || rows > 3 ? 2 : 4; }

// sums[r][f] = q[r] · four keys, each as four sums. One sum takes both parts of q: what is high is moved up between them.
template <int R, int BLOCKS, bool WHOLE, int FOURS>
BATON_INLINE void near_sums(const NearKeys& k, const char* rows, const char* ahead, const NearRows& q, __m512i (&sums)[R][FOURS]) {
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  const int count = WHOLE ? BLOCKS * LANES : q.count;  // read once: nothing is known of memory after a fetch
  const int32_t *high = q.high, *low = q.low;
  __m512i keys[BLOCKS][FOURS][4];
  unroll<BLOCKS>([&](auto b) BATON_LAMBDA {
    constexpr bool whole = WHOLE || b + 1 < BLOCKS;
    unroll<FOURS>([&](auto f) BATON_LAMBDA {
      four_keys<whole>(rows + 4 * f * k.stride + 64 * b, k.stride, whole ? 0 : ~0ull >> (64 * BLOCKS - k.bytes), flip, keys[b][f]);
    });
  });
  unroll<R>([&](auto r) BATON_LAMBDA { unroll<FOURS>([&](auto f) BATON_LAMBDA { sums[r][f] = _mm512_setzero_si512(); }); });
  unroll<2>([&](auto part) BATON_LAMBDA {
    if constexpr (part == 1)
      unroll<R>([&](auto r) BATON_LAMBDA {
        unroll<FOURS>([&](auto f) BATON_LAMBDA { sums[r][f] = _mm512_slli_epi32(sums[r][f], NEAR_SHIFT); });
      });
    const int32_t* words = part ? low : high;
    unroll<BLOCKS * 4>([&](auto w) BATON_LAMBDA {
      constexpr bool whole = WHOLE || w / 4 + 1 < BLOCKS;
      constexpr auto fours = _MM_PERM_ENUM(w % 4 * 0x55);
      constexpr int at = part * BLOCKS * 4 + w, from = at * FOURS / 2, to = (at + 1) * FOURS / 2;
      unroll<to - from>([&](auto line) BATON_LAMBDA { fetch(ahead + (from + line) * 64); });
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m512i x = _mm512_shuffle_epi32(near_words<whole>(words + r * count + w / 4 * LANES, count - w / 4 * LANES), fours);
        unroll<FOURS>([&](auto f) BATON_LAMBDA { dot(sums[r][f], keys[w / 4][f][w % 4], x); });
      });
    });
  });
}

// Four keys' sums and four others', half of the way.
BATON_INLINE __m512i add_pairs(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}

// scores[r][0..15] = q[r] · a page's keys, times the keys' scales.
template <int R, int BLOCKS, bool WHOLE>
void near_page(const NearKeys& k, const NearRows& q, vf scales, float* scores) {
  constexpr int FOURS = near_fours(R, BLOCKS);
  __m512i pairs[2][R], sums[R][FOURS], before[R];
  unroll<4 / FOURS>([&](auto pass) BATON_LAMBDA {
    near_sums<R, BLOCKS, WHOLE, FOURS>(k, k.rows + 4 * FOURS * pass * k.stride, k.ahead + 4 * FOURS * BLOCKS * pass * 64, q, sums);
    unroll<R>([&](auto r) BATON_LAMBDA {
      if constexpr (FOURS == 4) pairs[0][r] = add_pairs(sums[r][0], sums[r][1]), pairs[1][r] = add_pairs(sums[r][2], sums[r][3]);
      if constexpr (FOURS == 2) pairs[pass][r] = add_pairs(sums[r][0], sums[r][1]);
      if constexpr (FOURS == 1 && pass % 2 == 0) before[r] = sums[r][0];
      if constexpr (FOURS == 1 && pass % 2 == 1) pairs[pass / 2][r] = add_pairs(before[r], sums[r][0]);
    });
  });
  unroll<R>([&](auto r) BATON_LAMBDA {
    const __m512i all = _mm512_add_epi32(_mm512_shuffle_i32x4(pairs[0][r], pairs[1][r], 0x88),
                                         _mm512_shuffle_i32x4(pairs[0][r], pairs[1][r], 0xdd));
    const __m512i own = _mm512_sub_epi32(all, _mm512_set1_epi32(q.offsets[3 * r + 2]));
    store(scores + r * SPLIT, to_float((vi)own) * splat(q.steps[r]) * scales);
  });
}

template <int R, int BLOCKS>
BATON_INLINE void near_blocks(const NearKeys& k, const NearRows& q, vf scales, float* scores) {
  k.bytes % 64 ? near_page<R, BLOCKS, false>(k, q, scales, scores) : near_page<R, BLOCKS, true>(k, q, scales, scores);
}

template <int R>
BATON_INLINE void near_rows(const NearKeys& k, const NearRows& q, vf scales, float* scores) {
  switch ((k.bytes + 63) / 64) {
    case 1: return near_blocks<R, 1>(k, q, scales, scores);
    case 2: return near_blocks<R, 2>(k, q, scales, scores);
    case 3: return near_blocks<R, 3>(k, q, scales, scores);
    default: return near_blocks<R, 4>(k, q, scales, scores);
  }
}

// The same of rows and bytes that are_near.
void near_scores(int rows, const NearKeys& k, const NearRows& q, vf scales, float* scores) {
  switch (rows) {
    case 1: return near_rows<1>(k, q, scales, scores);
    case 2: return near_rows<2>(k, q, scales, scores);
    case 3: return near_rows<3>(k, q, scales, scores);
    default: return near_rows<4>(k, q, scales, scores);
  }
}

#endif

}  // namespace
}  // namespace baton
