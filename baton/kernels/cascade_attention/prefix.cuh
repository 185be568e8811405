// A chunk of keys against 64 rows of queries x group of one KV head, on tensor cores. Knows nothing of who the rows are.
//
// A warp has 16 rows and goes over 32 keys at a time with a running maximum (https://arxiv.org/abs/1805.02867). A float of q and a
// weight are each PARTS 16-bit numbers, added up by the same mma: two have 16 bits of them with bf16 keys, 22 with f16. The rows
// see all of the chunk's keys; or, CAUSAL, each those up to its own position, and then the chunk has all keys of its rows.
#pragma once
#include "cascade.h"
#include "tiles.cuh"

namespace baton {
namespace {

// Some rows of q, which lie one behind the other: row i is query first + i / group of head i % group.
struct Block {
  int64_t first;
  int row, rows, head;  // of the group's rows; KV head
  const int32_t* pages;
  int begin, end;       // keys
  int start = 0;        // position of query `first`, where rows are CAUSAL

  // The keys that a row sees, counted from key 0.
  __device__ int2 seen(const Call& c, int at) const {
    const int position = start + (row + at) / c.group;
    return make_int2(c.window ? position - c.window + 1 : 0, position);
  }
};

// The upper 16-bit part of two floats, which keep the rest.
template <int T>
__device__ __forceinline__ uint32_t take_pair(float& a, float& b) {
  uint32_t bits;
  if constexpr (T == KV_BF16) {
    bits = to_bf16x2(a, b);
    a -= bf16_low(bits), b -= bf16_high(bits);
  } else {
    const __half2 pair = __floats2half2_rn(a, b);
    const float2 wide = __half22float2(pair);
    memcpy(&bits, &pair, 4);
    a -= wide.x, b -= wide.y;
  }
  return bits;
}

// q to shared memory in parts, rows by warps; what is no row is zero.
template <int T, int D, int PARTS>
__device__ void load_rows(const Call& c, const Block& b, const Tiles<D>& s) {
  const int lane = threadIdx.x % 32, d = c.kv.head_dim;
  for (int row = threadIdx.x / 32; row < TILE_ROWS; row += WARPS) {
    const int at = b.row + row;
    const bool has = row < b.rows;
    const float* from = c.q + (b.first + at / c.group) * c.q_stride + int64_t(b.head * c.group + at % c.group) * d;
    float power = 1, inverse = 1;
    if constexpr (scaled<T>()) {
      float peak = 0;
      bool fine = true;
      if (has)
        for (int k = lane; k < d; k += 32) peak = fmaxf(peak, fabsf(from[k])), fine &= fabsf(from[k]) < INFINITY;
      power_above(warp_max(peak), power, inverse);
      if (!__all_sync(ALL_LANES, fine)) power = NAN, inverse = 0;
    }
    if (lane == 0) s.power[row] = power;
    for (int k = 2 * lane; k < d; k += 64) {
      float x = has ? from[k] : 0, y = has ? from[k + 1] : 0;
      x = inverse == 0 ? 0 : x * inverse, y = inverse == 0 ? 0 : y * inverse;
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        *reinterpret_cast<uint32_t*>(s.q + (part * TILE_ROWS + row) * Tiles<D>::STRIDE + k) = take_pair<T>(x, y);
    }
  }
  __syncthreads();
}

// This warp's rows of q as mma takes them, all parts.
template <int D, int PARTS>
struct Queries {
  uint32_t held[Tiles<D>::IN_REGISTERS ? D / 16 : 1][PARTS][4];
  const uint16_t* at;

  __device__ Queries(const Tiles<D>& s, int d) {
    const int lane = threadIdx.x % 32;
    at = s.q + (threadIdx.x / 32 * 16 + lane % 16) * Tiles<D>::STRIDE + lane / 16 * 8;
    if constexpr (Tiles<D>::IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < D / 16; k++)
        if (16 * k < d) load(k, held[k]);
      __syncthreads();
    }
  }
  __device__ __forceinline__ void load(int k, uint32_t (&to)[PARTS][4]) const {
#pragma unroll
    for (int part = 0; part < PARTS; part++) ldmatrix_x4(to[part], at + part * TILE_ROWS * Tiles<D>::STRIDE + 16 * k);
  }
};

// What a lane holds of its warp's rows g and g + 8 (g = lane / 4) between tiles.
template <int D>
struct Running {
  float acc[D / 8][4] = {};
  float most[2] = {-INFINITY, -INFINITY}, total[2] = {};
  float unit = 0;  // what acc counts in: a power of two, of the values' scales
};

template <int T, int D, int PARTS>
__device__ __forceinline__ void score_tile(const Queries<D, PARTS>& q, const uint16_t* keys, int d, float (&scores)[KEYS / 8][4]) {
  const int lane = threadIdx.x % 32;
  const uint16_t* row = keys + (lane / 16 * 8 + lane % 8) * Tiles<D>::STRIDE + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    if (16 * k >= d) continue;
    uint32_t loaded[PARTS][4];
    if constexpr (!Tiles<D>::IN_REGISTERS) q.load(k, loaded);
    const auto& a = Tiles<D>::IN_REGISTERS ? q.held[k % (sizeof q.held / sizeof q.held[0])] : loaded;
#pragma unroll
    for (int pair = 0; pair < KEYS / 16; pair++) {
      uint32_t b[4];
      ldmatrix_x4(b, row + pair * 16 * Tiles<D>::STRIDE + 16 * k);
#pragma unroll
      for (int part = PARTS - 1; part >= 0; part--) {
        multiply<T>(scores[2 * pair], a[part], b[0], b[1]);
        multiply<T>(scores[2 * pair + 1], a[part], b[2], b[3]);
      }
    }
  }
}

// Scores to weights of the first `keys` of the tile, whose maximum and sum go into the rows'; `keep`: what the rows' sums so far
// must be multiplied by. `seen`: of the tile's keys those that the lane's two rows see, where they are CAUSAL.
template <int T, int D, bool CAUSAL>
__device__ __forceinline__ void soften_tile(const Call& c, const Tiles<D>& s, int stage, int keys, const int2 (&seen)[2], Running<D>& r,
                                            float (&scores)[KEYS / 8][4], float (&keep)[2]) {
  const int lane = threadIdx.x % 32, t = lane % 4, row = threadIdx.x / 32 * 16 + lane / 4;
  const auto has = [&](int half, int n, int i) {
    if constexpr (!CAUSAL) return 8 * n < keys;
    const int at = 8 * n + 2 * t + i;
    return at >= seen[half].x && at <= seen[half].y;
  };
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float factor = scaled<T>() ? s.power[row + 8 * half] * c.scale : c.scale;
    float top = r.most[half];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float& x = scores[n][2 * half + i];
        x *= scaled<T>() ? s.key_scales(stage)[8 * n + 2 * t + i] * factor : factor;
        if (has(half, n, i) && x > top) top = x;
      }
    top = warp_max<4>(top);
#ifdef BATON_MUTATION_CUDA_CASCADE_KEEP
    keep[half] = 1.0f;
#else
    keep[half] = r.most[half] == -INFINITY ? 0.0f : exp2_fast(r.most[half] - top);
#endif
    float sum = 0;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float& x = scores[n][2 * half + i];
        x = has(half, n, i) ? exp2_fast(x - top) : 0;
        sum += x;
      }
    r.most[half] = top, r.total[half] = r.total[half] * keep[half] + sum;
  }
  if constexpr (scaled<T>()) {
    float power = r.unit, inverse = 1;
    const float peak = warp_max(s.value_scales(stage)[lane]);
    if (peak > 0) power_above(peak, power, inverse);
    if (!(power > r.unit)) power = r.unit;
    if (power == 0) power = 1;
    inverse = 1 / power;  // of a power of two: exact
    keep[0] *= r.unit * inverse, keep[1] *= r.unit * inverse;
    r.unit = power;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (8 * n < keys) scores[n][i] *= s.value_scales(stage)[8 * n + 2 * t + i % 2] * inverse;
  }
}

template <int T, int D, int PARTS>
__device__ __forceinline__ void value_tile(const uint16_t* values, int d, const float (&keep)[2], float (&weights)[KEYS / 8][4], Running<D>& r) {
  const int lane = threadIdx.x % 32;
  const uint16_t* row = values + (lane / 8 % 2 * 8 + lane % 8) * Tiles<D>::STRIDE + lane / 16 * 8;
  uint32_t a[KEYS / 16][PARTS][4];
#pragma unroll
  for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int i = 0; i < 4; i++) a[j][part][i] = take_pair<T>(weights[2 * j + i / 2][i % 2 * 2], weights[2 * j + i / 2][i % 2 * 2 + 1]);
#pragma unroll
  for (int n = 0; n < D / 16; n++) {
    if (16 * n >= d) continue;
#pragma unroll
    for (int i = 0; i < 4; i++) r.acc[2 * n][i] *= keep[i / 2], r.acc[2 * n + 1][i] *= keep[i / 2];
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, row + j * 16 * Tiles<D>::STRIDE + 16 * n);
#pragma unroll
      for (int part = PARTS - 1; part >= 0; part--) {
        multiply<T>(r.acc[2 * n], a[j][part], b[0], b[1]);
        multiply<T>(r.acc[2 * n + 1], a[j][part], b[2], b[3]);
      }
    }
  }
}

// The chunk's sums, maximum and total of every row, to where `place` says that they go; of CAUSAL rows the result.
template <int T, int D, int PARTS, bool CAUSAL, class Place>
__device__ void attend_chunk(const Call& c, const Block& b, char* memory, Place place) {
  const Tiles<D> s(memory);
  const int d = c.kv.head_dim, lane = threadIdx.x % 32;
  load_rows<T, D, PARTS>(c, b, s);
  const Queries<D, PARTS> q(s, d);
  const int of = threadIdx.x / 32 * 16 + lane / 4;
  const int2 whole[2] = {b.seen(c, of), b.seen(c, of + 8)};
  Running<D> r;
  Loader<T, D> loader(c.kv, s, b.pages, b.head, b.begin, b.end);
  loader.begin(b.begin, 0);
  for (int key = b.begin, stage = 0; key < b.end; key += KEYS, stage ^= 1) {
    loader.end(stage);
#ifndef BATON_MUTATION_CUDA_CASCADE_BARRIER
    __syncthreads();  // the tile is whole, and nobody is at the one before
#endif
    if (key + KEYS < b.end) loader.begin(key + KEYS, stage ^ 1);
    float scores[KEYS / 8][4] = {}, keep[2];
    score_tile<T, D, PARTS>(q, s.keys(stage), d, scores);
#ifdef BATON_MUTATION_CUDA_PROMPT_CAUSAL
    const int2 seen[2] = {make_int2(whole[0].x - key, whole[0].y + 1 - key), make_int2(whole[1].x - key, whole[1].y + 1 - key)};
#else
    const int2 seen[2] = {make_int2(whole[0].x - key, whole[0].y - key), make_int2(whole[1].x - key, whole[1].y - key)};
#endif
    soften_tile<T, D, CAUSAL>(c, s, stage, b.end - key, seen, r, scores, keep);
    value_tile<T, D, PARTS>(s.values(stage), d, keep, scores, r);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = of + 8 * half;
    const float total = warp_sum<4>(r.total[half]);
    if (row >= b.rows) continue;
    float* to = place(b.row + row);
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      if (8 * n >= d) continue;
      const float unit = (scaled<T>() ? r.unit : 1.0f) / (CAUSAL ? total : 1.0f);
      __stcg(reinterpret_cast<float2*>(to + 8 * n + 2 * (lane % 4)), make_float2(r.acc[n][2 * half] * unit, r.acc[n][2 * half + 1] * unit));
    }
    if (!CAUSAL && lane % 4 == 0) __stcg(reinterpret_cast<float2*>(to + d), make_float2(r.most[half], total));
  }
}

}  // namespace
}  // namespace baton
