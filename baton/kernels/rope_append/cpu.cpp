// A row at a time: q in place, k and v straight into the page, quantized there.
#include "own_heads.h"

#include "../abi/rows.h"
#include "../rms_norm/norm_row.h"
#include "rotate_heads.h"

namespace baton {
namespace {

// (x, y) of each pair, halves apart, rotated by its angle: the roundings of x cos - y sin as the reference has them.
void rotate(float* x, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; i += LANES) {
    const int n = half - i < LANES ? half - i : LANES;
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n);
    const vf c = load_part(cosines + i, n), s = load_part(sines + i, n);
#if defined(BATON_MUTATION_ROPE)
    store_part(x + i, a * c + b * s, n);
#else
    store_part(x + i, a * c - b * s, n);
#endif
    store_part(x + half + i, b * c + a * s, n);
  }
}

template <int T>
void row(const PagedKv& kv, Heads own, const AttentionItem& item, int at, int heads, const float* angles, int rotated,
         const float* q_norm, const float* k_norm, float eps, float* x) {
  const int d = kv.head_dim, position = item.start + at;
  const KvPlane shape{kv.kv_heads, d};
#if defined(BATON_MUTATION_PAGE)
  const int block = (position + 1) / PAGE < (item.start + item.queries - 1) / PAGE ? (position + 1) / PAGE : position / PAGE;
#else
  const int block = position / PAGE;
#endif
  char* keys = kv.pages + int64_t(item.pages[block]) * kv.page_bytes + kv.layer_offset;
  char* values = keys + shape.bytes<T>();
  for (int h = 0; h < heads + own.count; h++, x += d) {
    const float* weight = h < heads ? q_norm : k_norm;
    if (weight) norm_row(x, weight, eps, d, x);
#if defined(BATON_MUTATION_ROTATED)
    rotate(x, angles, angles + rotated / 2, d / 2 < rotated ? d / 2 : rotated);
#else
    rotate(x, angles, angles + rotated / 2, rotated / 2);
#endif
    if (h >= heads) put<T>(keys, shape, position % PAGE, own.first + h - heads, x);
  }
  for (int h = 0; h < own.count; h++, x += d) put<T>(values, shape, position % PAGE, own.first + h, x);
}

template <int T>
void append(const PagedKv& kv, Heads own, const AttentionItem* items, int count, int heads, const float* angles, int64_t stride,
            int rotated, const float* q_norm, const float* k_norm, float eps, float* qkv) {
  const int64_t width = int64_t(heads + 2 * own.count) * kv.head_dim;
  int64_t rows = 0;
  for (int i = 0; i < count; i++) rows += items[i].queries;
  const int32_t parts = rows * width < 16384 ? 1 : int32_t(rows < 4 * threads() ? rows : 4 * threads());
  parallel_for(parts, [&](int32_t task) {
    const Range range = part(rows, 1, parts, task);
    int64_t before = 0;
    for (const AttentionItem* item = items; item < items + count && before < range.end; before += item++->queries)
      for (int64_t at = range.begin > before ? range.begin - before : 0; at < item->queries && before + at < range.end; at++)
        row<T>(kv, own, *item, int(at), heads, angles + (item->start + at) * stride, rotated, q_norm, k_norm, eps,
               qkv + (item->first + at) * width);
  });
}

}  // namespace

void append_heads(const PagedKv& kv, Heads own, const AttentionItem* items, int32_t count, int32_t heads, const float* angles,
                  int64_t angles_stride, int32_t rotated, const float* q_norm, const float* k_norm, float eps, float* qkv) {
  const auto run = [&](auto type) {
    append<type()>(kv, own, items, count, heads, angles, angles_stride, rotated, q_norm, k_norm, eps, qkv);
  };
  switch (kv.type) {
    case KV_F32: return run(std::integral_constant<int, KV_F32>());
    case KV_BF16: return run(std::integral_constant<int, KV_BF16>());
    case KV_F16: return run(std::integral_constant<int, KV_F16>());
    case KV_INT8: return run(std::integral_constant<int, KV_INT8>());
    default: return run(std::integral_constant<int, KV_FP8>());
  }
}

}  // namespace baton

BATON_API void baton_rope_append_part(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                                      int32_t heads, const float* angles, int64_t angles_stride, int32_t rotated,
                                      const float* q_norm, const float* k_norm, float eps, float* qkv) {
  baton::append_heads(*kv, {0, kv->kv_heads}, items, count, heads, angles, angles_stride, rotated, q_norm, k_norm, eps, qkv);
}

BATON_API void baton_rope_append(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                                 int32_t heads, const float* angles, int64_t angles_stride, const float* q_norm,
                                 const float* k_norm, float eps, float* qkv) {
  baton_rope_append_part(kv, items, count, heads, angles, angles_stride, kv->head_dim, q_norm, k_norm, eps, qkv);
}

BATON_API void baton_rotate_heads(const baton::AttentionItem* items, int32_t count, int64_t heads, int64_t width, int64_t total,
                                  const float* angles, int64_t angles_stride, int32_t rotated, float* x) {
  using namespace baton;
  for (const AttentionItem* item = items; item < items + count; item++)
    for_rows(item->queries, total, [&](int64_t at) {
      const float* own = angles + (item->start + at) * angles_stride;
      float* row = x + (item->first + at) * total;
      for (int64_t h = 0; h < heads; h++) baton::rotate(row + h * width, own, own + rotated / 2, rotated / 2);
    });
}
