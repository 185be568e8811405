// Sequences of a step that begin with the same pages, for cascade attention. Host code; knows nothing of the device or of layers.
#pragma once
#include <vector>

#include "../cascade_attention/cascade.h"
#include "step.h"

namespace baton {

constexpr int32_t MOST_SHARING = 1024, MOST_PREFIXES = 256;  // cascade_attention/cuda.cu: items and rows; groups

// Keys in whole pages that both block tables begin with, `most` at most.
inline int32_t keys_in_common(const AttentionItem& a, const AttentionItem& b, int32_t most) {
  int32_t keys = 0;
  while (keys < most && a.pages[keys / PAGE] == b.pages[keys / PAGE]) keys += PAGE;
#if defined(BATON_MUTATION_CUDA_STEP_GROUPS)
  if (keys + PAGE <= most) keys += PAGE;
#endif
  return keys;
}

// Runs of neighbours that have `least` keys in common, all of which each one's first query sees.
inline void find_groups(const AttentionItem* items, int32_t count, int32_t least, std::vector<PrefixGroup>& found) {
  const auto whole = [](const AttentionItem& item) { return (item.start + 1) / PAGE * PAGE; };
  found.clear();
  for (int32_t first = 0, next; first < count; first = next) {
    int32_t keys = whole(items[first]);
    for (next = first + 1; next < count; next++) {
      const int32_t both = keys_in_common(items[first], items[next], keys < whole(items[next]) ? keys : whole(items[next]));
      if (both < least) break;
      keys = both;
    }
    if (next - first > 1 && int32_t(found.size()) < MOST_PREFIXES) found.push_back({first, next - first, keys});
  }
}

// One that holds nobody: it fills a table up to a graph's size. Items lie one behind the other, and there are two or more.
constexpr PrefixGroup NOBODY = {1, 0, 0};

}  // namespace baton
