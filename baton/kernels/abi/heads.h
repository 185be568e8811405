// Which of a page's KV heads a caller has: pages hold all heads of a model, ranks read and write their own among them.
// Knows nothing of ranks.
#pragma once
#include <cstdint>

namespace baton {

struct Heads {
  int32_t first, count;
};

}  // namespace baton
