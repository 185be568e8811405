// What the host asks of CUDA's runtime: memory, copies, streams, graphs. Under BATON_SIMT the same by the shim: memory of a
// "device" that the host can't touch, and a graph as the list of launches that were recorded. Knows nothing of kernels.
//
// Everything returns 0 or a cudaError_t. A graph's launches keep the arguments that they were captured with.
#pragma once
#include "device.cuh"

#ifdef BATON_SIMT
#include "simt/memory.h"
#endif

namespace baton {

#ifdef BATON_SIMT
using Graph = simt::Recording*;

inline int device_allocate(void** at, size_t bytes) { return simt::device_allocate(at, bytes); }
inline int device_release(void* at) { return simt::device_release(at); }
inline int pinned_allocate(void** at, size_t bytes) { return (*at = std::malloc(bytes ? bytes : 1)) ? 0 : 2; }
inline int pinned_release(void* at) { return std::free(at), 0; }
inline int host_register(void* at, size_t, void** seen) { return *seen = at, 0; }
inline int host_unregister(void*) { return 0; }
inline int pageable(int* yes) { return *yes = 1, 0; }
inline int stream_create(void** stream) { return *stream = std::malloc(1), 0; }
inline int stream_release(void* stream) { return std::free(stream), 0; }
inline int stream_wait(void*) { return simt::recording ? int(cudaErrorInvalidValue) : 0; }
using Event = simt::Mark;
inline int side_stream_create(void** stream) { return simt::side_create(stream); }
inline int side_stream_release(void* stream) { return simt::side_release(stream); }
inline int side_stream_wait(void* stream) { return simt::side_wait(stream); }
inline int event_create(Event*) { return 0; }
inline int event_release(Event) { return 0; }
inline int event_record(Event& event, void* stream) { return simt::mark(event, stream), 0; }
inline int stream_wait_event(void* stream, const Event& event) { return simt::wait_for(stream, event); }
inline int copy(void* to, const void* from, size_t bytes, void*) { return simt::device_copy(to, from, bytes); }
inline int capture_begin(void*) { return simt::record(); }
inline int capture_end(void*, int failed, Graph* graph) {
  Graph found = simt::recorded();
  if (failed) return delete found, failed;
  return (*graph = found) ? 0 : int(cudaErrorInvalidValue);
}
inline int graph_launch(Graph graph, void*) { return simt::replay(*graph); }
inline void graph_release(Graph graph) { delete graph; }
inline const char* error_text(int) { return simt::last_error(); }
#else
using Graph = cudaGraphExec_t;

inline int device_allocate(void** at, size_t bytes) { return int(cudaMalloc(at, bytes ? bytes : 1)); }
inline int device_release(void* at) { return int(cudaFree(at)); }
inline int pinned_allocate(void** at, size_t bytes) { return int(cudaHostAlloc(at, bytes ? bytes : 1, cudaHostAllocDefault)); }
inline int pinned_release(void* at) { return int(cudaFreeHost(at)); }
// Host memory that is there already: copied at full speed, and seen by kernels at `seen`.
inline int host_register(void* at, size_t bytes, void** seen) {
  const cudaError_t wrong = cudaHostRegister(at, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  return wrong != cudaSuccess ? int(wrong) : int(cudaHostGetDevicePointer(seen, at, 0));
}
inline int host_unregister(void* at) { return int(cudaHostUnregister(at)); }
// Whether kernels can read and write any memory of the host at its own address.
inline int pageable(int* yes) {
  int device = 0;
  const cudaError_t wrong = cudaGetDevice(&device);
  return wrong != cudaSuccess ? int(wrong) : int(cudaDeviceGetAttribute(yes, cudaDevAttrPageableMemoryAccess, device));
}
inline int stream_create(void** stream) {
  return int(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking));
}
inline int stream_release(void* stream) { return int(cudaStreamDestroy(static_cast<cudaStream_t>(stream))); }
inline int stream_wait(void* stream) { return int(cudaStreamSynchronize(static_cast<cudaStream_t>(stream))); }
// A stream beside the first one, which waits for events of it, and it for the other's.
using Event = cudaEvent_t;
inline int side_stream_create(void** stream) { return stream_create(stream); }
inline int side_stream_release(void* stream) { return stream_release(stream); }
inline int side_stream_wait(void* stream) { return stream_wait(stream); }
inline int event_create(Event* event) { return int(cudaEventCreateWithFlags(event, cudaEventDisableTiming)); }
inline int event_release(Event event) { return event ? int(cudaEventDestroy(event)) : 0; }
inline int event_record(Event event, void* stream) { return int(cudaEventRecord(event, static_cast<cudaStream_t>(stream))); }
inline int stream_wait_event(void* stream, Event event) {
  return int(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event, 0));
}
inline int copy(void* to, const void* from, size_t bytes, void* stream) {
  return int(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}
inline int capture_begin(void* stream) {
  return int(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeThreadLocal));
}
// Ends the capture. Where a launch in it `failed` that is returned, and there is no graph: it would be of those before.
inline int capture_end(void* stream, int failed, Graph* graph) {
  cudaGraph_t found = nullptr;
  cudaError_t wrong = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &found);
  if (wrong != cudaSuccess) return int(wrong);
  if (!failed) wrong = cudaGraphInstantiate(graph, found, 0);
  cudaGraphDestroy(found);
  return failed ? failed : int(wrong);
}
inline int graph_launch(Graph graph, void* stream) { return int(cudaGraphLaunch(graph, static_cast<cudaStream_t>(stream))); }
inline void graph_release(Graph graph) { cudaGraphExecDestroy(graph); }
inline const char* error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
#endif

// Device memory that grows; what lay in it is gone then, and addresses change.
struct Room {
  void* at = nullptr;
  size_t bytes = 0;

  ~Room() { device_release(at); }
  // `moved` becomes true where it does.
  int reach(size_t wanted, bool& moved) {
    if (wanted <= bytes) return 0;
    const size_t grown = wanted + wanted / 4;
    if (at) device_release(at);
    at = nullptr, bytes = 0, moved = true;
    const int wrong = device_allocate(&at, grown);
    if (!wrong) bytes = grown;
    return wrong;
  }
};

}  // namespace baton
