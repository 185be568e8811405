// What a task of attention works on: some rows of one sequence, their memory, and where its keys and values lie. Knows nothing of
// the arithmetic. Included by scores.h alone.
#pragma once
#include "form.h"

#include "../abi/amx.h"
#include "../abi/threads.h"

namespace baton {
namespace {

#if defined(BATON_SPLIT)  // bench/determinism_cost.py
constexpr int SPLIT = BATON_SPLIT;
#else
constexpr int SPLIT = 256;
#endif
constexpr int TILE = 32;       // keys scored together
constexpr int FEW_QUERIES = 4;   // up to this many, a sequence's splits are spread over threads
// Query rows (queries x group) of a KV head that a chunk's task takes: what is made of its keys and values serves all of them.
constexpr int CHUNK_ROWS = 96, FEWER_ROWS = 48;
constexpr int AHEAD = TILE / PAGE;  // pages whose bytes are fetched before they are needed
// Rows (of vectors, for values) whose sums are in registers together: of 32 registers, or of AVX2's 16, two to a vector.
constexpr int SCORE_ROWS = BATON_AVX512 ? 8 : 3, VALUE_ROWS = BATON_AVX512 ? 6 : 3, VALUE_VECTORS = BATON_AVX512 ? 4 : 2;

struct Call {
  const PagedKv& kv;
  int heads, group, window, padded;  // padded: head_dim in whole vectors
  float scale;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  AttentionForm form{};
};

// Pages of keys that will be scored next.
struct Next {
  const AttentionItem* item = nullptr;  // none: nothing is next
  int first = 0, last = 0;
};

// Some queries of one item against some KV heads: the working set of a task.
struct Rows {
  const AttentionItem* item;
  int query, queries, head, heads;  // heads: KV heads
  float *q, *scores, *acc, *most, *total, *transposed, *scales, *steps, *wide;
  int32_t *high, *low;  // q in words, see words.h
  int32_t* offsets;     // per row: what the keys' + 128 adds to the sum with high, with low, and with 256 high + low
  uint8_t *weight_high, *weight_low;  // a split's weights: in 16 bits, see weights.h, or high alone as bf16
  float* weight_steps;
  int32_t* sums;        // of values by those
  char *values, *products;  // for AMX tiles: a split's values of one head, and what a block of products comes to
  float *rounded, *few;     // of rows that are_few: q as bf16 has it, in whole steps; [row][even steps, odd ones][dim] sums of values
  Next next{};          // after this split
  bool shared = false;  // every row sees all keys up to `last`: they come before all of the rows

  int rows(const Call& c) const { return queries * c.group; }
  int last() const { return item->start + query + queries - 1; }
  int position(int row) const { return shared ? last() : item->start + query + row; }
};

// Words of 4 bytes that a row of q has in parts: for AMX tiles whole steps of them, behind the last one zeros.
inline int part_words(const Call& c, int bytes) {
  return BATON_AMX ? (c.kv.head_dim * bytes + 63) / 64 * 16 : (c.kv.head_dim * bytes + 3) / 4;
}

// Rows of a KV head that meet int8 keys as they lie (words.h).
constexpr int NEAR_ROWS = 4;

inline bool is_near(const Call& c, const Rows& r) {
  return BATON_AVX512 && c.kv.type == KV_INT8 && r.rows(c) <= NEAR_ROWS && c.kv.head_dim <= 256;  // whose sums fit 32 bits
}

// Rows of a KV head that meet bf16 keys and values without tiles, to the bit as tiles make it (amx/few_scores.h).
constexpr int MOST_FEW = 4;

inline bool are_few(const Call& c, const Rows& r) { return BATON_AMX && c.kv.type == KV_BF16 && r.rows(c) <= MOST_FEW; }
inline size_t few_dims(const Call& c) { return size_t(c.kv.head_dim + 31) / 32 * 32; }

// f(their number, as a constant) of rows that are_few.
template <int R = 1, class F>
BATON_INLINE void of_few(int rows, F&& f) {
  if constexpr (R == MOST_FEW)
    f(std::integral_constant<int, R>());
  else
    rows == R ? f(std::integral_constant<int, R>()) : of_few<R + 1>(rows, f);
}

// Whether values are laid out once for all rows of a task, as floats or as pairs of bf16, and of how many pages at once: some 16 KiB
// of words.
inline bool are_many(const Call& c, const Rows& r) { return r.rows(c) >= 2 * VALUE_ROWS; }
inline int wide_pages(const Call& c) { return c.padded <= 64 ? 4 : c.padded <= 128 ? 2 : 1; }

// What AMX tiles read and write beside a row's own: the last tile of rows may pass the last row.
constexpr int PAST_ROWS = BATON_AMX ? 16 : 0;

size_t carve(Rows& r, const Call& c, char* at) {
  const size_t rows = size_t(r.heads) * r.rows(c), d = c.kv.head_dim;
  size_t used = 0;
  auto take = [&](float*& p, size_t floats) {
    p = (float*)(at + used);
    used += (floats * 4 + 63) & ~size_t(63);
  };
  take(r.q, rows * d), take(r.scores, rows * SPLIT), take(r.acc, rows * c.padded);
  take(r.most, rows), take(r.total, rows), take(r.transposed, (d + LANES) * TILE);
  take(r.wide, are_many(c, r) ? size_t(wide_pages(c)) * PAGE * c.padded : 0);
  if ((!BATON_AVX512 && !BATON_AMX) || (c.kv.type != KV_INT8 && c.kv.type != KV_BF16)) return used;
  float *high, *low, *offsets, *weight_high, *weight_low, *sums, *values, *products;
  const size_t bytes = c.kv.type == KV_INT8 ? 1 : 2, past = rows + PAST_ROWS, words = past * size_t(part_words(c, int(bytes)));
  take(high, words), take(low, bytes == 1 ? words : 0);
  r.high = (int32_t*)high, r.low = (int32_t*)low;
  if (BATON_AMX) {
    take(values, (d + 31) / 32 * 32 * SPLIT * bytes / 4), take(products, 4 * 16 * 16);
    r.values = (char*)values, r.products = (char*)products;
  }
  take(r.rounded, are_few(c, r) ? 2 * rows * part_words(c, 2) : 0), take(r.few, are_few(c, r) ? 2 * rows * few_dims(c) : 0);
  take(weight_high, past * SPLIT * bytes / 4), take(weight_low, bytes == 1 ? past * SPLIT / 4 : 0);
  r.weight_high = (uint8_t*)weight_high, r.weight_low = (uint8_t*)weight_low;
  if (c.kv.type != KV_INT8) return used;
  take(r.steps, rows), take(offsets, 3 * rows), take(r.scales, SPLIT), take(r.weight_steps, rows);
  take(sums, rows * ((d + 63) / 64) * 128);
  r.offsets = (int32_t*)offsets, r.sums = (int32_t*)sums;
  return used;
}

template <int T>
const char* plane(const Call& c, const AttentionItem& item, int block, bool values) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  return c.kv.pages + int64_t(item.pages[block]) * c.kv.page_bytes + c.kv.layer_offset + (values ? shape.bytes<T>() : 0);
}

// What is to be fetched while something else is computed: a line at a time, since many at once would wait for each other and
// the computation behind them.
struct Ahead {
  const char *lines, *scales;
};

// A KV head's share of a plane that will be read soon. Shares are runs of bytes, not the head's own rows: taken head
// after head they make one rising stream.
template <int T>
Ahead share(const Call& c, const AttentionItem& item, int block, int head, bool values) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const char* p = plane<T>(c, item, block, values);
  return {p + size_t(head) * PAGE * c.kv.head_dim * kv_bytes<T>(), p + shape.scale<T>(0, 0) + head * PAGE * 4};
}

// A core waits for some two dozen lines of its nearest cache at most, and stands still when it asks for more: so they are asked for
// evenly, amid what is computed, and into the second cache, which waits for twice as many. Written out, since compilers gather
// prefetches at the first of their places.
BATON_INLINE void fetch(const char* line) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" ::"m"(*line) : "memory");
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

// Sixteen rows of 64 bytes (of which `left` are there) transposed: words[w] has word w of every row.
BATON_INLINE void transpose_rows(const char* rows, size_t stride, int left, vi (&words)[LANES]) {
  if (left >= 64) {
    for (int j = 0; j < LANES; j++, rows += stride) words[j] = load_words(rows);
  } else {
    for (int j = 0; j < LANES; j++, rows += stride) words[j] = load_bytes(rows, left);
  }
  transpose(words);
}

inline float scale_at(const char* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

#if BATON_AVX512
// Every `heads`-th of 16 x heads floats, from `head` on: two vectors at a time, of which each lane takes what is its own.
BATON_INLINE __m512 column(const float* floats, int heads, int head) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_add_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(heads)), _mm512_set1_epi32(head));
  const __m512i pair = _mm512_srli_epi32(at, 5);
  __m512 found = _mm512_setzero_ps();
  for (int k = 0; 2 * k < heads; k++) {
    const __m512 low = _mm512_loadu_ps(floats + 32 * k);
    const __m512 high = 2 * k + 1 < heads ? _mm512_loadu_ps(floats + 32 * k + LANES) : low;
    const __mmask16 own = _mm512_cmpeq_epi32_mask(pair, _mm512_set1_epi32(k));
    found = _mm512_mask_mov_ps(found, own, _mm512_permutex2var_ps(low, at, high));
  }
  return found;
}
#endif

// One head's scales of a page's tokens from … to, zeros beside them.
template <int T>
BATON_INLINE vf page_scales(const Call& c, const char* plane, int head, int from, int to) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
#if BATON_AVX512
  const __mmask16 wanted = __mmask16(((1u << to) - 1) & ~((1u << from) - 1));
  return (vf)_mm512_maskz_mov_ps(wanted, column((const float*)(plane + shape.scale<T>(0, 0)), c.kv.kv_heads, head));
#else
  float each[PAGE] = {};
  for (int j = from; j < to; j++) each[j] = scale_at(plane + shape.scale<T>(j, head));
  return load(each);
#endif
}

}  // namespace
}  // namespace baton
