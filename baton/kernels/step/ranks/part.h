// Some items of a step, or some rows, as a step of their own: their rows lie side by side. Knows nothing of who computes them, or why.
#pragma once
#include <algorithm>
#include <vector>

#include "../step.h"

namespace baton {

// The items that one rank computes, or one part of a step that goes from stage to stage.
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

// The numbers of the rows that are read, each once, in order.
inline std::vector<int32_t> read_rows(const int32_t* sampled, int32_t count) {
  std::vector<int32_t> found(sampled, sampled + count);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

inline int32_t place_among(const std::vector<int32_t>& rows, int64_t row) {
  return int32_t(std::lower_bound(rows.begin(), rows.end(), row) - rows.begin());
}

// The rows whose results are read, for the last ops of a step.
struct LastRows {
  std::vector<int32_t> rows, tokens, sampled;  // `rows` are numbers in the whole step
  std::vector<AttentionItem> items;

  explicit LastRows(const Step& whole) : rows(read_rows(whole.sampled, whole.sampled_count)) {
    for (const int32_t row : rows) tokens.push_back(whole.tokens[row]);
    for (int32_t i = 0; i < whole.sampled_count; i++) sampled.push_back(place_among(rows, whole.sampled[i]));
    for (int32_t i = 0; i < whole.item_count; i++) add(whole.items[i]);
  }

  // It lives as long as this does.
  Step step(const Step& whole, float* arena) const {
    Step s = whole;
    s.tokens = tokens.data(), s.items = items.data(), s.sampled = sampled.data(), s.arena = arena;
    s.rows = int64_t(rows.size()), s.item_count = int32_t(items.size());
    return s;
  }

 private:
  // The parts of an item that are read, each of neighbouring rows.
  void add(const AttentionItem& item) {
    const int64_t behind = item.first + item.queries;
    size_t at = size_t(place_among(rows, item.first));
    while (at < rows.size() && rows[at] < behind) {
      size_t end = at + 1;
      while (end < rows.size() && rows[end] < behind && rows[end] == rows[at] + int32_t(end - at)) end++;
      AttentionItem part = item;
      part.first = int64_t(at), part.queries = int32_t(end - at), part.start = item.start + rows[at] - int32_t(item.first);
      items.push_back(part);
      at = end;
    }
  }
};

}  // namespace baton
