// What becomes of a panel's float sums: scaled, the bias added, gated, stored. Knows nothing of where they come from.
#pragma once

#include <algorithm>

#include "../../abi/threads.h"
#include "../../swiglu/lanes.h"
#include "../linear.h"
#include "quantize_rows.h"
#include "tiles.h"

namespace baton {

// A planted bug, which the op's tests must catch: one output too many in the last panel.
#ifdef BATON_MUTATION_LINEAR_GUARD
constexpr int64_t kOver = 1;
#else
constexpr int64_t kOver = 0;
#endif

#if BATON_AVX512
template <class T>
BATON_INLINE void put16(T* out, __m512 x) {
  if constexpr (sizeof(T) == 2)
    _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(x));
  else
    _mm512_storeu_ps(out, x);
}

// `mask` of them are wanted.
template <class T>
BATON_INLINE void put16(T* out, __m512 x, __mmask16 mask) {
  if constexpr (sizeof(T) == 2)
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(x));
  else
    _mm512_mask_storeu_ps(out, mask, x);
}
#else
template <class T>
BATON_INLINE void put(T* out, float x) {
  if constexpr (sizeof(T) == 2)
    *out = to_bf16(x);
  else
    *out = x;
}
#endif

struct Results {
  const PackedLinear* w;
  const float* bias;  // [n], or null
  void* out;
  int32_t dtype;
  int64_t stride;
  const float* row_scales;  // [m], of the activations; null: 1
  int64_t m;
  int64_t gates = 0;  // the first outputs, whole panels, gate as many others: what is stored is silu(gate) x the other

  // The panel whose turn it is. A gate's is followed by that of what it gates.
  int64_t panel_of(int64_t turn) const { return gates ? turn / 2 + turn % 2 * (gates / kPanel) : turn; }

  // The lines of `count` rows of a panel's columns from n0 on, before they are written.
  template <int Columns>
  ResultRows lines(int64_t n0, int64_t first, int64_t count) const {
    const int64_t size = dtype == BF16 ? 2 : 4;
    if (n0 < gates) return {};
    return {(const char*)out + (first * stride + n0 - gates) * size, stride * size, count, Columns * size / 64};
  }

  // `count` rows of sums, 64 apart.
  template <int Columns>
  void write(int64_t n0, int64_t first, int64_t count, const float* sums) const {
    if (gates)
      write_gated<Columns>(n0, first, count, sums);
    else if (dtype == BF16)
      write_as<Columns>(n0, first, count, sums, (bf16*)out + first * stride + n0, stride);
    else
      write_as<Columns>(n0, first, count, sums, (float*)out + first * stride + n0, stride);
  }

 private:
  static constexpr int64_t kGatedRows = 8;  // that are gated at once, in the nearest cache

  // A thread keeps a panel's gates until it has multiplied the same rows by what they gate.
  template <int Columns>
  void write_gated(int64_t n0, int64_t first, int64_t count, const float* sums) const {
    float* kept = (float*)scratch(SCRATCH_GATES, size_t(m * kPanel) * 4) + first * kPanel + n0 % kPanel;
    if (n0 < gates) return write_as<Columns>(n0, first, count, sums, kept, kPanel);
    alignas(64) float gated[kGatedRows * Columns];
#ifdef BATON_MUTATION_LINEAR_GATES
    kept -= first * kPanel;  // a planted bug: every block of rows takes the first one's
#endif
    for (int64_t r = 0; r < count; r += kGatedRows, kept += kGatedRows * kPanel, sums += kGatedRows * kPanel) {
      const int64_t rows = std::min(kGatedRows, count - r);
#ifdef BATON_MUTATION_LINEAR_GATED
      write_as<Columns>(n0, 0, rows, sums, gated, Columns);  // a planted bug: the scales of the first rows
#else
      write_as<Columns>(n0, first + r, rows, sums, gated, Columns);
#endif
      for (int64_t i = 0; i < rows; ++i) gate<Columns>(kept + i * kPanel, gated + i * Columns, (first + r + i) * stride + n0 - gates);
    }
  }

  // One row's columns, to `at` of the results.
  template <int Columns>
  BATON_INLINE void gate(const float* gates, float* others, int64_t at) const {
    float* to = dtype == BF16 ? others : (float*)out + at;
    for (int64_t n = 0; n < Columns; n += LANES) store(to + n, gated_by(load(gates + n), load(others + n)));
    if (dtype == BF16) round_row(others, F32, Columns, Columns, (bf16*)out + at);
  }

  template <int Columns, class T>
  BATON_INLINE void write_as(int64_t n0, int64_t first, int64_t count, const float* sums, T* at, int64_t stride) const {
    const int64_t width = std::min<int64_t>(Columns, w->n - n0 + kOver);
    const float* scale = w->row_scale ? w->row_scale + n0 : nullptr;
    const float* add = bias ? bias + n0 : nullptr;
#if BATON_AVX512
    if (width == Columns && scale && !add) return write_whole<Columns, false>(at, stride, first, count, sums, scale, add);
    if (width == Columns && scale) return write_whole<Columns, true>(at, stride, first, count, sums, scale, add);
#endif
    for (int64_t r = 0; r < count; ++r, sums += kPanel, at += stride)
      write_row(at, width, row_scales ? row_scales[first + r] : 1.0f, sums, scale, add);
  }

  template <class T>
  BATON_INLINE void write_row(T* at, int64_t width, float x_scale, const float* sums, const float* scale,
                              const float* add) const {
#if BATON_AVX512
    for (int64_t n = 0; n < width; n += 16) {
      const __mmask16 mask = width - n >= 16 ? 0xffff : (1u << (width - n)) - 1;
      __m512 y = _mm512_loadu_ps(sums + n);
      if (scale) y = scaled(y, _mm512_set1_ps(x_scale), _mm512_loadu_ps(scale + n));
      if (add) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, add + n));
      put16(at + n, y, mask);
    }
#else
    for (int64_t n = 0; n < width; ++n) {
      const float y = scale ? sums[n] * x_scale * scale[n] : sums[n];
      put(at + n, add ? y + add[n] : y);
    }
#endif
  }

#if BATON_AVX512
  BATON_INLINE __m512 scaled(__m512 y, __m512 x_scale, __m512 scale) const {
#ifdef BATON_MUTATION_LINEAR_BATCH
    if (m > 4) return _mm512_mul_ps(_mm512_mul_ps(scale, x_scale), y);  // another order of multiplying for large batches
#endif
    return _mm512_mul_ps(_mm512_mul_ps(y, x_scale), scale);
  }

  // All columns, their scales and biases in registers.
  template <int Columns, bool Add, class T>
  BATON_INLINE void write_whole(T* at, int64_t stride, int64_t first, int64_t count, const float* sums, const float* scale,
                                const float* add) const {
    __m512 scales[Columns / 16], adds[Columns / 16];
    unroll<Columns / 16>([&](auto j) BATON_LAMBDA {
      scales[j] = _mm512_loadu_ps(scale + 16 * j);
      if (Add) adds[j] = _mm512_loadu_ps(add + 16 * j);
    });
    for (int64_t r = 0; r < count; ++r, sums += kPanel, at += stride) {
      const __m512 x_scale = _mm512_set1_ps(row_scales ? row_scales[first + r] : 1.0f);
      unroll<Columns / 16>([&](auto j) BATON_LAMBDA {
        const __m512 y = scaled(_mm512_loadu_ps(sums + 16 * j), x_scale, scales[j]);
        put16(at + 16 * j, Add ? _mm512_add_ps(y, adds[j]) : y);
      });
    }
  }
#endif
};

}  // namespace baton
