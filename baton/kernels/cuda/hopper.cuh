// Hopper's own instructions, one inline each: barriers in shared memory (mbarrier), bulk copies that complete on one, and wgmma with
// weights from registers. Under BATON_SIMT their host twins (simt/hopper_twins.h). Knows nothing of tiles or ops.
//
// wgmma, 64 x 128 x 32 bytes of K: d += a b. a: a warp's 16 rows as mma.m16n8 has them, from registers. b: 128 rows by 32 bytes of
// K in shared memory, found through a descriptor. d[4 j + 2 h + e] of a lane (g, t) is row g + 8 h by column 8 j + 2 t + e.
// d and a belong to the tensor cores from the call until wgmma_wait.
#pragma once

#ifdef BATON_SIMT
#include "simt/hopper_twins.h"
#else

namespace baton {

// A barrier's phase ends once `arrivals` have come and all bytes that they expect are there.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Behind the last mbarrier_init, in front of the block's barrier.
__device__ __forceinline__ void mbarrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and the phase ends no earlier than `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Until the phase of this parity (0 of the first, 1 of the second, 0 …) has ended.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!ended);
}

// cp.async.bulk: addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_prefetch_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// setmaxnreg: what a warp group has too many of, another takes. All of its threads call it.
template <int registers>
__device__ __forceinline__ void give_registers_up() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Keeps the compiler from moving what reads or writes these registers across.
template <int count>
__device__ __forceinline__ void wgmma_hold(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int count>
__device__ __forceinline__ void wgmma_hold(int (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++) asm volatile("" : "+r"(d[i])::"memory");
}

#define BATON_EIGHT(kind, d, i) \
  kind(d[i]), kind(d[i + 1]), kind(d[i + 2]), kind(d[i + 3]), kind(d[i + 4]), kind(d[i + 5]), kind(d[i + 6]), kind(d[i + 7])
#define BATON_SIXTY_FOUR(kind, d)                                                                                             \
  BATON_EIGHT(kind, d, 0), BATON_EIGHT(kind, d, 8), BATON_EIGHT(kind, d, 16), BATON_EIGHT(kind, d, 24), BATON_EIGHT(kind, d, 32), \
      BATON_EIGHT(kind, d, 40), BATON_EIGHT(kind, d, 48), BATON_EIGHT(kind, d, 56)
#define BATON_WGMMA(shape, kind, scales)                                                                                      \
  asm volatile(                                                                                                               \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                                            \
      "wgmma.mma_async.sync.aligned." shape                                                                                   \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
      "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "   \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, p" scales  \
      ";\n}"                                                                                                                  \
      : BATON_SIXTY_FOUR(kind, d)                                                                                             \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(more)))

// `more` false: d = a b.
__device__ __forceinline__ void wgmma_bf16(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool more) {
  BATON_WGMMA("m64n128k16.f32.bf16.bf16", "+f", ", 1, 1, 0");
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool more) {
  BATON_WGMMA("m64n128k32.f32.e4m3.e4m3", "+f", ", 1, 1");
}
__device__ __forceinline__ void wgmma_s8(int (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool more) {
  BATON_WGMMA("m64n128k32.s32.s8.s8", "+r", "");
}

#undef BATON_WGMMA
#undef BATON_SIXTY_FOUR
#undef BATON_EIGHT

}  // namespace baton
#endif

namespace baton {

// The descriptor of a matrix with K innermost under the 128-byte swizzle: a row is 128 bytes, whose eight chunks of 16 have changed
// places (chunk c of row r lies at c ^ r % 8); eight rows follow each other, then the next eight `stride` bytes from the
// first. `at` is a multiple of 1024 plus 32 bytes per step along K.
__device__ __forceinline__ uint64_t swizzled_matrix(uint32_t at, uint32_t stride) {
  return uint64_t((at & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t((stride & 0x3ffff) >> 4) << 32 | uint64_t(1) << 62;
}

}  // namespace baton
