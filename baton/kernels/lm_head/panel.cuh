// A panel of 64 outputs against tiles of 16 rows on tensor cores, weights straight from memory to mma's registers. Included by
// cuda.cu alone; knows nothing of tokens.
//
// linear.h's panels are mma's B operand as they lie: a lane takes 16 bytes, four outputs, of two neighbouring steps. So output
// 32 h + 4 c + j is column c of tile (h, j). Inputs are spread over four warps, whose sums meet in shared memory in order: a
// row's bits depend on no other row. float32 panels go through the same chains of multiply-adds as the CPU's, bit for bit.
#pragma once
#include "lm_head.h"

namespace baton {
namespace {

constexpr int WARPS = 4, TILE = 16, SLAB = PANEL + 4;  // floats from row to row
constexpr int UNIT = 32;                               // bytes of a row per mma: 16 bf16, 32 int8 or e4m3
constexpr int32_t LINEAR_E4M3 = 3;                     // of a GPU alone: linear/form.cuh draws it

// The rows as mma reads them: [tile][unit][16 rows][32 bytes], with what int8 rows need beside.
struct Inputs {
  const float* x;  // as they were given: float32 panels take these
  int64_t stride;
  int rows;
  char* packed;
  float* scales;  // [row]
  int* sums;      // [row][group]
};

struct Panels {
  PackedLinear w;
  int count, padded, groups, units;
  int64_t bytes;  // of one panel

  explicit Panels(const PackedLinear& from) : w(from) {
    const int64_t step = w.kind == LINEAR_F32 ? 1 : w.group ? w.group : 8;
    count = int((w.n + PANEL - 1) / PANEL), padded = int((w.k + step - 1) / step * step);
    groups = w.group ? padded / w.group : 0;
    bytes = int64_t(padded) * PANEL * (w.kind == LINEAR_F32 ? 32 : w.kind == LINEAR_BF16 ? 16 : w.kind == LINEAR_W4 ? 4 : 8) / 8;
    units = (padded * (w.kind == LINEAR_BF16 ? 2 : 1) + UNIT - 1) / UNIT;
  }
  __host__ __device__ int64_t tile_bytes() const { return int64_t(units) * TILE * UNIT; }
  __device__ __forceinline__ const char* panel(int which) const { return static_cast<const char*>(w.data) + which * bytes; }
};

// Byte b of a row within its tile.
__device__ __forceinline__ int64_t place(int b, int row) { return int64_t(b / UNIT) * TILE * UNIT + row * UNIT + b % UNIT; }

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

#ifdef BATON_SIMT
inline float from_half(uint16_t x) { return simt::half_to_float(x); }
#else
__device__ __forceinline__ float from_half(uint16_t x) { return __half2float(__ushort_as_half(x)); }
#endif

template <int KIND>
using Sum = std::conditional_t<KIND == LINEAR_BF16 || KIND == LINEAR_E4M3, float, int>;

// What one unit of weights is to a lane: b[h][j] is the operand of columns 32 h + 4 c + j.
template <int KIND>
struct Weights {
  uint4 raw[2][KIND == LINEAR_W4 ? 1 : 2];

  // `at`: the unit's first byte in the panel; a lane whose inputs are past the end holds zeros.
  __device__ __forceinline__ void load(const char* at, bool mine) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int steps = KIND == LINEAR_W4 ? 1 : 2;
#pragma unroll
    for (int s = 0; s < steps; s++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        raw[h][s] = mine ? load_once(at + (steps * t + s) * 256 + h * 128 + g * 16) : zeros();
  }
  static __device__ __forceinline__ uint4 zeros() {
    const uint32_t zero = KIND == LINEAR_W8 ? 0x80808080u : KIND == LINEAR_W4 ? 0x88888888u : 0u;
    return make_uint4(zero, zero, zero, zero);
  }
  __device__ __forceinline__ void operand(int h, int j, uint32_t (&b)[2]) const {
    if constexpr (KIND == LINEAR_W4) {
      const uint32_t w = word_of(raw[h][0], j);
      b[0] = ((w & 0x0f0f0f0fu | 0x80808080u) - 0x08080808u) ^ 0x80808080u;  // byte by byte minus 8
      b[1] = ((w >> 4 & 0x0f0f0f0fu | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
    } else {
      const uint32_t flip = KIND == LINEAR_W8 ? 0x80808080u : 0u;
      b[0] = word_of(raw[h][0], j) ^ flip, b[1] = word_of(raw[h][1], j) ^ flip;
    }
  }
};

template <int KIND, int R>
__device__ __forceinline__ void multiply(const Panels& p, const Weights<KIND>& w, const char* tile, int byte, Sum<KIND> (&acc)[R][8][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint32_t a[R][4];
#pragma unroll
  for (int r = 0; r < R; r++) {
    const char* at = tile + r * p.tile_bytes() + place(byte + 8 * t, g);
    const uint2 low = *reinterpret_cast<const uint2*>(at), high = *reinterpret_cast<const uint2*>(at + 8 * UNIT);
    a[r][0] = low.x, a[r][2] = low.y, a[r][1] = high.x, a[r][3] = high.y;
  }
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t b[2];
      w.operand(h, j, b);
#pragma unroll
      for (int r = 0; r < R; r++)
        if constexpr (KIND == LINEAR_BF16)
          mma_bf16_16816(acc[r][4 * h + j], a[r], b);
        else if constexpr (KIND == LINEAR_E4M3)
          mma_e4m3_16832(acc[r][4 * h + j], a[r], b);
        else
          mma_s8_16832(acc[r][4 * h + j], a[r], b);
    }
}

// A lane's sums of tile r to its warp's slab, rows of 64 outputs in order.
template <int R, class T>
__device__ __forceinline__ void store(const T (&acc)[R][8][4], T* slabs) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        T* to = slabs + ((warp * R + r) * TILE + g + 8 * half) * SLAB + 32 * h + 8 * t;
#pragma unroll
        for (int i = 0; i < 8; i++) to[i] = acc[r][4 * h + i % 4][2 * half + i / 4];
      }
}

// One scale per row of weights: a warp takes RUN neighbouring units at a time, whatever R, and loads as many at once as its
// registers hold.
template <int KIND, int R>
__device__ __forceinline__ void product(const Panels& p, const char* tile, int which, Sum<KIND>* slabs) {
  constexpr int RUN = 4, UNROLL = R == 1 ? 4 : 2;
  constexpr int unit_bytes = KIND == LINEAR_W4 ? 1024 : 2048;
  const int row_bytes = p.padded * (KIND == LINEAR_BF16 ? 2 : 1), t = threadIdx.x % 4;
  const char* data = p.panel(which);
  Sum<KIND> acc[R][8][4] = {};
  const auto pass = [&](int first) {
    Weights<KIND> w[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      const int unit = first + i;
#ifdef BATON_MUTATION_CUDA_HEAD_TAIL
      w[i].load(data + int64_t(unit) * unit_bytes, (unit + 1) * UNIT <= row_bytes);
#else
      w[i].load(data + int64_t(unit) * unit_bytes, unit * UNIT + 8 * t < row_bytes);
#endif
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++)
      if (first + i < p.units) multiply<KIND, R>(p, w[i], tile, (first + i) * UNIT, acc);
  };
  for (int run = int(threadIdx.x) / 32 * RUN; run < p.units; run += WARPS * RUN) {
    for (int i = 0; i < RUN; i += UNROLL) pass(run + i);
  }
  store<R>(acc, slabs);
}

// A scale per group of inputs: a warp takes whole groups, and integers become floats at each one's end.
template <int KIND, int R>
__device__ __forceinline__ void product_of_groups(const Panels& p, const Inputs& in, const char* tile, int which, float* slabs) {
  constexpr int UNROLL = R > 1 ? 1 : 2, unit_bytes = KIND == LINEAR_W4 ? 1024 : 2048;
  const int group = p.w.group, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const char* data = p.panel(which);
  float total[R][8][4] = {};
  for (int at = threadIdx.x / 32; at < p.groups; at += WARPS) {
    int acc[R][8][4] = {};
    for (int first = 0; first < group; first += UNROLL * UNIT) {
      Weights<KIND> w[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; i++) {
        const int k = first + i * UNIT;
        w[i].load(data + int64_t(at * group + k) * (unit_bytes / UNIT), k + 8 * t < group);
      }
#pragma unroll
      for (int i = 0; i < UNROLL; i++) {
        const int k = first + i * UNIT;
        // Half a unit at the end: what lies past the group belongs to the next one, and meets zeros here.
        if (k < group) multiply<KIND, R>(p, w[i], tile, k + 8 * t < group ? at * group + k : at * group + k - 8 * t, acc);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int64_t place = (int64_t(which) * p.groups + at) * PANEL + 32 * h + 8 * t;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float scale = from_half(p.w.scales[place + i]), low = p.w.mins ? from_half(p.w.mins[place + i]) : 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float& sum = total[r][4 * h + i % 4][2 * half + i / 4];
            sum = __fmaf_rn(scale, float(acc[r][4 * h + i % 4][2 * half + i / 4]), sum);
            if (p.w.mins) sum = __fmaf_rn(-low, float(in.sums[(r * TILE + g + 8 * half) * p.groups + at]), sum);
          }
      }
    }
  }
  store<R>(total, slabs);
}

// float32: a thread has one output and every second row; dense/cpu.cpp has the same chains.
__device__ __forceinline__ void product_of_floats(const Panels& p, const Inputs& in, int first, int which, float* slab) {
  const int64_t k = p.w.k;
  const int chain = k <= 192 || k >= 384 ? 192 : int(k / 2);
  const int output = threadIdx.x % PANEL, odd = threadIdx.x / PANEL;
  const float* data = reinterpret_cast<const float*>(p.panel(which)) + output;
  float total[TILE / 2] = {};
  for (int64_t begin = 0; begin < k; begin += chain) {
    const int64_t end = begin + chain < k ? begin + chain : k;
    float sum[TILE / 2] = {};
    for (int64_t i = begin; i < end; i++) {
      const float w = data[i * PANEL];
#pragma unroll
      for (int r = 0; r < TILE / 2; r++) {
        const int row = first + 2 * r + odd;
        if (row < in.rows) sum[r] = __fmaf_rn(in.x[row * in.stride + i], w, sum[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < TILE / 2; r++) total[r] = __fadd_rn(total[r], sum[r]);
  }
#pragma unroll
  for (int r = 0; r < TILE / 2; r++) slab[(2 * r + odd) * SLAB + output] = total[r];
}

// The panel's outputs for the R tiles from row `first` on, left in `slabs`; called by WARPS warps, a barrier must follow.
template <int KIND, bool GROUPED, int R>
__device__ __forceinline__ void panel_product(const Panels& p, const Inputs& in, int first, int which, float* slabs) {
  const char* tile = in.packed + first / TILE * p.tile_bytes();
  if constexpr (KIND == LINEAR_F32)
    product_of_floats(p, in, first, which, slabs);
  else if constexpr (GROUPED)
    product_of_groups<KIND, R>(p, {in.x, in.stride, in.rows, in.packed, in.scales, in.sums + int64_t(first) * p.groups}, tile, which, slabs);
  else
    product<KIND, R>(p, tile, which, reinterpret_cast<Sum<KIND>*>(slabs));
}

// Row `row` of the product (counted from its `first`), output `o` of the panel.
template <int KIND, bool GROUPED, int R>
__device__ __forceinline__ float logit(const Panels& p, const Inputs& in, int first, int which, const float* slabs, int row, int o) {
  if constexpr (KIND == LINEAR_F32) return slabs[row * SLAB + o];
  float sum = 0;
  if constexpr (std::is_same_v<Sum<KIND>, float> || GROUPED) {
    for (int warp = 0; warp < WARPS; warp++) sum += slabs[(warp * R * TILE + row) * SLAB + o];
  } else {
    int whole = 0;
    for (int warp = 0; warp < WARPS; warp++) whole += reinterpret_cast<const int*>(slabs)[(warp * R * TILE + row) * SLAB + o];
    sum = float(whole);
  }
  if (p.w.row_scale) sum = __fmul_rn(sum, p.w.row_scale[int64_t(which) * PANEL + o]);
  return KIND == LINEAR_BF16 ? sum : __fmul_rn(sum, in.scales[first + row]);
}

constexpr size_t slab_bytes(int tiles) { return size_t(WARPS) * tiles * TILE * SLAB * 4; }

}  // namespace
}  // namespace baton
