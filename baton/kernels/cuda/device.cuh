// The one header that a cuda.cu includes: CUDA under nvcc, the SIMT shim (simt/simt.h) under BATON_SIMT, and the few
// macros in which the two differ. Knows nothing of any op.
//
//   extern "C" symbols return 0 or a cudaError_t, and take the argument list of the op's cpu.cpp with a stream behind it.
//   BATON_LAUNCH(kernel, grid, block, shared_bytes, stream, args...)   int; a template kernel in parentheses: (k<4, 8>)
//   BATON_LAUNCH_PDL(…)               the same with programmatic stream serialization: the kernel must call grid_wait()
//   BATON_LAUNCH_RESIDENT(…)          the same with all blocks at once (a cooperative launch): refused where they don't fit
//   BATON_SHARED(type, name)          dynamic shared memory, 128-byte aligned, as a pointer
//   BATON_STATIC_SHARED(type, name, count)   static shared memory, 16-byte aligned
#pragma once

#define BATON_DEVICE 1  // the ops' headers then hold structs alone, without the CPU's prototypes and vectors

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define BATON_API extern "C" __attribute__((visibility("default")))

namespace baton {
inline bool programmatic_launches = true;  // false: BATON_LAUNCH_PDL launches plainly, for a measurement beside it
}

#ifdef BATON_SIMT
#include "simt/simt.h"

#define BATON_SHARED(type, name) type* const name = static_cast<type*>(baton::simt::dynamic_shared())
#define BATON_STATIC_SHARED(type, name, count)                                                                    \
  static const int name##_site = baton::simt::new_site();                                                         \
  type* const name =                                                                                              \
      static_cast<type*>(baton::simt::static_shared(name##_site, sizeof(type) * static_cast<size_t>(count)))
#define BATON_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  baton::launch_simt(#kernel, false, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)
#define BATON_LAUNCH_PDL BATON_LAUNCH
#define BATON_LAUNCH_RESIDENT(kernel, grid, block, shared_bytes, stream, ...) \
  baton::launch_simt(#kernel, true, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

namespace baton {

template <class... Expected, class... Actual>
int launch_simt(const char* name, bool resident, void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, void* stream,
                Actual... arguments) {
  const auto run = [=] {
    auto body = [&] { kernel(static_cast<Expected>(arguments)...); };
    return simt::launch(name, resident, grid, block, shared, [](void* f) { (*static_cast<decltype(body)*>(f))(); }, &body);
  };
  if (simt::recording) return simt::recording->push_back(run), 0;
  int status = 0;
  return simt::later(stream, run, status) ? status : run();
}

}  // namespace baton
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#define BATON_SHARED(type, name)                                         \
  extern __shared__ __align__(128) unsigned char baton_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(baton_dynamic_shared)
#define BATON_STATIC_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define BATON_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  baton::launch_cuda(cudaLaunchAttributeIgnore, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)
#define BATON_LAUNCH_PDL(kernel, grid, block, shared_bytes, stream, ...) \
  baton::launch_cuda(cudaLaunchAttributeProgrammaticStreamSerialization, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)
#define BATON_LAUNCH_RESIDENT(kernel, grid, block, shared_bytes, stream, ...) \
  baton::launch_cuda(cudaLaunchAttributeCooperative, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

namespace baton {

template <class... Expected, class... Actual>
int launch_cuda(cudaLaunchAttributeID how, void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, void* stream,
                Actual... arguments) {
  if (shared > 48 * 1024) {
    cudaError_t wrong = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (wrong != cudaSuccess) return int(wrong);
  }
  cudaLaunchAttribute attribute{};
  attribute.id = how;
  if (how == cudaLaunchAttributeCooperative)
    attribute.val.cooperative = 1;
  else
    attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute, config.numAttrs = how == cudaLaunchAttributeCooperative || (how != cudaLaunchAttributeIgnore && programmatic_launches) ? 1 : 0;
  return int(cudaLaunchKernelEx(&config, kernel, static_cast<Expected>(arguments)...));
}

}  // namespace baton
#endif

#include "asm.cuh"
#include "convert.cuh"
#include "reduce.cuh"
