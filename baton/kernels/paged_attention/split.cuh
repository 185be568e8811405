// One block's work: some query rows of one KV head against a split of 256 keys. Included by cuda.cu files.
//
// The 16 rows of an mma are the parts of the query rows: row p x rows + r is part p of row r. Four warps score eight keys at
// a time each, take the softmax of rows by warps, then each multiply every fourth 16 keys of V.
#pragma once
#include "block.cuh"

namespace baton {
namespace {
namespace attention {

// Of a row's 128-byte blocks, how many are summed at a time: 64 sums per lane, beyond which registers spill.
template <int T, int B>
__host__ __device__ constexpr int blocks_at_once() {
  return B * chunk_elements<T>() > 16 ? 16 / chunk_elements<T>() : B;
}

// q to parts, rows by warps; what is no row is zero.
template <int T>
__device__ void load_queries(const Call& c, const Rows& r, const Shared& s) {
  const int lane = me() % 32, d = c.kv.head_dim;
  for (int i = me(); i < 16 * s.q_stride / 2; i += THREADS) reinterpret_cast<uint32_t*>(s.q)[i] = 0;
  BATON_TEAM_SYNC();
  for (int row = me() / 32; row < r.rows; row += WARPS) {
    const int at = r.row + row;
    const float* from = c.q + (r.item.first + at / c.group) * c.q_stride + int64_t(r.head * c.group + at % c.group) * d;
    float power = 1, inverse = 1;
    if constexpr (scaled<T>()) {
      float peak = 0;
      bool fine = true;
      for (int k = lane; k < d; k += 32) peak = fmaxf(peak, fabsf(from[k])), fine &= fabsf(from[k]) < INFINITY;
      power_above(warp_max(peak), power, inverse);
      if (!__all_sync(ALL_LANES, fine)) power = NAN, inverse = 0;
    }
    if (lane == 0) s.query_power[row] = power * stored_unit<T>();
    for (int k = lane; k < d; k += 32) {
      float x = scaled<T>() && inverse == 0 ? 0 : from[k] * inverse;
      for (int part = 0; part < parts_of_float<T>(); part++)
        s.q[(part * r.rows + row) * s.q_stride + query_place<T>(k)] = take_part<T>(x);
    }
  }
  BATON_TEAM_SYNC();
}

__device__ __forceinline__ void load_a(uint32_t (&a)[4], const uint16_t* rows, int stride, int place) {
  const uint16_t* at = rows + int(me() % 32 / 4) * stride + place;
  const uint2 low = *reinterpret_cast<const uint2*>(at), high = *reinterpret_cast<const uint2*>(at + 8 * stride);
  a[0] = low.x, a[2] = low.y, a[1] = high.x, a[3] = high.y;
}

// Keys from … to of the split, from outside of which nothing is read.
struct Span {
  int key, from, to;
  __device__ bool has(int at) const { return at >= from && at < to; }
};

template <int T, int B>
__device__ void score(const Call& c, const Rows& r, const Shared& s, const Span& span) {
  const int lane = me() % 32, g = lane / 4, t = lane % 4;
  const int chunks = c.kv.head_dim / chunk_elements<T>();
  for (int tile = me() / 32; tile < SPLIT / 8; tile += WARPS) {
    if (tile * 8 + 7 < span.from || tile * 8 >= span.to) continue;  // the whole warp
    const int at = tile * 8 + g;
    uint4 keys[2 * B];
#pragma unroll
    for (int i = 0; i < 2 * B; i++) {
      keys[i] = make_uint4(0, 0, 0, 0);
      if (span.has(at) && 4 * i + t < chunks)
        keys[i] = Plane<T>(c.kv, s.pages[at / PAGE], false).chunk(at % PAGE, r.head, 4 * i + t);
    }
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * B; i++) {
      if (4 * i >= chunks) continue;
#pragma unroll
      for (int word = 0; word < 4; word += T == KV_BF16 ? 2 : 1) {
        uint32_t a[4];
        load_a(a, s.q, s.q_stride, (4 * i + t) * chunk_elements<T>() + (T == KV_BF16 ? 2 : 4) * word);
        const uint32_t w = word_of(keys[i], word);
        if constexpr (T == KV_BF16)
          multiply<T>(sums, a, w, word_of(keys[i], word + 1));
        else
          multiply<T>(sums, a, to_halves<T>(w, false), to_halves<T>(w, true));
      }
    }
    float* to = s.scores + g * SCORES + tile * 8 + 2 * t;
    *reinterpret_cast<float2*>(to) = make_float2(sums[0], sums[1]);
    *reinterpret_cast<float2*>(to + 8 * SCORES) = make_float2(sums[2], sums[3]);
  }
}

// A row's scores to weights, in parts; a key that is hidden weighs exactly 0.
template <int T>
__device__ void soften(const Call& c, const Rows& r, const Shared& s, const Span& span) {
  const int lane = me() % 32;
  for (int row = me() / 32; row < r.rows; row += WARPS) {
    const int position = r.item.start + (r.row + row) / c.group;
#ifdef BATON_MUTATION_CUDA_CAUSAL
    const int last = position + 1 - span.key;
#else
    const int last = position - span.key;
#endif
    const int first = c.window ? position - c.window + 1 - span.key : 0;
    float x[SPLIT / 32], most = -INFINITY;
#pragma unroll
    for (int i = 0; i < SPLIT / 32; i++) {
      const int at = 32 * i + lane;
      x[i] = -INFINITY;
      if (!span.has(at) || at > last || at < first) continue;
      float sum = 0;
      for (int part = parts_of_float<T>() - 1; part >= 0; part--) sum += s.scores[(part * r.rows + row) * SCORES + at];
      x[i] = sum * (scaled<T>() ? s.query_power[row] * s.key_scales[at] : 1.0f) * c.scale;
      most = x[i] > most || x[i] != x[i] ? x[i] : most;
    }
    most = warp_max(most);
    float total = 0, peak = 0;
#pragma unroll
    for (int i = 0; i < SPLIT / 32; i++) {
      const int at = 32 * i + lane;
      x[i] = x[i] == -INFINITY ? 0 : exp2_fast(x[i] - most);
      total += x[i];
      if constexpr (scaled<T>()) {
        if (x[i] != 0) x[i] *= s.value_scales[at];
        peak = fmaxf(peak, x[i]);
      }
    }
    total = warp_sum(total);
    float power = 1, inverse = 1;
    if constexpr (scaled<T>()) power_above(warp_max(peak), power, inverse);
    if (lane == 0) s.most[row] = most, s.total[row] = total, s.weight_power[row] = power * stored_unit<T>();
#pragma unroll
    for (int i = 0; i < SPLIT / 32; i++) {
      float w = x[i] * inverse;
      for (int part = 0; part < parts_of_float<T>(); part++)
        s.weights[(part * r.rows + row) * WEIGHTS + 32 * i + lane] = take_part<T>(w);
    }
  }
}

// Two keys' words of V to the operand of two columns.
template <int T>
__device__ __forceinline__ void multiply_values(float (&even)[4], float (&odd)[4], const uint32_t (&a)[4], uint32_t k0, uint32_t k1,
                                                uint32_t k2, uint32_t k3, unsigned pick) {
  const uint32_t low = __byte_perm(k0, k1, pick), high = __byte_perm(k2, k3, pick);
  multiply<T>(even, a, to_halves<T>(low, false), to_halves<T>(high, false));
  multiply<T>(odd, a, to_halves<T>(low, true), to_halves<T>(high, true));
}

// Blocks first … first + B - 1 of the rows.
template <int T, int B>
__device__ void value(const Call& c, const Rows& r, const Shared& s, const Span& span, int first, float (&acc)[B][chunk_elements<T>()][4]) {
  const int lane = me() % 32, g = lane / 4, t = lane % 4;
  const int chunks = c.kv.head_dim / chunk_elements<T>();
#ifdef BATON_MUTATION_CUDA_LAST_PAGE
  const int to = span.to - PAGE < span.from + 1 ? span.to : span.to / PAGE * PAGE;
#else
  const int to = span.to;
#endif
  for (int page = me() / 32; page < SPLIT / PAGE; page += WARPS) {
    if (page * PAGE + PAGE - 1 < span.from || page * PAGE >= to) continue;  // the whole warp
    const Plane<T> values(c.kv, s.pages[page], true);
    uint32_t a[4];
    load_a(a, s.weights, WEIGHTS, page * PAGE + 4 * t);
#pragma unroll
    for (int b = 0; b < B; b++) {
      const int column = 8 * (first + b);
      if (column >= chunks) continue;
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (span.has(page * PAGE + 4 * t + i) && column + g < chunks) v[i] = values.chunk(4 * t + i, r.head, column + g);
      }
#pragma unroll
      for (int word = 0; word < 4; word++) {
        const uint32_t k0 = word_of(v[0], word), k1 = word_of(v[1], word), k2 = word_of(v[2], word), k3 = word_of(v[3], word);
        if constexpr (T == KV_BF16) {
          multiply<T>(acc[b][2 * word], a, __byte_perm(k0, k1, 0x5410), __byte_perm(k2, k3, 0x5410));
          multiply<T>(acc[b][2 * word + 1], a, __byte_perm(k0, k1, 0x7632), __byte_perm(k2, k3, 0x7632));
        } else {
          multiply_values<T>(acc[b][4 * word], acc[b][4 * word + 1], a, k0, k1, k2, k3, 0x5410);
          multiply_values<T>(acc[b][4 * word + 2], acc[b][4 * word + 3], a, k0, k1, k2, k3, 0x7632);
        }
      }
    }
  }
}

// The warps' sums added in order.
template <int T, int B>
__device__ void collect(const Call& c, const Shared& s, int first, const float (&acc)[B][chunk_elements<T>()][4]) {
  constexpr int E = chunk_elements<T>();
  const int lane = me() % 32, g = lane / 4, t = lane % 4, d = c.kv.head_dim;
  for (int warp = 0; warp < WARPS; warp++) {
    if (int(me()) / 32 == warp) {
#pragma unroll
      for (int b = 0; b < B; b++)
#pragma unroll
        for (int e = 0; e < E; e++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int row = g + i / 2 * 8, at = (8 * (first + b) + 2 * t + i % 2) * E + e;
            if (at < d) s.result[row * d + at] = warp ? s.result[row * d + at] + acc[b][e][i] : acc[b][e][i];
          }
    }
#ifndef BATON_MUTATION_CUDA_COLLECT_BARRIER
    BATON_TEAM_SYNC();
#endif
  }
}

// The parts of a row added: result[row][d].
template <int T>
__device__ void add_parts(const Call& c, const Rows& r, const Shared& s) {
  const int d = c.kv.head_dim;
  for (int i = me(); i < r.rows * d; i += THREADS) {
    float sum = 0;
    for (int part = parts_of_float<T>() - 1; part >= 0; part--) sum += s.result[part * r.rows * d + i];
    s.result[i] = s.weight_power[i / d] * sum;
  }
  BATON_TEAM_SYNC();
}

// The split that begins at `key`: result, most and total of every row.
template <int T, int B>
__device__ void attend_split(const Call& c, const Rows& r, const Shared& s, int key) {
  const int oldest = c.window ? r.item.start + r.row / c.group - c.window + 1 - key : 0, end = r.last(c) + 1 - key;
  const Span span{key, oldest > 0 ? oldest : 0, end < SPLIT ? end : SPLIT};
  for (int i = me(); i < SPLIT / PAGE; i += THREADS) s.pages[i] = i * PAGE < span.to ? r.item.pages[key / PAGE + i] : 0;
  BATON_TEAM_SYNC();
  if constexpr (scaled<T>())
    for (int i = me(); i < SPLIT; i += THREADS) {
#ifdef BATON_MUTATION_CUDA_SCALE
      const int token = i / PAGE * PAGE == i ? 0 : i % PAGE - 1;
#else
      const int token = i % PAGE;
#endif
      s.key_scales[i] = span.has(i) ? Plane<T>(c.kv, s.pages[i / PAGE], false).scale(i % PAGE, r.head) : 0;
      s.value_scales[i] = span.has(i) ? Plane<T>(c.kv, s.pages[i / PAGE], true).scale(token, r.head) : 0;
    }
  for (int i = me(); i < 16 * WEIGHTS / 2; i += THREADS) reinterpret_cast<uint32_t*>(s.weights)[i] = 0;
  score<T, B>(c, r, s, span);
  BATON_TEAM_SYNC();
  soften<T>(c, r, s, span);
  BATON_TEAM_SYNC();
  constexpr int V = blocks_at_once<T, B>();
#pragma unroll 1
  for (int first = 0; 8 * first * chunk_elements<T>() < c.kv.head_dim; first += V) {
    float acc[V][chunk_elements<T>()][4] = {};
    value<T, V>(c, r, s, span, first, acc);
    collect<T, V>(c, s, first, acc);
  }
  add_parts<T>(c, r, s);
}

}  // namespace attention
}  // namespace
}  // namespace baton
