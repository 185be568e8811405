// Rows are taken in blocks: first each head absorbs its part of q, over all rows of the block, so that the head's weights are read
// once; then rows attend, four heads at a time, so that a token's latent is read once for four; then heads expand what they got.
#include "latent.h"

#include <algorithm>
#include <vector>

#include "../abi/elements.h"
#include "../abi/threads.h"
#include "../rms_norm/norm_row.h"

namespace baton {
namespace {

constexpr int64_t ROWS = 32;  // of a block
constexpr int HEADS = 4, COLUMNS = 4;

struct Row {
  const AttentionItem* item;
  int64_t number, position;
};

struct Call {
  const LatentAttention& op;
  char* pages;
  int64_t page_bytes;
  const float* angles;
  int64_t angles_stride;
  const LatentRows& rows;

  int64_t kept() const { return op.rank + op.rotary; }
  int64_t stride() const { return (kept() + LANES - 1) / LANES * LANES; }  // of an absorbed query
  int64_t head_width() const { return op.plain + op.rotary; }

  template <class T>
  T* latent(const AttentionItem& item, int64_t token) const {
    return (T*)(pages + item.pages[token / PAGE] * page_bytes + op.place) + token % PAGE * kept();
  }
  template <class E>
  const E* expand(int64_t head, int64_t row) const {
    return (const E*)op.expand + (head * (op.plain + op.value) + row) * op.rank;
  }

  // Rotates the `rotary` last numbers of a head by the angles of `position`.
  void rotate(const float* from, int64_t position, float* to) const {
    const int half = op.rotary / 2;
    const float *cosines = angles + position * angles_stride, *sines = cosines + half;
    for (int i = 0; i < half; i++) {
#if defined(BATON_MUTATION_LATENT_PAIRED)
      const float a = from[i], b = from[i + half];
#else
      const float a = op.paired ? from[2 * i] : from[i], b = op.paired ? from[2 * i + 1] : from[i + half];
#endif
      to[i] = a * cosines[i] - b * sines[i], to[i + half] = b * cosines[i] + a * sines[i];
    }
  }
};

template <class T>
void keep(const Call& c, const Row& row) {
  const LatentAttention& op = c.op;
  float* made = (float*)scratch(SCRATCH_TASK, size_t(c.stride()) * 4);
  const float* from = c.rows.latent + row.number * c.rows.latent_stride;
  norm_row(from, op.norm, op.eps, op.rank, made);
  c.rotate(from + op.rank, row.position, made + op.rank);
  T* to = c.latent<T>(*row.item, row.position);
  for (int64_t i = 0; i < c.kept(); i++) put_element(to + i, made[i]);
}

template <class E>
void absorb(const Call& c, const Row& row, int64_t head, float* to) {
  const LatentAttention& op = c.op;
  const float* q = c.rows.q + row.number * c.rows.q_stride + head * c.head_width();
  std::memset(to, 0, size_t(c.stride()) * 4);
  for (int64_t r = 0; r < op.rank; r += COLUMNS * LANES) {
    vf sums[COLUMNS];
    unroll<COLUMNS>([&](auto v) BATON_LAMBDA { sums[v] = splat(0); });
    for (int64_t p = 0; p < op.plain; p++) {
      const E* w = c.expand<E>(head, p) + r;
      const vf by = splat(q[p]);
      unroll<COLUMNS>([&](auto v) BATON_LAMBDA {
        if (r + v * LANES < op.rank) sums[v] = fma(by, elements_at(w + v * LANES, op.rank - r - v * LANES), sums[v]);
      });
    }
    unroll<COLUMNS>([&](auto v) BATON_LAMBDA {
      const int64_t left = op.rank - r - v * LANES;
      if (left > 0) store_part(to + r + v * LANES, sums[v], int(std::min<int64_t>(left, LANES)));
    });
  }
  c.rotate(q + op.plain, row.position, to + op.rank);
}

// q: `heads` absorbed queries of one row, one after the other; each becomes what its head takes of the latents.
template <class T, int H>
void attend(const Call& c, const Row& row, float* q) {
  const LatentAttention& op = c.op;
#if defined(BATON_MUTATION_LATENT_CAUSAL)
  const int64_t tokens = row.item->start + row.item->queries;
#else
  const int64_t tokens = row.position + 1;
#endif
  const int64_t width = c.kept(), stride = c.stride(), room = (tokens + LANES - 1) / LANES * LANES;
  float* weights = (float*)scratch(SCRATCH_TASK, size_t(H * room) * 4);
  for (int64_t t = 0; t < tokens; t++) {
    const T* k = c.latent<T>(*row.item, t);
    vf sums[H];
    unroll<H>([&](auto h) BATON_LAMBDA { sums[h] = splat(0); });
    for (int64_t d = 0; d < width; d += LANES) {
      const vf part = elements_at(k + d, width - d);
      unroll<H>([&](auto h) BATON_LAMBDA { sums[h] = fma(load(q + h * stride + d), part, sums[h]); });
    }
    unroll<H>([&](auto h) BATON_LAMBDA { weights[h * room + t] = sum(sums[h]) * op.scale; });
  }
  float inverse[H];
  for (int h = 0; h < H; h++) {
    float* w = weights + h * room;
    for (int64_t t = tokens; t < room; t++) w[t] = -INFINITY;
    vf most = splat(-INFINITY), total{};
    for (int64_t t = 0; t < room; t += LANES) most = maximum(most, load(w + t));
    const vf top = splat(largest(most));
    for (int64_t t = 0; t < room; t += LANES) {
      const vf p = exponential(load(w + t) - top);
      store(w + t, p), total = total + p;
    }
    inverse[h] = 1.0f / sum(total);
    std::memset(q + h * stride, 0, size_t(stride) * 4);
  }
  for (int64_t first = 0; first < tokens; first += PAGE) {
    const int64_t count = std::min<int64_t>(PAGE, tokens - first);
    const T* page = c.latent<T>(*row.item, first);
    for (int64_t d = 0; d < op.rank; d += LANES) {
      vf sums[H];
      unroll<H>([&](auto h) BATON_LAMBDA { sums[h] = load(q + h * stride + d); });
      for (int64_t t = 0; t < count; t++) {
        const vf part = elements_at(page + t * width + d, op.rank - d);
        unroll<H>([&](auto h) BATON_LAMBDA { sums[h] = fma(splat(weights[h * room + first + t]), part, sums[h]); });
      }
      unroll<H>([&](auto h) BATON_LAMBDA { store(q + h * stride + d, sums[h]); });
    }
  }
  for (int h = 0; h < H; h++)
    for (int64_t d = 0; d < op.rank; d += LANES) store(q + h * stride + d, load(q + h * stride + d) * splat(inverse[h]));
}

template <class T>
void attend_heads(const Call& c, const Row& row, int heads, float* q) {
  switch (heads) {
    case 1: return attend<T, 1>(c, row, q);
    case 2: return attend<T, 2>(c, row, q);
    case 3: return attend<T, 3>(c, row, q);
    default: return attend<T, HEADS>(c, row, q);
  }
}

template <class E>
void expand(const Call& c, const Row& row, int64_t head, const float* mixed) {
  const LatentAttention& op = c.op;
  float* out = c.rows.out + row.number * c.rows.out_stride + head * op.value;
  for (int64_t v = 0; v < op.value; v++) {
    const E* w = c.expand<E>(head, op.plain + v);
    vf total{};
#if defined(BATON_MUTATION_LATENT_TAIL)
    for (int64_t r = 0; r + LANES <= op.rank; r += LANES) total = fma(load(mixed + r), sixteen(w + r), total);
#else
    for (int64_t r = 0; r < op.rank; r += LANES) total = fma(load(mixed + r), elements_at(w + r, op.rank - r), total);
#endif
    out[v] = sum(total);
  }
}

template <class T, class E>
void block(const Call& c, const Row* rows, int64_t count) {
  const int64_t heads = c.op.heads, groups = (heads + HEADS - 1) / HEADS, stride = c.stride();
  float* absorbed = (float*)scratch(SCRATCH_STEP, size_t(count * heads * stride) * 4);  // [row][head]
  parallel_for(int32_t(heads), [&](int32_t head) {
    for (int64_t i = 0; i < count; i++) absorb<E>(c, rows[i], head, absorbed + (i * heads + head) * stride);
  });
  parallel_for(int32_t(count * groups), [&](int32_t task) {
    const int64_t row = task / groups, first = task % groups * HEADS;
    attend_heads<T>(c, rows[row], int(std::min<int64_t>(HEADS, heads - first)), absorbed + (row * heads + first) * stride);
  });
  parallel_for(int32_t(heads), [&](int32_t head) {
    for (int64_t i = 0; i < count; i++) expand<E>(c, rows[i], head, absorbed + (i * heads + head) * stride);
  });
}

template <class T>
void run(const Call& c, const std::vector<Row>& rows) {
  const int64_t count = int64_t(rows.size());
  parallel_for(int32_t(count), [&](int32_t i) { keep<T>(c, rows[size_t(i)]); });
  for (int64_t at = 0; at < count; at += ROWS) {
    const int64_t some = std::min(ROWS, count - at);
    if (c.op.expand_dtype == EXPAND_F16)
      block<T, Half>(c, rows.data() + at, some);
    else if (c.op.expand_dtype == BF16)
      block<T, bf16>(c, rows.data() + at, some);
    else
      block<T, float>(c, rows.data() + at, some);
  }
}

}  // namespace
}  // namespace baton

BATON_API void baton_latent_attention(const baton::LatentAttention* op, const baton::AttentionItem* items, int32_t count, char* pages,
                                      int64_t page_bytes, const float* angles, int64_t angles_stride, const baton::LatentRows* rows) {
  using namespace baton;
  std::vector<Row> all;
  for (int32_t i = 0; i < count; i++)
    for (int32_t r = 0; r < items[i].queries; r++) all.push_back({&items[i], items[i].first + r, int64_t(items[i].start) + r});
  const Call call{*op, pages, page_bytes, angles, angles_stride, *rows};
  if (op->kv_type == KV_F16)
    run<Half>(call, all);
  else if (op->kv_type == KV_BF16)
    run<bf16>(call, all);
  else
    run<float>(call, all);
}
