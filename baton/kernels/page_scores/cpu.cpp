// What one token's heads pay to each run of 16 tokens that it sees. Heads don't meet: a task takes one, and their shares are
// added up in order.
#include <algorithm>
#include <cmath>

#include "../abi/kv.h"
#include "../abi/tanh.h"
#include "../abi/threads.h"

namespace baton {
namespace {

struct Asked {
  const PagedKv& kv;
  const int32_t* pages;
  int64_t tokens, group;  // group: query heads of a KV head
  float scale, softcap;
};

template <int T>
float score(const Asked& a, const KvPlane& plane, const char* page, int token, int head, const float* q) {
  vf total{};
  const char* row = page + plane.row<T>(token, head);
  for (int i = 0; i < plane.head_dim; i += LANES) {
    const int n = std::min(plane.head_dim - i, LANES);
    total = fma(widen<T>(row + int64_t(i) * kv_bytes<T>(), n), load_part(q + i, n) * splat(kv_unit<T>()), total);
  }
  float found = sum(total) * kv_unit<T>() * a.scale;
  if constexpr (kv_scaled<T>()) {
    float of_row;
    std::memcpy(&of_row, page + plane.scale<T>(token, head), 4);
    found *= of_row;
  }
  return found;
}

// One query head: scores to `room` (tokens), shares to `out` (runs).
template <int T>
void pay(const Asked& a, int head, const float* q, float* room, float* out) {
  const KvPlane plane{a.kv.kv_heads, a.kv.head_dim};
  float most = -INFINITY, total = 0;
  for (int64_t t = 0; t < a.tokens; t++) {
    const char* page = a.kv.pages + a.pages[t / PAGE] * a.kv.page_bytes + a.kv.layer_offset;
    room[t] = score<T>(a, plane, page, int(t % PAGE), head, q);
    if (a.softcap > 0) room[t] = capped(splat(room[t]), a.softcap)[0];
    most = std::max(most, room[t]);
  }
  for (int64_t t = 0; t < a.tokens; t++) total += room[t] = std::exp(room[t] - most);
  for (int64_t first = 0, run = 0; first < a.tokens; first += PAGE, run++) {
    float part = 0;
    for (int64_t t = first; t < std::min<int64_t>(first + PAGE, a.tokens); t++) part += room[t];
    out[run] = part / total;
  }
}

void pay_any(const Asked& a, int head, const float* q, float* room, float* out) {
  switch (a.kv.type) {
    case KV_F32: return pay<KV_F32>(a, head, q, room, out);
    case KV_BF16: return pay<KV_BF16>(a, head, q, room, out);
    case KV_INT8: return pay<KV_INT8>(a, head, q, room, out);
    case KV_FP8: return pay<KV_FP8>(a, head, q, room, out);
    default: return pay<KV_F16>(a, head, q, room, out);
  }
}

}  // namespace
}  // namespace baton

// q (heads, head_dim), rotated, of the last of `tokens` tokens on `pages`; out, as many as tokens / 16, rounded up: added to.
BATON_API void baton_page_scores(const baton::PagedKv* kv, const int32_t* pages, int64_t tokens, const float* q, int64_t heads, float scale,
                                 float softcap, float* out) {
  using namespace baton;
  const int64_t runs = (tokens + PAGE - 1) / PAGE;
  const Asked asked{*kv, pages, tokens, heads / kv->kv_heads, scale, softcap};
  float* shares = (float*)scratch(SCRATCH_STEP, size_t(heads * runs) * 4);
  parallel_for(int32_t(heads), [&](int32_t head) {
    float* room = (float*)scratch(SCRATCH_TASK, size_t(tokens) * 4);
    pay_any(asked, int(head / asked.group), q + int64_t(head) * kv->head_dim, room, shares + head * runs);
  });
  for (int64_t head = 0; head < heads; head++)
    for (int64_t run = 0; run < runs; run++) out[run] += shares[head * runs + run];
}
