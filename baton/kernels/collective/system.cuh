// Words that launches of several processes and cards tell one another by, and how long one waits. Knows nothing of what they mean.
// What was written before a release is seen behind the acquire, whoever's memory it lies in.
#pragma once
#include <cstdint>

#ifdef BATON_SIMT
#include <sched.h>
#include <time.h>
#include <unistd.h>

namespace baton {

constexpr unsigned YIELDS = 200;  // polls that offer the core; behind them one sleeps

// Race checks are of a block's shared memory, and have no answer for atomics.
#define BATON_UNCHECKED inline __attribute__((noinline, no_sanitize_thread))

BATON_UNCHECKED uint64_t load_acquire_system(const uint64_t* p) {
  simt::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
BATON_UNCHECKED void store_release_system(uint64_t* p, uint64_t v) {
  simt::maybe_yield();
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline uint64_t card_ns() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return uint64_t(at.tv_sec) * 1000000000 + uint64_t(at.tv_nsec);
}
// Another process's launch may need the core on which this one polls.
inline void rest_between_polls(unsigned poll) { poll < YIELDS ? void(sched_yield()) : void(usleep(50)); }

}  // namespace baton
#else

namespace baton {

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_system(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64_t card_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
__device__ __forceinline__ void rest_between_polls(unsigned) {}

}  // namespace baton
#endif
