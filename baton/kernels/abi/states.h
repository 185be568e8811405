// Where sequences' recurrent states lie while a step runs. Knows nothing of what is in them.
#pragma once
#include <cstdint>
#include <cstring>

namespace baton {

struct SequenceStates {
  char* at;       // one after the other, in the order of the step's items
  int64_t bytes;  // of each
  char* to;       // where the states behind the step go, laid out as `at`; null: in place

  float* before(int64_t item, int64_t place) const { return (float*)(at + item * bytes + place); }
  float* after(int64_t item, int64_t place) const { return (float*)((to ? to : at) + item * bytes + place); }
  // Copies `size` bytes of an item's state to where they are changed in place.
  float* moved(int64_t item, int64_t place, int64_t size) const {
    if (to) std::memcpy(after(item, place), before(item, place), size_t(size));
    return after(item, place);
  }
};

// Where a rank's own channels of a convolution lie among all of a state: three stretches, of which the first two have `counts`
// channels, and what is added to a channel's number in each.
struct ChannelPlaces {
  int64_t counts[2], shifts[3];

  int64_t operator()(int64_t channel) const {
    return channel + shifts[channel < counts[0] ? 0 : channel < counts[0] + counts[1] ? 1 : 2];
  }
};

}  // namespace baton
