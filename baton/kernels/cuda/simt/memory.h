// The shim's device memory and captured graphs. Knows nothing of kernels. Device memory starts as 0xff bytes (NaN) and can be
// touched by launches and by device_copy alone: whoever looks at it on the host faults. A recording is a list of
// launches with the arguments that they had; while it is on, nothing runs.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace baton::simt {

using Recording = std::vector<std::function<int()>>;
extern Recording* recording;  // of the capture that is on, or null

int record();
Recording* recorded();  // the end of the capture
int replay(const Recording& graph);

// A second stream. What is launched on it runs as late as it may: when a stream that others see waits for it. It must have waited
// for the launch right in front of its own, as nothing else orders them. Other streams run what they are given at once.
struct Mark {  // an event
  void* stream = nullptr;
  uint64_t launches = 0;
};
int side_create(void** stream);
int side_release(void* stream);
int side_wait(void* stream);
bool later(void* stream, const std::function<int()>& run, int& status);  // whether it is such a stream's
void mark(Mark& event, void* stream);
int wait_for(void* stream, const Mark& event);

int device_allocate(void** at, size_t bytes);  // not while a capture is on
int device_release(void* at);
int device_copy(void* to, const void* from, size_t bytes);
const char* last_error();

// While one lives, device memory can be touched.
class Touchable {
 public:
  Touchable();
  ~Touchable();
};

}  // namespace baton::simt
