// CUDA's execution model for g++: a fiber per thread of a block, barriers of block and warp, shuffles, atomics. Knows nothing
// of kernels. One OS thread runs everything; which fiber runs next is drawn from a seed at every barrier, so a barrier
// that is missing shows. Shared memory starts as NaN bytes (0xff). A barrier that not all reach ends the launch with
// an error that names it (baton_simt_error). The runtime is simt.cpp; race.cpp adds checks on every shared access.
#pragma once
#include <algorithm>
#include <cassert>
#include <climits>

#include "memory.h"
#include "types.h"

#define __global__ static
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#ifndef __restrict__
#define __restrict__ __restrict
#endif

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;
enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
using cudaStream_t = void*;
inline int cudaGetLastError() { return 0; }
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  const auto run = [=] {
    const baton::simt::Touchable now;
    std::memset(at, value, bytes);
    return 0;
  };
  if (baton::simt::recording) baton::simt::recording->push_back(run);
  else run();
  return cudaSuccess;
}

namespace baton::simt {

struct Site {  // where in the source a thread waits
  const char* file;
  int line;
};

int launch(const char* name, bool all_at_once, dim3 grid, dim3 block, size_t shared, void (*body)(void*), void* arguments);
void* dynamic_shared();
int new_site();
void* static_shared(int site, size_t bytes);
void sync_threads(Site site);
void named_barrier(int id, int threads, bool wait, Site site);
void yield();       // any other thread may run first
void maybe_yield();  // the same now and then: where threads touch the same memory
void fail(const char* format, ...);  // ends the launch with a message; does not return on a fiber

// Runs `meet` once all lanes of `mask` are here with the same function; it sees every lane's in and out.
struct Lanes {
  unsigned mask;
  const void* in[32];
  void* out[32];
};
using Meeting = void (*)(Lanes&);
void meet(unsigned mask, Meeting meeting, const void* in, void* out, Site site);
unsigned lane();

// cp.async: the copy happens when it is waited for, not before.
void copy_later(void* to, const void* from, int bytes, int filled);
void commit_copies();
void wait_copies(int pending);

template <class T>
struct Shuffle {
  T value;
  int from;
};

template <class T>
void shuffled(Lanes& lanes) {
  for (int i = 0; i < 32; i++) {
    if (!(lanes.mask >> i & 1)) continue;
    const auto* mine = static_cast<const Shuffle<T>*>(lanes.in[i]);
    const int from = mine->from;
    if (!(lanes.mask >> from & 1)) return fail("shuffle: lane %d reads lane %d, which is not in the mask %08x", i, from, lanes.mask);
    *static_cast<T*>(lanes.out[i]) = static_cast<const Shuffle<T>*>(lanes.in[from])->value;
  }
}

template <class T>
T shuffle(unsigned mask, T value, int from, Site site) {
  Shuffle<T> in{value, from};
  T out;
  meet(mask, shuffled<T>, &in, &out, site);
  return out;
}

template <class T>
T shuffle_index(unsigned mask, T value, int source, int width, Site site) {
  return shuffle(mask, value, int(lane() & ~unsigned(width - 1)) + (source & (width - 1)), site);
}
template <class T>
T shuffle_xor(unsigned mask, T value, int bits, int width, Site site) {
  const int me = int(lane()), to = me ^ bits;
  return shuffle(mask, value, to < (me & ~(width - 1)) + width ? to : me, site);
}
template <class T>
T shuffle_down(unsigned mask, T value, unsigned by, int width, Site site) {
  const int me = int(lane()), to = me + int(by);
  return shuffle(mask, value, to < (me & ~(width - 1)) + width ? to : me, site);
}
template <class T>
T shuffle_up(unsigned mask, T value, unsigned by, int width, Site site) {
  const int me = int(lane()), to = me - int(by);
  return shuffle(mask, value, to >= (me & ~(width - 1)) ? to : me, site);
}

// Every lane of the mask gets f over all lanes' values.
template <class T, class Combine>
T reduce(unsigned mask, T value, Site site, Combine) {
  T out;
  meet(mask, [](Lanes& lanes) {
    bool first = true;
    T all{};
    for (int i = 0; i < 32; i++)
      if (lanes.mask >> i & 1) {
        const T x = *static_cast<const T*>(lanes.in[i]);
        all = first ? x : Combine::of(all, x), first = false;
      }
    for (int i = 0; i < 32; i++)
      if (lanes.mask >> i & 1) *static_cast<T*>(lanes.out[i]) = all;
  }, &value, &out, site);
  return out;
}
struct Add { template <class T> static T of(T a, T b) { return a + b; } };
struct Most { template <class T> static T of(T a, T b) { return a > b ? a : b; } };
struct Least { template <class T> static T of(T a, T b) { return a < b ? a : b; } };
struct And { template <class T> static T of(T a, T b) { return a & b; } };
struct Or { template <class T> static T of(T a, T b) { return a | b; } };
struct Xor { template <class T> static T of(T a, T b) { return a ^ b; } };

inline unsigned ballot(unsigned mask, bool yes, Site site) { return reduce(mask, unsigned(yes) << lane(), site, Or()); }
inline void sync_warp(unsigned mask, Site site) { reduce(mask, 0u, site, Or()); }

template <class T>
unsigned match_any(unsigned mask, T value, Site site) {
  unsigned out;
  meet(mask, [](Lanes& lanes) {
    for (int i = 0; i < 32; i++) {
      if (!(lanes.mask >> i & 1)) continue;
      unsigned same = 0;
      for (int j = 0; j < 32; j++)
        if (lanes.mask >> j & 1) same |= unsigned(!std::memcmp(lanes.in[i], lanes.in[j], sizeof(T))) << j;
      *static_cast<unsigned*>(lanes.out[i]) = same;
    }
  }, &value, &out, site);
  return out;
}

// Threads are fibers of one OS thread: an operation without a switch in it is atomic.
void touch_atomic(void* at, size_t bytes);
template <class T, class F>
__attribute__((no_sanitize_thread, noinline)) T atomic(T* at, F f) {
  maybe_yield();
  touch_atomic(at, sizeof(T));
  const T old = *at;
  *at = f(old);
  return old;
}

}  // namespace baton::simt

#define BATON_SITE (baton::simt::Site{__FILE__, __LINE__})
#define __syncthreads() baton::simt::sync_threads(BATON_SITE)
#define BATON_FIRST(first, ...) first
#define __syncwarp(...) baton::simt::sync_warp(baton::simt::mask_or_all(__VA_ARGS__), BATON_SITE)
#define __shfl_sync(mask, value, ...) baton::simt::shfl_index(BATON_SITE, mask, value, __VA_ARGS__)
#define __shfl_xor_sync(mask, value, ...) baton::simt::shfl_xor(BATON_SITE, mask, value, __VA_ARGS__)
#define __shfl_down_sync(mask, value, ...) baton::simt::shfl_down(BATON_SITE, mask, value, __VA_ARGS__)
#define __shfl_up_sync(mask, value, ...) baton::simt::shfl_up(BATON_SITE, mask, value, __VA_ARGS__)
#define __ballot_sync(mask, yes) baton::simt::ballot(mask, (yes) != 0, BATON_SITE)
#define __any_sync(mask, yes) (baton::simt::ballot(mask, (yes) != 0, BATON_SITE) != 0)
#define __all_sync(mask, yes) (baton::simt::ballot(mask, (yes) == 0, BATON_SITE) == 0)
#define __match_any_sync(mask, value) baton::simt::match_any(mask, value, BATON_SITE)
#define __reduce_add_sync(mask, value) baton::simt::reduce(mask, value, BATON_SITE, baton::simt::Add())
#define __reduce_max_sync(mask, value) baton::simt::reduce(mask, value, BATON_SITE, baton::simt::Most())
#define __reduce_min_sync(mask, value) baton::simt::reduce(mask, value, BATON_SITE, baton::simt::Least())
#define __reduce_or_sync(mask, value) baton::simt::reduce(mask, value, BATON_SITE, baton::simt::Or())
#define __reduce_and_sync(mask, value) baton::simt::reduce(mask, value, BATON_SITE, baton::simt::And())
#define __reduce_xor_sync(mask, value) baton::simt::reduce(mask, value, BATON_SITE, baton::simt::Xor())
#define __syncthreads_or(yes) baton::simt::sync_threads_or((yes) != 0, BATON_SITE)
#define __syncthreads_and(yes) (!baton::simt::sync_threads_or((yes) == 0, BATON_SITE))

namespace baton::simt {

inline unsigned mask_or_all(unsigned mask = 0xffffffffu) { return mask; }
int sync_threads_or(bool yes, Site site);
template <class T>
T shfl_index(Site site, unsigned mask, T value, int source, int width = 32) { return shuffle_index(mask, value, source, width, site); }
template <class T>
T shfl_xor(Site site, unsigned mask, T value, int bits, int width = 32) { return shuffle_xor(mask, value, bits, width, site); }
template <class T>
T shfl_down(Site site, unsigned mask, T value, unsigned by, int width = 32) { return shuffle_down(mask, value, by, width, site); }
template <class T>
T shfl_up(Site site, unsigned mask, T value, unsigned by, int width = 32) { return shuffle_up(mask, value, by, width, site); }

template <class T>
struct Same { using type = T; };
template <class T>
using same = typename Same<T>::type;

}  // namespace baton::simt

template <class T>
T atomicAdd(T* at, baton::simt::same<T> x) { return baton::simt::atomic(at, [=](T old) { return T(old + x); }); }
template <class T>
T atomicSub(T* at, baton::simt::same<T> x) { return baton::simt::atomic(at, [=](T old) { return T(old - x); }); }
template <class T>
T atomicMax(T* at, baton::simt::same<T> x) { return baton::simt::atomic(at, [=](T old) { return old > x ? old : x; }); }
template <class T>
T atomicMin(T* at, baton::simt::same<T> x) { return baton::simt::atomic(at, [=](T old) { return old < x ? old : x; }); }
template <class T>
T atomicExch(T* at, baton::simt::same<T> x) { return baton::simt::atomic(at, [=](T) { return x; }); }
template <class T>
T atomicOr(T* at, baton::simt::same<T> x) { return baton::simt::atomic(at, [=](T old) { return T(old | x); }); }
template <class T>
T atomicAnd(T* at, baton::simt::same<T> x) { return baton::simt::atomic(at, [=](T old) { return T(old & x); }); }
template <class T>
T atomicCAS(T* at, baton::simt::same<T> want, baton::simt::same<T> to) { return baton::simt::atomic(at, [=](T old) { return old == want ? to : old; }); }
inline unsigned atomicInc(unsigned* at, unsigned top) { return baton::simt::atomic(at, [=](unsigned old) { return old >= top ? 0u : old + 1; }); }

inline void __threadfence() { baton::simt::maybe_yield(); }
inline void __threadfence_block() { baton::simt::maybe_yield(); }
inline void __threadfence_system() { baton::simt::maybe_yield(); }
inline void __nanosleep(unsigned) { baton::simt::yield(); }

#include "intrinsics.h"
