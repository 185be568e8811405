// Some items of a step as a step of their own: their rows lie side by side. Knows nothing of who computes them, or why.
#pragma once
#include <vector>

#include "step.h"

namespace baton {

struct Part {
  std::vector<int32_t> tokens, rows;     // `rows` are their numbers in the whole step
  std::vector<int32_t> sampled, wanted;  // own row numbers, and their places among all sampled rows
  std::vector<AttentionItem> items;
  std::vector<int32_t> adapters;         // of the items; empty where no item of the step has one

  // The items whose owner is `which`; `of` are all items' adapters, or null.
  Part(const Step& whole, const int32_t* owners, const int32_t* of, int32_t which) {
    std::vector<int32_t> own(size_t(whole.rows), -1);
    for (int32_t i = 0; i < whole.item_count; i++) {
      if (owners[i] != which) continue;
      add(whole, whole.items[i], own);
      if (of) adapters.push_back(of[i]);
    }
    for (int32_t i = 0; i < whole.sampled_count; i++)
      if (const int32_t row = own[size_t(whole.sampled[i])]; row >= 0) sampled.push_back(row), wanted.push_back(i);
  }

  // It lives as long as this does.
  Step step(const Step& whole) const {
    Step s = whole;
    s.tokens = tokens.data(), s.items = items.data(), s.sampled = sampled.data(), s.choices = nullptr;
    s.rows = int64_t(rows.size()), s.item_count = int32_t(items.size()), s.sampled_count = int32_t(sampled.size());
    return s;
  }

 private:
  void add(const Step& whole, AttentionItem item, std::vector<int32_t>& own) {
    const int64_t first = item.first;
    item.first = int64_t(rows.size());
    for (int64_t row = first; row < first + item.queries; row++) {
      own[size_t(row)] = int32_t(rows.size());
      rows.push_back(int32_t(row)), tokens.push_back(whole.tokens[row]);
    }
    items.push_back(item);
  }
};

}  // namespace baton
