// Rows before they are rotated: neighbours of a head put into its halves, queries scaled by their positions. Knows nothing of pages.
#include <cmath>
#include <cstring>

#include "../abi/common.h"
#include "../abi/threads.h"

namespace {

// The even ones of `paired` numbers, the odd ones, then the rest of `width`.
void halve(const float* x, int64_t width, int64_t paired, float* out) {
  for (int64_t i = 0; i < paired / 2; i++) out[i] = x[2 * i], out[paired / 2 + i] = x[2 * i + 1];
  std::memcpy(out + paired, x + paired, size_t(width - paired) * 4);
}

}  // namespace

// x, rows of `total` floats that begin with `heads` heads of `width`; out: the same with these halved, the rest as it is.
BATON_API void baton_halve_heads(const float* x, int64_t rows, int64_t total, int64_t heads, int64_t width, int64_t paired, float* out) {
  baton::parallel_for(int32_t(rows), [&](int32_t row) {
    const float* from = x + row * total;
    float* to = out + row * total;
    for (int64_t h = 0; h < heads; h++) halve(from + h * width, width, paired, to + h * width);
    std::memcpy(to + heads * width, from + heads * width, size_t(total - heads * width) * 4);
  });
}

// The first `queries` floats of x's rows, which are `total` apart and at positions from `start` on, times 1 + scale x ln(1 + the whole
// part of (position + shift) / floor).
BATON_API void baton_temper_queries(float* x, int64_t rows, int64_t total, int64_t queries, int64_t start, float scale, float floor,
                                    int64_t shift) {
  for (int64_t row = 0; row < rows; row++) {
    const float factor = 1.0f + scale * std::log1p(std::floor(float(start + row + shift) / floor));
    for (int64_t i = 0; i < queries && factor != 1.0f; i++) x[row * total + i] *= factor;
  }
}
