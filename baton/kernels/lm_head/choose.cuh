// From logits to a token: edits, draws and filters of one row. Included by cuda.cu alone; knows nothing of weights.
#pragma once
#include "../cuda/draw.cuh"
#include "lm_head.h"

namespace baton {
namespace {

constexpr int CHOOSERS = 256, CANDIDATES = 2048;
constexpr float LIKELY = 1.0f / 4096;  // of the likeliest: what is looked at first

// What a panel of one row is known by. `token` is the first of the largest; a NaN anywhere makes `most` one.
struct Stat {
  float most, mass;
  int token, unused;
};

struct Row {
  Choice ask;
  const int* counts;  // per token: 1 if seen at all, + 2 for each time as an output
  int64_t vocab;

  __device__ __forceinline__ bool penalised() const {
    return !ask.logits && (ask.repetition != 1.0f || ask.frequency != 0.0f || ask.presence != 0.0f);
  }
  __device__ __forceinline__ bool drawn() const { return ask.temperature > 0 && !ask.logits; }
  __device__ __forceinline__ bool filtered() const { return drawn() && (ask.top_k > 0 || ask.top_p < 1 || ask.min_p > 0); }
};

// A whole warp: each id of the list that lies in first … first + 63 meets f(position, its place in the list) in all lanes.
template <class F>
__device__ __forceinline__ void each_within(const int32_t* ids, int32_t count, int64_t first, F f) {
  const int lane = threadIdx.x % 32;
  for (int32_t base = 0; base < count; base += 32) {
    const int64_t at = base + lane < count ? int64_t(ids[base + lane]) - first : -1;
    unsigned hits = __ballot_sync(ALL_LANES, at >= 0 && at < PANEL);
    while (hits) {
      const int from = __ffs(int(hits)) - 1;
      f(__shfl_sync(ALL_LANES, int(at), from), base + from);
      hits &= hits - 1;
    }
  }
}

// The warp's 64 logits of a panel, outputs lane and lane + 32, in the reference's order of edits.
__device__ __forceinline__ void edit(const Row& row, int64_t first, float (&x)[2]) {
  const int lane = threadIdx.x % 32;
  const Choice& c = row.ask;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64_t token = first + lane + 32 * i;
    if (!row.penalised() || token >= row.vocab) continue;
    const int seen = __ldcg(row.counts + token), times = seen >> 1;
    if (seen && c.repetition != 1.0f) x[i] = x[i] > 0 ? __fdiv_rn(x[i], c.repetition) : __fmul_rn(x[i], c.repetition);
#ifdef BATON_MUTATION_CUDA_HEAD_PRESENCE
    if (seen) x[i] = __fsub_rn(x[i], __fadd_rn(__fmul_rn(float(times), c.frequency), c.presence));
#else
    if (times) x[i] = __fsub_rn(x[i], __fadd_rn(__fmul_rn(float(times), c.frequency), c.presence));
#endif
  }
  each_within(c.bias_ids, c.bias_count, first, [&](int at, int i) {
    const float bias = c.bias[i];
    if (at == lane) x[0] += bias;
    if (at == lane + 32) x[1] += bias;
  });
  if (c.allowed)
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (first + lane + 32 * i < row.vocab && !c.allowed[first + lane + 32 * i]) x[i] = -INFINITY;
  each_within(c.banned, c.banned_count, first, [&](int at, int) {
    if (at == lane) x[0] = -INFINITY;
    if (at == lane + 32) x[1] = -INFINITY;
  });
}

// Of a warp's 64 edited logits; what lies past the vocabulary is -inf by now.
__device__ __forceinline__ Stat stat_of(const Row& row, int64_t first, const float (&x)[2]) {
  const float most = warp_max(fmaxf(x[0], x[1]));
  const bool wrong = __any_sync(ALL_LANES, x[0] != x[0] || x[1] != x[1]);
  const unsigned low = __ballot_sync(ALL_LANES, x[0] == most), high = __ballot_sync(ALL_LANES, x[1] == most);
#ifdef BATON_MUTATION_CUDA_HEAD_TIE
  const int at = high ? __ffs(int(high)) + 31 : __ffs(int(low)) - 1;
#else
  const int at = low ? __ffs(int(low)) - 1 : __ffs(int(high)) + 31;
#endif
  float mass = 0;
  if (row.drawn() && most != -INFINITY) {
    const float warmth = __fdiv_rn(1.0f, row.ask.temperature);
    mass = warp_sum(mass_of(x[0], most, warmth) + mass_of(x[1], most, warmth));
  }
  return {wrong ? NAN : most, mass, int(first) + at, 0};
}

// What a block keeps while it filters a row.
struct Sieve {
  u64* scratch;
  float* few;   // CANDIDATES masses
  int* held;    // how many
  float* edge;
  Drawn* found;
};

// A row's masses, of all its tokens or of the likely ones alone.
struct Masses {
  const float* logits;
  int64_t vocab;
  float most, warmth;
  const float* few;
  int held;  // -1: not all likely ones have a place

  template <class F>
  __device__ __forceinline__ void each(bool likely, int threads, F f) const {
    if (likely)
      for (int i = threadIdx.x; i < held; i += threads) f(few[i]);
    else
      for (int64_t i = threadIdx.x; i < vocab; i += threads) f(mass_of(logits[i], most, warmth));
  }
};

// Bit by bit, the largest mass such that those that are no less weigh `target`; `sum` adds up over the searching threads.
template <bool BY_MASS, class Sum>
__device__ __forceinline__ float search(const Masses& all, bool likely, int threads, u64 target, float least, Sum sum) {
  uint32_t found = 0;
  for (int bit = 29; bit >= 0; bit--) {
    const uint32_t trial = found | 1u << bit;
    u64 weight = 0;
    all.each(likely, threads, [&](float mass) {
      if (__float_as_uint(mass) >= trial && mass >= least) weight += BY_MASS ? fixed(mass) : 1;
    });
    if (sum(weight) >= target) found = trial;
  }
  return __uint_as_float(found);
}

// By count, or by mass among those >= least. The likely ones are few: one warp searches them.
template <bool BY_MASS>
__device__ float threshold(const Masses& all, bool likely, u64 target, float least, const Sieve& s) {
  if (!likely)
    return search<BY_MASS>(all, false, CHOOSERS, target, least, [&](u64 x) { return block_total(x, s.scratch); });
  if (threadIdx.x < 32) {
    const float edge = search<BY_MASS>(all, true, 32, target, least, [](u64 x) { return warp_total(x); });
    if (threadIdx.x == 0) *s.edge = edge;
  }
  __syncthreads();
  const float edge = *s.edge;
  __syncthreads();
  return edge;
}

// top_k, top_p, min_p as a threshold on the mass; ties stay.
__device__ float least_mass(const Row& row, Masses& all, const Sieve& s) {
  const Choice& c = row.ask;
  if (threadIdx.x == 0) *s.held = 0;
  __syncthreads();
  u64 mass = 0, likely = 0;
  all.each(false, CHOOSERS, [&](float x) {
    mass += fixed(x);
    if (x < LIKELY) return;
    const int at = atomicAdd(s.held, 1);
    if (at < CANDIDATES) s.few[at] = x, likely += fixed(x);
  });
  mass = block_total(mass, s.scratch), likely = block_total(likely, s.scratch);
  const int held = *s.held;
  all.held = held <= CANDIDATES ? held : -1;
  float least = 0;
  if (c.top_k > 0 && c.top_k < row.vocab) least = threshold<false>(all, all.held >= c.top_k, u64(c.top_k), 0, s);
  if (c.top_p < 1) {
#ifndef BATON_MUTATION_CUDA_HEAD_TOP_P
    if (least > 0) {
      u64 kept = 0;
      all.each(least >= LIKELY && all.held >= 0, CHOOSERS, [&](float x) { kept += x >= least ? fixed(x) : 0; });
      mass = block_total(kept, s.scratch);
    }
#endif
    const double wanted = ceil(double(c.top_p) * double(mass));
    const u64 target = wanted > 1 ? u64(wanted) : 1;
    least = fmaxf(least, threshold<true>(all, all.held >= 0 && likely >= target, target, least, s));
  }
  return fmaxf(least, c.min_p);
}

// The first token whose cumulative mass, of those not below the threshold, passes uniform x total.
__device__ int filter(const Row& row, const float* logits, float most, const Sieve& s) {
  Masses all{logits, row.vocab, most, __fdiv_rn(1.0f, row.ask.temperature), s.few, 0};
  const float least = least_mass(row, all, s);
  const auto mass = [&](int64_t i) {
    const float x = mass_of(logits[i], most, all.warmth);
    return x >= least ? fixed(x) : 0;
  };
  return draw(row.vocab, row.ask.uniform, s.scratch, s.found, mass).place;
}

// Which panel uniform x total falls into, and which share of its mass lies before that.
__device__ int panel_of(const Row& row, const Stat* stats, int panels, float most, u64* scratch, Drawn* found, double& part) {
  const float warmth = __fdiv_rn(1.0f, row.ask.temperature);
  const auto mass = [&](int64_t p) {
    const Stat s = stats[p];
    return u64(double(s.mass) * exp((double(s.most) - double(most)) * double(warmth)) * double(1ull << 40));
  };
  const Drawn drawn = draw(panels, row.ask.uniform, scratch, found, mass);
  part = double(drawn.rest) / double(mass(drawn.place));
  return drawn.place;
}

// One warp, the panel's edited logits: the token at `part` of the panel's mass.
__device__ __forceinline__ int within(const Row& row, int64_t first, const float (&x)[2], double part) {
  const int lane = threadIdx.x % 32;
  const float most = warp_max(fmaxf(x[0], x[1])), warmth = __fdiv_rn(1.0f, row.ask.temperature);
  u64 reached[2] = {fixed(mass_of(x[0], most, warmth)), fixed(mass_of(x[1], most, warmth))};
  for (int by = 1; by < 32; by *= 2)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u64 other = __shfl_up_sync(ALL_LANES, reached[i], by);
      if (lane >= by) reached[i] += other;
    }
  reached[1] += __shfl_sync(ALL_LANES, reached[0], 31);
  const u64 target = share(part, __shfl_sync(ALL_LANES, reached[1], 31));
  const unsigned low = __ballot_sync(ALL_LANES, reached[0] > target), high = __ballot_sync(ALL_LANES, reached[1] > target);
  return int(first) + (low ? __ffs(int(low)) - 1 : __ffs(int(high)) + 31);
}

}  // namespace
}  // namespace baton
