// Device memory that ops keep between calls, and how wide the device is. Knows nothing of what lies in it.
//
// workspace(slot, bytes, stream): at least so many bytes, all zero when new. A block that grew stays allocated, since a
// captured graph may point to it; memory can't grow while a stream is captured, so run a step once before its capture.
// Null: no memory. One stream at a time may use an op.
#pragma once

#include <cstdlib>
#include <mutex>

namespace baton {

enum WorkspaceSlot { WORKSPACE_ATTENTION, WORKSPACE_ROWS, WORKSPACE_HEAD, WORKSPACE_COUNTS, WORKSPACE_STEP, WORKSPACE_CASCADE, WORKSPACE_MOE, WORKSPACE_ACCEPT, WORKSPACE_MEGAKERNEL, WORKSPACE_SLOTS };

struct Workspace {
  std::mutex lock;
  void* memory[WORKSPACE_SLOTS] = {};
  size_t bytes[WORKSPACE_SLOTS] = {};
};

inline Workspace& workspaces() {
  static Workspace all;
  return all;
}

inline void* workspace(WorkspaceSlot slot, size_t bytes, void* stream) {
  Workspace& all = workspaces();
  std::lock_guard<std::mutex> held(all.lock);
  if (all.bytes[slot] >= bytes) return all.memory[slot];
  const size_t grown = bytes + bytes / 2;
#ifdef BATON_SIMT
  (void)stream;
  void* found = simt::recording ? nullptr : std::calloc(grown, 1);
#else
  void* found = nullptr;
  if (cudaMalloc(&found, grown) != cudaSuccess) return nullptr;
  if (cudaMemsetAsync(found, 0, grown, static_cast<cudaStream_t>(stream)) != cudaSuccess) return nullptr;
#endif
  if (found) all.memory[slot] = found, all.bytes[slot] = grown;
  return found;
}

// Multiprocessors of the current device; a few for the shim, so that blocks take more than one unit of work each.
inline int own_processors() {
#ifdef BATON_SIMT
  return 3;
#else
  static const int found = [] {
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 1;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    return count;
  }();
  return found;
#endif
}

// How many of them dispatch and grids are for: another number where a test says so (baton_device_processors), so that one device
// takes the kernels and the units per block of another.
inline int processors() {
  const int wanted = rehearsal().processors;
  return wanted > 0 ? wanted : own_processors();
}

// Of a grid whose blocks wait for one another: no more than are there.
inline int resident_processors() { return processors() < own_processors() ? processors() : own_processors(); }

}  // namespace baton
