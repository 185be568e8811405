// Values by AMX tiles: a split's weights, in words, by its values. Knows nothing of scores. Included by key_splits.h alone.
//
// Beside int8 values weights have 16 bits, as in weights.h, and sums are exact; beside bf16 they are bf16. Tokens are taken at absolute
// positions, those that a row doesn't see at weights of zero: so a row's sums are the same in any company.
#pragma once
#include "scores.h"
#include "../avx512/weights.h"

#if BATON_AMX
namespace baton {
namespace {

template <int T>
constexpr int word_tokens() {
  return 4 / kv_bytes<T>();
}
template <int T>
constexpr int step_tokens() {
  return TILE_BYTES / kv_bytes<T>();
}

inline int whole_steps(int at, int step) { return (at + step - 1) / step * step; }

// Sixteen elements (n of them, the rest zero), one to a word.
template <int T>
BATON_INLINE vi elements(const char* p, int n) {
  if constexpr (T == KV_BF16) return (to_bits(widen<KV_BF16>(p, n)) >> 16) & splat_word(0xffff);
#if BATON_AVX512
  return (vi)_mm512_cvtepu8_epi32(n >= LANES ? _mm_loadu_si128((const __m128i*)p) : _mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), p));
#else
  return to_words(widen<KV_INT8>(p, n)) & splat_word(255);
#endif
}

// Where a split's values of one head lie for tiles: [sixteen dims][step of tokens][word of tokens][dim].
template <int T>
char* values_at(const Rows& r, int dims, int token) {
  return r.values + ((dims * (SPLIT / step_tokens<T>()) + token / step_tokens<T>()) * TILE_ROWS +
                     token % step_tokens<T>() / word_tokens<T>()) * TILE_BYTES;
}

// The values of one head to their places: columns from … to, in whole steps; zeros for keys before `begin` and from `stop` on.
template <int T>
void lay_values(const Call& c, const Rows& r, int h, int key, int begin, int stop, int from, int to) {
  const int d = c.kv.head_dim, blocks = (d + 31) / 32 * 2, bytes = kv_bytes<T>();
  const KvPlane shape{c.kv.kv_heads, d};
  const char *page = nullptr, *ahead = nullptr;
  for (int at = from; at < to; at += word_tokens<T>()) {
    const char* tokens[4] = {};
    for (int i = 0; i < word_tokens<T>(); i++) {
      const int token = key + at + i;
      if (token < begin || token >= stop) continue;
      if (!page || token % PAGE == 0) {
        page = plane<T>(c, *r.item, token / PAGE, true);
        ahead = after_values<T>(c, r, token / PAGE, h, stop).lines;
      }
      tokens[i] = page + shape.row<T>(token % PAGE, h);
      for (int line = token % PAGE; ahead && line < (PAGE * d * bytes + 63) / 64; line += PAGE) fetch(ahead + 64 * line);
    }
    for (int dims = 0; dims < blocks; dims++) {
      const int n = d - dims * LANES;
      vi words{};
      for (int i = 0; i < word_tokens<T>() && n > 0; i++)
        if (tokens[i]) words |= elements<T>(tokens[i] + dims * LANES * bytes, n) << (8 * bytes * i);
      std::memcpy(values_at<T>(r, dims, at), &words, 64);
    }
  }
}

#if BATON_AVX512
inline float weigh(float* scores, const float* scales, int from, int to, float most, float& total) {
  Runs nothing{{}, 0, 0};
  return weigh(scores, scales, from, to, most, total, nothing);
}
#else
float weigh(float* scores, const float* scales, int from, int to, float most, float& total) {
  vf mass{};
  uint32_t top = 0;
  for (int at = from; at < to; at += LANES) {
    const vf p = most == -INFINITY ? vf{} : decay(load(scores + at) - splat(most));
    store(scores + at, p * load(scales + at));
    mass = mass + p;
    for (int i = 0; i < LANES; i++) top = std::max(top, bits_of(scores[at + i]));
  }
  total = sum(mass);
  return top < bits_of(INFINITY) ? float_of(top) : NAN;
}

float into_words(const float* weights, int from, int to, float top, uint8_t* high, uint8_t* low) {
  const float inverse = top > 1e-33f ? 65535.0f / top : 0;
  for (int at = from; at < to; at++) {
    const int x = top == top ? int(std::nearbyint(weights[at] * inverse)) : 0;
    high[at] = uint8_t(x >> 8), low[at] = uint8_t(x);
#ifdef BATON_MUTATION_WEIGHTS
    low[at] = 0;
#endif
  }
  return top / 65535.0f;
}
#endif

// Every row's weights of columns from … to in words, with zeros around them up to whole steps.
template <int T>
void weights_in_parts(const Call& c, Rows& r, int key, int begin, int stop, int from, int to) {
  const int rows = r.rows(c), step = step_tokens<T>(), first = from / step * step, last = whole_steps(to, step);
  for (int i = 0; i < r.heads * rows; i++) {
    float* scores = r.scores + size_t(i) * SPLIT;
    uint8_t *high = r.weight_high + size_t(i) * SPLIT * kv_bytes<T>(), *low = r.weight_low + size_t(i) * SPLIT * kv_bytes<T>();
    const int position = r.position(i % rows / c.group);
    if constexpr (T == KV_BF16) {
      soften_to_pairs(c, scores, key, from, to, position, r.most[i], r.total[i], (bf16*)high);
    } else {
      if (i % rows == 0) value_scales(c, r, r.head + i / rows, key, begin, stop, from, to);
      r.most[i] = hide(c, scores, key, from, to, position);
      const float top = weigh(scores, r.scales, from, to, r.most[i], r.total[i]);
      r.weight_steps[i] = into_words(scores, from, to, top, high, low);
    }
    for (int part = 0; part < parts<T>(); part++) {
      uint8_t* weights = part ? low : high;
      std::memset(weights + first * kv_bytes<T>(), 0, size_t(from - first) * kv_bytes<T>());
      std::memset(weights + to * kv_bytes<T>(), 0, size_t(last - to) * kv_bytes<T>());
    }
  }
}

// A split's scores become weights, and those times its values: columns from … to.
template <int T>
void values_in_tiles(const Call& c, Rows& r, int key, int begin, int stop, int from, int to) {
  constexpr int bytes = kv_bytes<T>(), step = step_tokens<T>();
  const int rows = r.rows(c), each = rows_of_tile(rows), first = from / step * step, last = whole_steps(to, step);
  weights_in_parts<T>(c, r, key, begin, stop, from, to);
  for (int h = r.head; h < r.head + r.heads; h++) {
    lay_values<T>(c, r, h, key, begin, stop, first, last);
    for (int at = 0; at < rows; at += each)
      for (int dims = 0; dims * LANES < c.padded; dims += 2) {
        const int top = (h - r.head) * rows + at;
        const int64_t begins = (int64_t(top) * SPLIT + first) * bytes, apart = values_at<T>(r, 1, 0) - r.values;
        const char *high = (const char*)r.weight_high + begins, *values = values_at<T>(r, dims, first);
        if constexpr (T == KV_BF16)
          add_steps_in_turn(high, SPLIT * bytes, values, TILE_BYTES, TILE_ROWS * TILE_BYTES, apart, (last - first) / step);
        else
          add_parts<TILE_U8_S8>(high, (const char*)r.weight_low + begins, SPLIT * bytes, values, TILE_BYTES, TILE_ROWS * TILE_BYTES, apart,
                                (last - first) / step);
        store_parts(r.products);
        for (int i = 0; i < each && at + i < rows; i++)
          for (int next = 0; next < 2 && (dims + next) * LANES < c.padded; next++)
            store(r.acc + size_t(top + i) * c.padded + (dims + next) * LANES,
                  both_parts<T>(r.products, i, next, T == KV_INT8 ? r.weight_steps[top + i] : 0));
      }
  }
}

}  // namespace
}  // namespace baton
#endif
