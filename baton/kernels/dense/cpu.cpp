// Six rows by 64 outputs stay in registers; k is cut so that a panel's part stays in the L2 while all rows pass it.
// Sums go to memory and back between parts, which changes no bit of them.
#include "dense.h"

#include "../abi/threads.h"
#include "../abi/vector.h"
#include "../linear/panels/order.h"

namespace baton {
namespace {

constexpr int ROWS = 6, VECTORS = PANEL / LANES;
constexpr int64_t LONGEST = 192, DEPTH = 576, ROW_GROUP = 192;

// Inputs per chain. A sum that rounds where another does differs least from it, so the cuts are those of MKL's sgemm,
// by which torch computes a float32 layer on an x86 (found by comparing bits; its bias comes first, too).
#if defined(BATON_MUTATION_DENSE_CHAIN)
int64_t chain_of(int64_t) { return LONGEST; }
#else
int64_t chain_of(int64_t k) { return k <= LONGEST || k >= 2 * LONGEST ? LONGEST : k / 2; }
#endif

// Vectors of outputs whose sums are in registers together: of 32, or of AVX2's 16, two to a vector.
constexpr int together(int rows) { return BATON_AVX512 || rows == 1 ? VECTORS : rows <= 3 ? 2 : 1; }

BATON_INLINE vf load_weights(const float* at) { return load(at); }
BATON_INLINE vf load_weights(const fp16* at) { return load_halves(at); }

// V vectors of outputs, over one chain of inputs.
template <int R, int V, class W>
BATON_INLINE void chain_sums(const W* w, const float* x, int64_t x_stride, int64_t begin, int64_t end, float* out) {
  vf sums[R][V];
  unroll<R>([&](auto r) BATON_LAMBDA { unroll<V>([&](auto v) BATON_LAMBDA { sums[r][v] = vf{}; }); });
  for (int64_t k = begin; k < end; k++)
    unroll<R>([&](auto r) BATON_LAMBDA {
      const vf a = splat(x[r * x_stride + k]);
      unroll<V>([&](auto v) BATON_LAMBDA { sums[r][v] = fma(a, load_weights(w + k * PANEL + v * LANES), sums[r][v]); });
    });
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<V>([&](auto v) BATON_LAMBDA {
      float* to = out + r * PANEL + v * LANES;
      store(to, load(to) + sums[r][v]);
    });
  });
  asm volatile("" ::: "memory");  // else g++ keeps copies of `out` on the stack from chain to chain
}

// Up to DEPTH inputs are added to `out` chain by chain.
template <int R, class W>
void block(const W* w, const float* x, int64_t x_stride, int64_t depth, int64_t chain, float* out) {
  constexpr int V = together(R);
  for (int64_t begin = 0; begin < depth; begin += chain) {
    const int64_t end = depth - begin < chain ? depth : begin + chain;
    for (int v = 0; v < VECTORS; v += V) chain_sums<R, V, W>(w + v * LANES, x, x_stride, begin, end, out + v * LANES);
  }
}

template <int R = ROWS, class W>
void blocks(int64_t rows, const W* w, const float* x, int64_t x_stride, int64_t depth, int64_t chain, float* out) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, x += R * x_stride, out += R * PANEL) block<R, W>(w, x, x_stride, depth, chain, out);
    blocks<R - 1, W>(rows, w, x, x_stride, depth, chain, out);
  }
}

template <class W>
void panel(const PackedLinear& w, int64_t which, const float* x, int64_t x_stride, int64_t rows, const float* bias,
           float* out, int64_t out_stride) {
  float* sums = (float*)scratch(SCRATCH_TASK, size_t(rows) * PANEL * 4);
  const int64_t n = which * PANEL, width = w.n - n < PANEL ? w.n - n : PANEL;
  float start[PANEL] = {};
  if (bias) std::memcpy(start, bias + n, size_t(width) * 4);
#if defined(BATON_MUTATION_DENSE_BIAS)
  for (int64_t r = 0; r < (rows > ROWS ? rows / ROWS * ROWS : rows); r++) std::memcpy(sums + r * PANEL, start, sizeof start);
#else
  for (int64_t r = 0; r < rows; r++) std::memcpy(sums + r * PANEL, start, sizeof start);
#endif
  const W* weights = (const W*)w.data + which * w.k * PANEL;
  const int64_t chain = chain_of(w.k), depth = chain * (DEPTH / chain);
  for (int64_t k = 0; k < w.k; k += depth)
    blocks(rows, weights + k * PANEL, x + k, x_stride, w.k - k < depth ? w.k - k : depth, chain, sums);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i += LANES)
      store_part(out + r * out_stride + n + i, load(sums + r * PANEL + i), int(width - i));
}

bool is_float(int32_t kind) { return kind == LINEAR_F32 || kind == LINEAR_F16; }

}  // namespace

PackedLinear panels(const PackedLinear& w, int64_t first, int64_t count) {
  PackedLinear found = w;
  if (is_float(w.kind))
    found.data = (const char*)w.data + first * PANEL * w.k * (w.kind == LINEAR_F32 ? 4 : 2), found.n -= first * PANEL;
  else
    found = from_panel(w, first);
  found.n = std::min(found.n, count * PANEL);
  return found;
}

void dense(const PackedLinear& w, const float* x, int64_t x_stride, int64_t m, const float* bias, float* out,
           int64_t out_stride) {
  if (!is_float(w.kind)) return baton_linear(&w, x, F32, x_stride, m, bias, out, F32, out_stride);
  const int64_t columns = (w.n + PANEL - 1) / PANEL, groups = (m + ROW_GROUP - 1) / ROW_GROUP;
  parallel_for(int32_t(columns * groups), [&](int32_t task) {
    const int64_t row = task % groups * ROW_GROUP, rows = m - row < ROW_GROUP ? m - row : ROW_GROUP;
    const auto one = w.kind == LINEAR_F32 ? panel<float> : panel<fp16>;
    one(w, task / groups, x + row * x_stride, x_stride, rows, bias, out + row * out_stride, out_stride);
  });
}

}  // namespace baton

BATON_API void baton_dense(const baton::PackedLinear* w, const float* x, int64_t x_stride, int64_t m,
                           const float* bias, float* out, int64_t out_stride) {
  baton::dense(*w, x, x_stride, m, bias, out, out_stride);
}
