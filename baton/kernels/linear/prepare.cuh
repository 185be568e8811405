// On the host: a layer's weights to what kernels are told of them. Knows nothing of launches.
#pragma once
#include "form.cuh"

namespace baton {
namespace {

constexpr int MOST_K = 1 << 17;  // of more inputs an int32 might not hold the sum

inline int up(int x, int to) { return (x + to - 1) / to * to; }
inline int parts(int64_t x, int64_t of) { return int((x + of - 1) / of); }

inline int least_common(int a, int b) {
  int x = a, y = b;
  while (y) {
    const int rest = x % y;
    x = y, y = rest;
  }
  return a / x * b;
}

struct Output {
  void* out;
  int32_t dtype;
  int64_t stride;
};

// False: nothing here multiplies such a layer.
inline bool prepare(Call& c, const PackedLinear& w, int64_t m, const float* bias, const Output& out, bool gated) {
  const bool known = w.kind == LINEAR_BF16 || w.kind == LINEAR_W8 || w.kind == LINEAR_W4 || w.kind == LINEAR_E4M3;
  if (!known || w.k < 1 || w.k >= MOST_K || w.n < 1 || m > 1 << 22 || w.group % 16 || (w.group && !w.scales)) return false;
  if (w.kind == LINEAR_BF16 || w.kind == LINEAR_E4M3 ? w.group : !w.row_scale) return false;
  if (w.kind == LINEAR_E4M3 && !w.row_scale) return false;
  if (gated && w.n % 32) return false;
  c = Call{};
  c.w = w, c.bias = bias, c.m = int(m), c.inner = gated ? int(w.n / 2) : 0;
  c.out = out.out, c.out_dtype = out.dtype, c.out_stride = out.stride;
  c.aligned = (uintptr_t(out.out) | size_t(out.stride) * (out.dtype == BF16 ? 2 : 4)) % 16 == 0;
  c.padded = up(int(w.k), w.group ? w.group : 8);
  c.groups = w.group ? c.padded / w.group : 0;
#ifdef BATON_MUTATION_CUDA_LINEAR_BATCH
  const int slices = m > 16 ? SLICES - 2 : SLICES;
#else
  constexpr int slices = SLICES;
#endif
  c.slice = up(parts(c.padded, slices), w.group ? least_common(w.group, 32) : 32);
  return true;
}

}  // namespace
}  // namespace baton
