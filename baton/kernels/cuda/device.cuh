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
#include <mutex>
#include <set>
#include <string>
#include <type_traits>

#define BATON_API extern "C" __attribute__((visibility("default")))

namespace baton {
inline bool programmatic_launches = true;  // false: BATON_LAUNCH_PDL launches plainly, for a measurement beside it

// What tests set and read, in every library whatever its ops (library.py). How many multiprocessors dispatch and grids take the
// device to have, 0: as many as it has; and which kernels were launched, a line of the launching file and the kernel each.
struct Rehearsal {
  std::mutex lock;
  int processors = 0;
  bool noting = false;
  std::set<std::string> kernels;
};

inline Rehearsal& rehearsal() {
  static Rehearsal only;
  return only;
}

template <auto Kernel>
const char* kernel_name() {
  return __PRETTY_FUNCTION__;
}

inline void note_launch(const char* file, const char* kernel) {
#ifndef BATON_PLANTED  // a planted bug's launches show nothing of the kernel as it is
  Rehearsal& of = rehearsal();
  if (!of.noting) return;
  std::lock_guard<std::mutex> held(of.lock);
  of.kernels.insert(std::string(file) + '\t' + kernel);
#else
  (void)file, (void)kernel;
#endif
}
}  // namespace baton

#define BATON_REHEARSAL extern "C" inline __attribute__((visibility("default"), used))

BATON_REHEARSAL int baton_device_processors(int32_t count) { return baton::rehearsal().processors = count, 0; }
// From here on, or no longer; what was noted before is forgotten.
BATON_REHEARSAL int baton_device_note(int32_t on) {
  baton::Rehearsal& of = baton::rehearsal();
  std::lock_guard<std::mutex> held(of.lock);
  return of.kernels.clear(), of.noting = on != 0, 0;
}
// The lines noted so far, as much of them as `room` holds, a zero behind; *bytes: what all of them take.
BATON_REHEARSAL int baton_device_noted(char* text, int64_t room, int64_t* bytes) {
  baton::Rehearsal& of = baton::rehearsal();
  std::lock_guard<std::mutex> held(of.lock);
  std::string all;
  for (const std::string& each : of.kernels) all += each + '\n';
  *bytes = int64_t(all.size()) + 1;
  if (room > 0) text[all.copy(text, size_t(room - 1))] = 0;
  return 0;
}

#define BATON_NOTE(kernel) baton::note_launch(__FILE__, baton::kernel_name<(kernel)>())

#ifdef BATON_SIMT
#include "simt/simt.h"

#define BATON_SHARED(type, name) type* const name = static_cast<type*>(baton::simt::dynamic_shared())
#define BATON_STATIC_SHARED(type, name, count)                                                                    \
  static const int name##_site = baton::simt::new_site();                                                         \
  type* const name =                                                                                              \
      static_cast<type*>(baton::simt::static_shared(name##_site, sizeof(type) * static_cast<size_t>(count)))
#define BATON_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (BATON_NOTE(kernel), baton::launch_simt(#kernel, false, kernel, grid, block, shared_bytes, stream, __VA_ARGS__))
#define BATON_LAUNCH_PDL BATON_LAUNCH
#define BATON_LAUNCH_RESIDENT(kernel, grid, block, shared_bytes, stream, ...) \
  (BATON_NOTE(kernel), baton::launch_simt(#kernel, true, kernel, grid, block, shared_bytes, stream, __VA_ARGS__))

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
  (BATON_NOTE(kernel), baton::launch_cuda(cudaLaunchAttributeIgnore, kernel, grid, block, shared_bytes, stream, __VA_ARGS__))
#define BATON_LAUNCH_PDL(kernel, grid, block, shared_bytes, stream, ...) \
  (BATON_NOTE(kernel), baton::launch_cuda(cudaLaunchAttributeProgrammaticStreamSerialization, kernel, grid, block, shared_bytes, stream, __VA_ARGS__))
#define BATON_LAUNCH_RESIDENT(kernel, grid, block, shared_bytes, stream, ...) \
  (BATON_NOTE(kernel), baton::launch_cuda(cudaLaunchAttributeCooperative, kernel, grid, block, shared_bytes, stream, __VA_ARGS__))

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
