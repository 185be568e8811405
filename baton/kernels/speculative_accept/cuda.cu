// Two launches: `measure` passes all rows of all sequences at once, in stretches; `accept`, a block per sequence, walks its
// drafts and passes one row more, from which the token behind them is drawn. Where the target's choices are given, the
// second alone has work. Drafts are read on the device alone, so that a captured launch serves any.
#include "../cuda/draw.cuh"
#include "../cuda/workspace.cuh"
#include "accept.h"

namespace baton {
namespace {

constexpr int THREADS = 256, STRETCH = 4096, ROWS = MOST_DRAFTS + 1;

// A stretch of a row: its largest logit by rank (all ones: there is a NaN) and its mass relative to that.
struct Part {
  u64 best;
  float mass;
  int unused;
};

struct Call {
  Draft* drafts;
  Part* parts;  // [sequence][row][stretch]
  int64_t vocab;
  int stretches;

  __device__ __forceinline__ Part* row(int sequence, int place) const {
    return parts + (int64_t(sequence) * ROWS + place) * stretches;
  }
};

constexpr u64 WRONG = ~0ull;

__device__ __forceinline__ int drafted(const Draft& d) { return d.count < MOST_DRAFTS ? d.count : MOST_DRAFTS; }
__device__ __forceinline__ float warmth_of(const Draft& d) { return d.temperature > 0 ? __fdiv_rn(1.0f, d.temperature) : 0.0f; }

// Grid: (stretches, rows, sequences).
__global__ void __launch_bounds__(THREADS) measure(const Call c) {
  BATON_STATIC_SHARED(u64, scratch, THREADS / 32);
  BATON_STATIC_SHARED(float, sums, 32);
  grid_wait();
  grid_launch_next();
  const Draft& d = c.drafts[blockIdx.z];
  const int place = blockIdx.y;
  if (d.chosen || place > drafted(d)) return;
  const float *x = d.target + place * d.target_stride, warmth = warmth_of(d);
  const int64_t from = int64_t(blockIdx.x) * STRETCH, end = from + STRETCH < c.vocab ? from + STRETCH : c.vocab;
  float held[STRETCH / THREADS];
  u64 best = 0;
#pragma unroll
  for (int k = 0; k < STRETCH / THREADS; k++) {
    const int64_t i = from + k * THREADS + threadIdx.x;
    held[k] = i < end ? x[i] : -INFINITY;
    const u64 mine = held[k] == held[k] ? i < end ? rank(held[k], int(i)) : 0 : WRONG;
    best = mine > best ? mine : best;
  }
  best = block_most(best, scratch);
  const float most = value_of(best);
  float mass = 0;
  if (best != WRONG && most != -INFINITY)
#pragma unroll
    for (int k = 0; k < STRETCH / THREADS; k++) mass += mass_of(held[k], most, warmth);
  mass = block_sum(mass, sums);
  if (threadIdx.x == 0) c.row(blockIdx.z, place)[blockIdx.x] = {best, mass, 0};
}

struct Spread {
  float most;
  u64 total;
  int best;
  bool fine;
};

__device__ __forceinline__ Spread spread(const Call& c, const Draft& d, int place, u64* scratch) {
  const Part* parts = c.row(blockIdx.x, place);
  u64 best = 0, total = 0;
  for (int i = threadIdx.x; i < c.stretches; i += THREADS) best = parts[i].best > best ? parts[i].best : best;
  best = block_most(best, scratch);
  const float most = value_of(best);
  if (best == WRONG || !(fabsf(most) < INFINITY)) return {most, 0, -1, false};
  for (int i = threadIdx.x; i < c.stretches; i += THREADS) {
    const double by = exp((double(value_of(parts[i].best)) - double(most)) * double(warmth_of(d)));
    total += u64(double(parts[i].mass) * by * double(1ull << 40));
  }
#ifdef BATON_MUTATION_CUDA_ACCEPT_TOTAL
  return {most, total, token_of(best), true};  // a thread's own part alone
#else
  return {most, block_total(total, scratch), token_of(best), true};
#endif
}

// Every thread comes to the same answer.
__device__ __forceinline__ bool stands(const Call& c, const Draft& d, int place, const Spread& s) {
  const int token = d.tokens[place];
  if (!s.fine || token < 0 || token >= c.vocab) return false;
  if (d.temperature <= 0) return token == s.best;
  const u64 mass = fixed(mass_of(d.target[place * d.target_stride + token], s.most, warmth_of(d)));
#ifdef BATON_MUTATION_CUDA_ACCEPT_RATIO
  const double q = 1;
#else
  const double q = d.proposed ? double(d.proposed[place * d.proposed_stride + token]) : 1;
#endif
  return d.accept[place] * q * double(s.total) < double(mass);
}

// From what is left of the target's mass above the draft's; from all of it behind the last draft, or where nothing is left.
__device__ __forceinline__ int behind(const Call& c, const Draft& d, int place, const Spread& s, u64* scratch, Drawn* found) {
  if (!s.fine) return -1;
  if (d.temperature <= 0) return s.best;
  const float *x = d.target + place * d.target_stride, warmth = warmth_of(d);
  const bool left = place < drafted(d);
  const float* q = left && d.proposed ? d.proposed + place * d.proposed_stride : nullptr;
  const int certain = left && !d.proposed ? d.tokens[place] : -1;
  const auto mass = [&](int64_t i) -> u64 {
    const u64 p = fixed(mass_of(x[i], s.most, warmth));
#ifndef BATON_MUTATION_CUDA_ACCEPT_RESIDUAL
    if (i == certain) return 0;
    if (q) {
      const double rest = double(p) - double(q[i]) * double(s.total);
      return rest > 0 ? u64(rest) : 0;
    }
#endif
    return p;
  };
  if (left) {
    const Drawn drawn = draw(c.vocab, d.draw[place], scratch, found, mass);
    if (mass(drawn.place)) return drawn.place;
  }
  __syncthreads();
  return draw(c.vocab, d.draw[place], scratch, found, [&](int64_t i) { return fixed(mass_of(x[i], s.most, warmth)); }).place;
}

__global__ void __launch_bounds__(THREADS) accept(const Call c) {
  BATON_STATIC_SHARED(u64, scratch, THREADS / 32);
  BATON_STATIC_SHARED(Drawn, found, 1);
  grid_wait();
  grid_launch_next();
  const Draft& d = c.drafts[blockIdx.x];
  const int count = drafted(d);
  const auto chosen = [&](int at) {
    return *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(d.chosen) + at * d.chosen_stride);
  };
  int place = 0, token = -1;
  if (d.chosen) {
    while (place < count && d.tokens[place] >= 0 && chosen(place) == d.tokens[place]) place++;
    token = chosen(place);
  } else {
    Spread s = spread(c, d, 0, scratch);
    while (place < count && stands(c, d, place, s)) s = spread(c, d, ++place, scratch);
    token = behind(c, d, place, s, scratch, found);
  }
  for (int i = threadIdx.x; i <= d.count; i += THREADS) d.emitted[i] = i < place ? d.tokens[i] : i == place ? token : -1;
  if (threadIdx.x == 0) c.drafts[blockIdx.x].accepted = place;
}

}  // namespace
}  // namespace baton

// drafts and what they point at lie in device memory.
BATON_API int baton_speculative_accept(baton::Draft* drafts, int32_t count, int64_t vocab, void* stream) {
  using namespace baton;
  if (!count) return 0;
  if (count > 65535 || vocab < 1 || vocab > int64_t(1) << 30) return int(cudaErrorInvalidValue);
  const int stretches = int((vocab + STRETCH - 1) / STRETCH);
  void* memory = workspace(WORKSPACE_ACCEPT, size_t(count) * ROWS * stretches * sizeof(Part), stream);
  if (!memory) return int(cudaErrorInvalidValue);
  const Call call{drafts, static_cast<Part*>(memory), vocab, stretches};
  const dim3 grid = dim3(unsigned(stretches), ROWS, unsigned(count));
  if (const int wrong = BATON_LAUNCH_PDL(measure, grid, dim3(THREADS), 0, stream, call)) return wrong;
  return BATON_LAUNCH_PDL(accept, dim3(unsigned(count)), dim3(THREADS), 0, stream, call);
}
