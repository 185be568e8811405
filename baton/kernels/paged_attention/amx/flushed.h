// Float sums as AMX tiles take them: subnormal numbers count as zeros, and come out as zeros (Software Developer's Manual, volume 2:
// TDPBF16PS). Knows nothing of ops.
#pragma once
#include "../../abi/common.h"

#if BATON_AVX2
namespace baton {

// While this lives, the calling thread's vector arithmetic flushes. What it is to flush is loaded, computed and stored meanwhile:
// compilers keep memory's order around the switch, not that of arithmetic.
class Flushed {
 public:
  Flushed() : before_(_mm_getcsr()) {
#ifndef BATON_MUTATION_AMX_FLUSH
    set(0x1f80 | 0x8040);  // no exceptions, to the nearest; FTZ and DAZ
#endif
  }
  ~Flushed() { set(before_); }
  Flushed(const Flushed&) = delete;

 private:
  static BATON_INLINE void set(unsigned control) {
    asm volatile("" ::: "memory");
    _mm_setcsr(control);
    asm volatile("" ::: "memory");
  }
  unsigned before_;
};

}  // namespace baton
#endif
