// Products of a few rows of weights, as they lie, with a few rows of inputs: sixteen chains in order, whose sum's bits are its own,
// whatever is summed beside it. Knows nothing of experts.
//
// bf16 goes by pairs, the second product of a pair first (as AVX-512 adds them): chain i of a step of 32 inputs has inputs 2i + 1 and
// 2i. Rows of inputs lie as this reads them, with zeros up to a whole step: bf16 with AVX-512, elsewhere floats of which the even ones
// of a step come first.
#pragma once
#include <algorithm>

#include "../abi/kv.h"

namespace baton {
namespace {

constexpr int64_t TOGETHER = BATON_AVX512 ? 6 : 4;  // rows of inputs that a row of weights meets at once

// Rows of weights that many rows meet at once: what is loaded of either is used several times. Sums stay in registers.
constexpr int SIDE = BATON_AVX512 ? 4 : 1;

// How inputs lie beside weights of kind T: as floats in order.
template <int T>
struct Inputs {
  static constexpr int STEP = LANES;  // inputs that are taken at once
  struct Row {
    vf all;
  };

  static constexpr int64_t bytes(int64_t k) { return k * 4; }  // of a row
  static void deal(const float* row, int64_t k, char* to) { std::memcpy(to, row, size_t(k) * 4); }
  static Row load(const char* at, int n) { return {load_part((const float*)at, n)}; }
  static const char* part(const char* row, int64_t i) { return row + i * 4; }
  static BATON_INLINE vf widened(const char* w, int n) { return widen<T>(w, n); }
  static BATON_INLINE vf add(vf weights, const Row& row, vf acc) { return fma(weights, row.all, acc); }
};

template <>
struct Inputs<KV_BF16> {
  static constexpr int STEP = 2 * LANES;
#if BATON_AVX512
  struct Row {
    vi pairs;
  };
  static constexpr int SIZE = 2;
  static BATON_INLINE Row load(const char* at, int) { return {load_words(at)}; }
  static BATON_INLINE vf add(vi weights, const Row& row, vf acc) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)weights, (__m512bh)row.pairs);
  }
#else
  struct Row {
    vf first, second;
  };
  static constexpr int SIZE = 4;
  static BATON_INLINE Row load(const char* at, int) { return {baton::load(at), baton::load(at + 64)}; }
  static BATON_INLINE vf add(vi weights, const Row& row, vf acc) {
    const vf second = fma(unpack<KV_BF16>(weights, 1), row.second, acc);
    return fma(unpack<KV_BF16>(weights, 0), row.first, second);
  }
#endif
  static constexpr int64_t bytes(int64_t k) { return (k + STEP - 1) / STEP * STEP * SIZE; }
  static const char* part(const char* row, int64_t i) { return row + i * SIZE; }
  static BATON_INLINE vi widened(const char* w, int n) { return load_bytes(w, 2 * n); }

  // `row` has numbers of bf16.
  static void deal(const float* row, int64_t k, char* to) {
    for (int64_t i = 0; i < k; i += STEP, to += STEP * SIZE) {
      const int n = int(std::min<int64_t>(k - i, STEP));
#if BATON_AVX512
      const __m512i low = (__m512i)load_part(row + i, n), high = (__m512i)(n > LANES ? load_part(row + i + LANES, n - LANES) : vf{});
      const __m256i halves[2] = {_mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16)), _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16))};
      std::memcpy(to, halves, 64);
#else
      float dealt[STEP] = {};
      for (int j = 0; j < n; j++) dealt[j % 2 * LANES + j / 2] = row[i + j];
      std::memcpy(to, dealt, sizeof dealt);
#endif
    }
  }
};

// sums[j][r] = w[j] . x[r] over k, for J weight rows `apart` bytes from one another.
template <int T, int J, int R>
void dots(const char* w, int64_t apart, const char* const* x, int64_t k, float (*sums)[TOGETHER]) {
  using In = Inputs<T>;
  vf acc[J][R];
  for (int j = 0; j < J; j++)
    for (int r = 0; r < R; r++) acc[j][r] = vf{};
  const auto step = [&](int64_t i, int n) BATON_LAMBDA {
    typename In::Row rows[R];
    for (int r = 0; r < R; r++) rows[r] = In::load(In::part(x[r], i), n);
    for (int j = 0; j < J; j++) {
      const auto weights = In::widened(w + j * apart + i * kv_bytes<T>(), n);
      for (int r = 0; r < R; r++) acc[j][r] = In::add(weights, rows[r], acc[j][r]);
    }
  };
  int64_t i = 0;
  for (; i + In::STEP <= k; i += In::STEP) step(i, In::STEP);
  if (i < k) step(i, int(k - i));
  for (int j = 0; j < J; j++)
    for (int r = 0; r < R; r++) sums[j][r] = sum(acc[j][r]);
}

template <int T, int J>
void dots(const char* w, int64_t apart, const char* const* x, int64_t k, int64_t rows, float (*sums)[TOGETHER]) {
  switch (rows) {
    case 1: return dots<T, J, 1>(w, apart, x, k, sums);
    case 2: return dots<T, J, 2>(w, apart, x, k, sums);
    case 3: return dots<T, J, 3>(w, apart, x, k, sums);
    case 4: return dots<T, J, 4>(w, apart, x, k, sums);
    case 5: return dots<T, J, 5>(w, apart, x, k, sums);
    default: return dots<T, J, TOGETHER>(w, apart, x, k, sums);
  }
}

// How many weight rows are taken at once for an expert of so many rows: of few rows, memory's speed is that of one stream.
int64_t side_of(int64_t rows, int64_t left) { return rows > 2 * TOGETHER && left >= SIDE ? SIDE : 1; }

// The same for 1 or SIDE weight rows.
template <int T>
void dots(const char* w, int64_t apart, int64_t outputs, const char* const* x, int64_t k, int64_t rows, float (*sums)[TOGETHER]) {
  return outputs == SIDE ? dots<T, SIDE>(w, apart, x, k, rows, sums) : dots<T, 1>(w, apart, x, k, rows, sums);
}

}  // namespace
}  // namespace baton
