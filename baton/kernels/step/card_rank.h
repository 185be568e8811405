// A session as one of several ranks that share a model by columns, each on a card of its own. Knows nothing of who the others are.
//
// The program is the rank's: its matrices have the rank's rows, its registers the rank's columns alone, and OP_MEETING puts the
// columns of all ranks into a register of their own. The device's pages have the rank's KV heads alone, the host's have all.
#pragma once
#include "../collective/exchange.h"

namespace baton {

// ranks.h: OP_GATHER. `in` of every rank to `out`; the own part are `layer` columns from `delta` on, or where `window` is 1 the rows
// whose tokens are the rank's.
constexpr int32_t OP_MEETING = 128;

struct CardRank {
  Exchange exchange;
  int32_t kv_heads, first_kv;   // of the host's pages; the model has the rank's own
  int32_t layers, kv_type;      // of the pages
  int32_t first_token, tokens;  // of the vocabulary
};

}  // namespace baton
