// W8 with outliers (LLM.int8, https://arxiv.org/abs/2208.07339): inputs of a row that are a threshold or more are multiplied in
// float, so that the rest of the row, rounded to int8, has finer steps. Knows nothing of tiles.
#pragma once

#include <cmath>
#include <vector>

#include "../../abi/threads.h"
#include "narrow_forms.h"

namespace baton {

struct Outlier {
  int64_t row, input;
  float value;
};

inline float threshold_of(const PackedLinear& w) { return *(const float*)w.mins; }

// `rest` (m, k): the rows with zeros for outliers, which are returned by row.
inline std::vector<Outlier> split_rows(const void* x, int32_t dtype, int64_t stride, int64_t m, int64_t k, float threshold, float* rest) {
  std::vector<Outlier> found;
  for (int64_t r = 0; r < m; ++r) {
    const char* row = (const char*)x + r * stride * (dtype == BF16 ? 2 : 4);
    for (int64_t i = 0; i < k; ++i) {
      const float value = load(row, dtype, i);
      const bool is_outlier = std::fabs(value) >= threshold;
      rest[r * k + i] = is_outlier ? 0.0f : value;
      if (is_outlier) found.push_back({r, i, value});
    }
  }
  return found;
}

// out += the outliers times their weights, each row's in order.
inline void add_outliers(const PackedLinear& w, const std::vector<Outlier>& outliers, void* out, int32_t dtype, int64_t stride) {
  const int64_t padded = (w.k + 7) / 8 * 8;
  parallel_for(int32_t((w.n + kPanel - 1) / kPanel), [&](int32_t panel) {
    const int64_t first = int64_t(panel) * kPanel, count = std::min<int64_t>(kPanel, w.n - first);
    for (const Outlier& o : outliers) {
      const uint8_t* q = (const uint8_t*)w.data + first * padded + o.input / 4 * 4 * kPanel + o.input % 4;
      char* row = (char*)out + (o.row * stride + first) * (dtype == BF16 ? 2 : 4);
      for (int64_t n = 0; n < count; ++n)
        store(row, dtype, n, load(row, dtype, n) + o.value * (w.row_scale[first + n] * float(int32_t(q[4 * n]) - 128)));
    }
  });
}

}  // namespace baton
