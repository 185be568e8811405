// lora on a CPU: a task takes some rows of one adapter through A and then B, whose few rows stay in a near cache.
#include "rows.h"

#include <algorithm>
#include <vector>

#include "../abi/threads.h"
#include "../abi/vector.h"

namespace baton {
namespace {

// Rows and ranks whose sums are registers, where there are several rows; ranks beside one row alone.
constexpr int ROWS = BATON_AVX512 ? 4 : 2, RANKS = BATON_AVX512 ? 4 : 2, ALONE = 4, VECTORS = LORA_PANEL / LANES;
constexpr int64_t MOST_ROWS = 32;  // of a task, because its rows' A · x and its part of x stay in the L2

BATON_INLINE vf load16(const float* p) { return load(p); }

BATON_INLINE vf load16(const bf16* p) {
#if BATON_AVX512
  return (vf)load16_bf16(p);
#elif BATON_AVX2
  return {load8_bf16(p), load8_bf16(p + 8)};
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = from_bf16(p[i]);
  return v;
#endif
}

// The first n < 16 lanes, the rest zero; nothing past them is read.
template <class T>
BATON_INLINE vf some16(const T* p, int64_t n) {
  T some[LANES] = {};
  std::memcpy(some, p, size_t(n) * sizeof(T));
  return load16(some);
}

// R rows by J ranks of A · x.
template <int R, int J, class T>
void dots(const T* a, int64_t k, const float* const* x, float scale, float* const* t) {
  vf sums[R][J];
  unroll<R>([&](auto r) BATON_LAMBDA { unroll<J>([&](auto j) BATON_LAMBDA { sums[r][j] = splat(0); }); });
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) {
    vf in[R];
    unroll<R>([&](auto r) BATON_LAMBDA { in[r] = load16(x[r] + i); });
    unroll<J>([&](auto j) BATON_LAMBDA {
      const vf w = load16(a + j * k + i);
      unroll<R>([&](auto r) BATON_LAMBDA { sums[r][j] = fma(in[r], w, sums[r][j]); });
    });
  }
#if !defined(BATON_MUTATION_LORA_TAIL)
  if (const int64_t left = k - i)
    unroll<J>([&](auto j) BATON_LAMBDA {
      const vf w = some16(a + j * k + i, left);
      unroll<R>([&](auto r) BATON_LAMBDA { sums[r][j] = fma(some16(x[r] + i, left), w, sums[r][j]); });
    });
#endif
  unroll<R>([&](auto r) BATON_LAMBDA { unroll<J>([&](auto j) BATON_LAMBDA { t[r][j] = sum(sums[r][j]) * scale; }); });
}

template <int R, int J, class T>
void ranks(const T* a, const LoraPart& p, int64_t from, const float* const* x, float* const* t) {
  if constexpr (J > 0) {
    for (; from + J <= p.rank; from += J) {
      float* to[R];
      unroll<R>([&](auto r) BATON_LAMBDA { to[r] = t[r] + from; });
      dots<R, J>(a + from * p.k, p.k, x, p.scale, to);
    }
    ranks<R, J - 1>(a, p, from, x, t);
  }
}

// R rows by V vectors of a panel: out += B · t.
template <int R, int V, class T>
void panel(const T* b, int64_t rank, const float* const* t, int64_t width, float* const* out) {
  vf sums[R][V];
  unroll<R>([&](auto r) BATON_LAMBDA { unroll<V>([&](auto v) BATON_LAMBDA { sums[r][v] = splat(0); }); });
  for (int64_t j = 0; j < rank; j++) {
    vf by[R];
    unroll<R>([&](auto r) BATON_LAMBDA { by[r] = splat(t[r][j]); });
    unroll<V>([&](auto v) BATON_LAMBDA {
      const vf w = load16(b + j * LORA_PANEL + v * LANES);
      unroll<R>([&](auto r) BATON_LAMBDA { sums[r][v] = fma(by[r], w, sums[r][v]); });
    });
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<V>([&](auto v) BATON_LAMBDA {
      const int left = int(std::min<int64_t>(width - v * LANES, LANES));
      if (left > 0) store_part(out[r] + v * LANES, load_part(out[r] + v * LANES, left) + sums[r][v], left);
    });
  });
}

// Outputs begin … begin + n - 1 of R rows; out[r] is that of `begin`.
template <int R, class T>
void expand(const LoraPart& p, const T* b, const float* const* t, int64_t begin, int64_t n, float* const* out) {
  constexpr int V = R == 1 ? VECTORS : VECTORS / 2;
  for (int64_t at = 0; at < n; at += V * LANES) {
    const int64_t column = begin + at, inside = column % LORA_PANEL;
    float* to[R];
    unroll<R>([&](auto r) BATON_LAMBDA { to[r] = out[r] + at; });
    panel<R, V>(b + (column - inside) * p.rank + inside, p.rank, t, n - at, to);
  }
}

void look_up(const LoraPart& p, int32_t token, float* t) {
  for (int32_t j = 0; j < p.rank; j++) t[j] = load(p.a, p.dtype, size_t(token) * p.rank + j) * p.scale;
}

template <int R, class T>
void rows_of(const LoraPart& p, const float* const* x, const int32_t* tokens, float* const* t, float* const* out) {
  if (p.looked_up)
    for (int r = 0; r < R; r++) look_up(p, tokens[r], t[r]);
  else
    ranks<R, R == 1 ? ALONE : RANKS>((const T*)p.a, p, 0, x, t);
  float* to[R];
  unroll<R>([&](auto r) BATON_LAMBDA { to[r] = out[r] + p.first; });
  expand<R>(p, (const T*)p.b, t, 0, p.n, to);
}

struct Rows {
  const float* x;
  int64_t x_stride;
  const int32_t* tokens;
  float* out;
  int64_t out_stride;
};

// R rows, `which` of all, through every part.
template <int R>
void some(const LoraSite& site, const int32_t* which, const Rows& rows, float* t) {
  const float* x[R];
  int32_t tokens[R];
  float *sums[R], *out[R];
  for (int r = 0; r < R; r++) {
    x[r] = rows.x ? rows.x + which[r] * rows.x_stride : nullptr, tokens[r] = rows.tokens ? rows.tokens[which[r]] : 0;
    out[r] = rows.out + which[r] * rows.out_stride, sums[r] = t + r * 256;
  }
  for (int64_t i = 0; i < site.count; i++) {
    const LoraPart& p = site.parts[i];
    p.dtype == BF16 ? rows_of<R, bf16>(p, x, tokens, sums, out) : rows_of<R, float>(p, x, tokens, sums, out);
  }
}

template <int R = ROWS>
void all(const LoraSite& site, const int32_t* which, int64_t count, const Rows& rows, float* t) {
  if constexpr (R > 0) {
    for (; count >= R; count -= R, which += R) some<R>(site, which, rows, t);
    all<R - 1>(site, which, count, rows, t);
  }
}

template <class T, int R = ROWS>
void anywhere(const LoraPart& p, const float* const* x, int64_t count, float* const* t, float* const* out) {
  if constexpr (R > 0) {
    for (; count >= R; count -= R, x += R, out += R) rows_of<R, T>(p, x, nullptr, t, out);
    anywhere<T, R - 1>(p, x, count, t, out);
  }
}

struct Piece {
  const LoraSite* site;
  const int32_t* rows;
  int64_t count;
};

// Each group's rows in tasks: as many as there are threads, of MOST_ROWS at most.
std::vector<Piece> pieces_of(const LoraGroup* groups, int64_t count, int64_t number) {
  int64_t every = 0;
  for (int64_t i = 0; i < count; i++) every += groups[i].count;
  const int64_t size = std::min(MOST_ROWS, std::max<int64_t>(1, (every + threads() - 1) / threads()));
  std::vector<Piece> found;
  for (int64_t i = 0; i < count; i++) {
#if defined(BATON_MUTATION_LORA_GROUP)
    const LoraSite* site = groups[0].sites + number;
#else
    const LoraSite* site = groups[i].sites + number;
#endif
    if (!site->count) continue;
    for (int64_t at = 0; at < groups[i].count; at += size)
      found.push_back({site, groups[i].rows + at, std::min(size, groups[i].count - at)});
  }
  return found;
}

}  // namespace

void lora_shrink(const LoraPart& part, const float* x, float* t) {
  if (part.dtype == BF16)
    ranks<1, ALONE>((const bf16*)part.a, part, 0, &x, &t);
  else
    ranks<1, ALONE>((const float*)part.a, part, 0, &x, &t);
}

void lora_expand(const LoraPart& part, const float* t, int64_t begin, int64_t n, float* out) {
  if (part.dtype == BF16)
    expand<1>(part, (const bf16*)part.b, &t, begin, n, &out);
  else
    expand<1>(part, (const float*)part.b, &t, begin, n, &out);
}

void lora_rows(const LoraPart& part, const float* const* x, int64_t count, float* const* out) {
  alignas(64) float room[ROWS * 256];
  float* t[ROWS];
  for (int r = 0; r < ROWS; r++) t[r] = room + r * 256;
  part.dtype == BF16 ? anywhere<bf16>(part, x, count, t, out) : anywhere<float>(part, x, count, t, out);
}

}  // namespace baton

BATON_API void baton_lora(const baton::LoraGroup* groups, int64_t count, int64_t site, const float* x, int64_t x_stride,
                          const int32_t* tokens, float* out, int64_t out_stride) {
  using namespace baton;
  const std::vector<Piece> pieces = pieces_of(groups, count, site);
  const Rows rows{x, x_stride, tokens, out, out_stride};
  parallel_for(int32_t(pieces.size()), [&](int32_t task) {
    const Piece& p = pieces[task];
    alignas(64) float t[ROWS * 256];
    all(*p.site, p.rows, p.count, rows, t);
  });
}
