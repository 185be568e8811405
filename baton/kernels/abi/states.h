// Where sequences' recurrent states lie while a step runs. Knows nothing of what is in them.
#pragma once
#include <cstdint>

namespace baton {

struct SequenceStates {
  char* at;       // one after the other, in the order of the step's items
  int64_t bytes;  // of each
};

}  // namespace baton
