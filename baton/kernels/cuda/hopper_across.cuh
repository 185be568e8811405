// What hopper.cuh's products are to attention: wgmma whose b has its columns innermost, waits for the older of two products, and cp.async
// that completes on an mbarrier. Under BATON_SIMT their host twins (simt/across_twins.h). Knows nothing of tiles or ops.
#pragma once
#include "hopper.cuh"

#ifdef BATON_SIMT
#include "simt/across_twins.h"
#else

namespace baton {

// Arrives once all that this thread has asked for by cp.async is there; it is one of the arrivals that the barrier expects. wgmma
// reads what came so behind async_proxy_fence, called by who has waited.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Until the newest committed group alone is under way.
__device__ __forceinline__ void wgmma_wait_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// What x is made of is computed in front of a wgmma_wait behind this, which ptxas would hoist above it. x isn't below zero.
__device__ __forceinline__ void stays_in_front(float x) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p nanosleep.u32 20;\n}" ::"f"(x) : "memory");
}

#define BATON_EIGHT(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define BATON_THIRTY_TWO(d, i) BATON_EIGHT(d, i), BATON_EIGHT(d, i + 8), BATON_EIGHT(d, i + 16), BATON_EIGHT(d, i + 24)

// b: 16 rows of K by 128 (64) columns, columns innermost.
__device__ __forceinline__ void wgmma_bf16_across(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool more) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, "
      "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, "
      "%68, p, 1, 1, 1;\n}"
      : BATON_THIRTY_TWO(d, 0), BATON_THIRTY_TWO(d, 32)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(more)));
}
__device__ __forceinline__ void wgmma_bf16_across(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool more) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : BATON_THIRTY_TWO(d, 0)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(more)));
}

#undef BATON_THIRTY_TWO
#undef BATON_EIGHT

}  // namespace baton
#endif

namespace baton {

// The descriptor of a matrix with its columns innermost under the 128-byte swizzle: a row of K is 64 columns of 16 bits, the next 64
// lie `leading` bytes away; eight rows of K follow each other, then the next eight `stride` bytes from the first. `at` is a
// multiple of 1024.
__device__ __forceinline__ uint64_t swizzled_columns(uint32_t at, uint32_t leading, uint32_t stride) {
  return uint64_t((at & 0x3ffff) >> 4) | uint64_t((leading & 0x3ffff) >> 4) << 16 | uint64_t((stride & 0x3ffff) >> 4) << 32 | uint64_t(1) << 62;
}

}  // namespace baton
