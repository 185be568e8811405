// One step's plan as one run of bytes: written into pinned memory, copied to the device in one go. Knows nothing of ops.
//
//   tokens | items | sampled rows | slots | choices | groups | adapters' groups | their rows | those of the head | their rows
//                                                       at places that depend on the batch's padded sizes alone
//   block tables, histories, biases, masks, bans        behind them, found through items and choices
//
// Slots: page * 16 + token of each row, -1 of padding. Addresses in items and choices are the device's.
#pragma once
#include <tuple>

#include "../cuda/runtime.cuh"
#include "../lora/lora.h"
#include "groups.cuh"

namespace baton {

// Padded sizes; a step of these is one captured graph.
struct Sizes {
  int32_t rows = 0, items = 0, sampled = 0, groups = 0, adapters = 0, heads = 0;

  bool operator<(const Sizes& o) const {
    return std::tie(rows, items, sampled, groups, adapters, heads) <
           std::tie(o.rows, o.items, o.sampled, o.groups, o.adapters, o.heads);
  }
};

// The next size that has a graph: 0, 1, 2, 4, 8, then eighths up to 64, then by sixteen, by thirty-two.
inline int32_t bucket(int32_t n) {
  if (n <= 2) return n;
  if (n <= 8) return n <= 4 ? 4 : 8;
  const int32_t step = n <= 64 ? 8 : n <= 128 ? 16 : 32;
  return (n + step - 1) / step * step;
}

class Staging {
 public:
  ~Staging() { pinned_release(bytes_); }

  // `host` with addresses of the host -> the device's step, its plan on the way. `moved`: the plan's place is a new one.
  // `adapters`: which rows have which, their sites on the device already; null where nobody has one. `heads`: the same of
  // sampled rows and adapters beside the head.
  int upload(const Step& host, const LoraStep* adapters, const LoraStep* heads, Sizes sizes, int64_t vocab, float* logits, void* stream,
             Step& device, bool& moved) {
    if (const int wrong = reach(size_of(host, sizes, vocab), moved)) return wrong;
    base_ = static_cast<char*>(plan_.at), end_ = 0;
    device.tokens = put(host.tokens, host.rows, sizes.rows, 0);
    AttentionItem* items = room<AttentionItem>(sizes.items, device.items);
    device.sampled = put(host.sampled, host.sampled_count, sizes.sampled, 0);
    int32_t* slots = room<int32_t>(sizes.rows, slots_);
    Choice* choices = room<Choice>(sizes.sampled, device.choices);
    PrefixGroup* groups = room<PrefixGroup>(sizes.groups, device.groups);
    for (int32_t i = 0; i < sizes.groups; i++) groups[i] = i < host.group_count ? host.groups[i] : NOBODY;
    adapt(adapters, sizes.adapters, sizes.rows, adapters_);
    adapt(heads, sizes.heads, sizes.sampled, heads_);
    place(host, sizes, items, slots);
    choose(host, sizes, vocab, logits, choices);
    device.rows = sizes.rows, device.item_count = sizes.items, device.sampled_count = sizes.sampled;
    device.group_count = sizes.groups;
    return copy(plan_.at, bytes_, end_, stream);
  }

  const int32_t* slots() const { return slots_; }
  const LoraGroup* adapters() const { return adapters_; }
  const LoraGroup* heads() const { return heads_; }

 private:
  static size_t up(size_t bytes) { return (bytes + 15) / 16 * 16; }
  static int64_t blocks(const AttentionItem& item) { return (int64_t(item.start) + item.queries + PAGE - 1) / PAGE; }

  static size_t size_of(const Step& host, Sizes s, int64_t vocab) {
    size_t all = 2 * up(size_t(s.rows) * 4) + up(s.items * sizeof(AttentionItem)) + up(size_t(s.sampled) * 4) + up(s.sampled * sizeof(Choice)) +
                 up(size_t(s.groups) * sizeof(PrefixGroup)) + up(size_t(s.adapters) * sizeof(LoraGroup)) + up(size_t(s.adapters ? s.rows : 0) * 4) +
                 up(size_t(s.heads) * sizeof(LoraGroup)) + up(size_t(s.heads ? s.sampled : 0) * 4);
    for (int32_t i = 0; i < host.item_count; i++) all += up(size_t(blocks(host.items[i])) * 4);
    for (int32_t i = 0; i < host.sampled_count; i++) {
      const Choice& c = host.choices[i];
      all += up(size_t(c.history_count) * 4) + 2 * up(size_t(c.bias_count) * 4) + up(c.allowed ? size_t(vocab) : 0) + up(size_t(c.banned_count) * 4);
    }
    return all;
  }

  int reach(size_t wanted, bool& moved) {
    if (wanted > capacity_) {
      pinned_release(bytes_);
      void* found = nullptr;
      capacity_ = 0;
      if (const int wrong = pinned_allocate(&found, wanted + wanted / 2)) return bytes_ = nullptr, wrong;
      bytes_ = static_cast<char*>(found), capacity_ = wanted + wanted / 2;
    }
    return plan_.reach(wanted, moved);
  }

  // `count` of T; where they lie on the device is `there`.
  template <class T, class U>
  T* room(int64_t count, U*& there) {
    T* here = reinterpret_cast<T*>(bytes_ + end_);
    there = reinterpret_cast<T*>(base_ + end_);
    end_ += up(size_t(count) * sizeof(T));
    return here;
  }

  template <class T>
  const T* put(const T* from, int64_t count, int64_t padded, T empty) {
    if (!padded) return nullptr;
    const T* there;
    T* here = room<T>(padded, there);
    if (count) std::memcpy(here, from, size_t(count) * sizeof(T));
    for (int64_t i = count; i < padded; i++) here[i] = empty;
    return there;
  }

  // Groups that fill the table up to a graph's size have no rows; `most` is the rows of all together.
  void adapt(const LoraStep* adapters, int32_t count, int32_t most, const LoraGroup*& found) {
    LoraGroup* groups = room<LoraGroup>(count, found);
    const int32_t* there;
    int32_t* rows = room<int32_t>(count ? most : 0, there);
    for (int32_t i = 0; i < count; i++) {
      if (i >= adapters->count) {
        groups[i] = {nullptr, nullptr, 0};
        continue;
      }
      const LoraGroup& one = adapters->groups[i];
      std::memcpy(rows, one.rows, size_t(one.count) * 4);
      groups[i] = {one.sites, there, one.count};
#if !defined(BATON_MUTATION_CUDA_STEP_ADAPTERS)
      rows += one.count, there += one.count;
#endif
    }
  }

  void place(const Step& host, Sizes sizes, AttentionItem* items, int32_t* slots) {
    for (int32_t i = 0; i < sizes.rows; i++) slots[i] = -1;
    for (int32_t i = 0; i < host.item_count; i++) {
      const AttentionItem& item = host.items[i];
      items[i] = item;
      items[i].pages = put(item.pages, blocks(item), blocks(item), 0);
      for (int32_t q = 0; q < item.queries; q++)
        slots[item.first + q] = item.pages[(item.start + q) / PAGE] * PAGE + (item.start + q) % PAGE;
    }
    for (int32_t i = host.item_count; i < sizes.items; i++) items[i] = {host.rows, items[0].pages, 0, 0};
  }

  void choose(const Step& host, Sizes sizes, int64_t vocab, float* logits, Choice* choices) {
    int64_t loud = 0;
    for (int32_t i = 0; i < host.sampled_count; i++) {
      Choice c = host.choices[i];
      c.logits = c.logits ? logits + vocab * loud++ : nullptr;
      c.history = put(c.history, c.history_count, c.history_count, 0);
      c.bias_ids = put(c.bias_ids, c.bias_count, c.bias_count, 0);
      c.bias = put(c.bias, c.bias_count, c.bias_count, 0.0f);
      c.allowed = c.allowed ? put(c.allowed, vocab, vocab, uint8_t(0)) : nullptr;
      c.banned = put(c.banned, c.banned_count, c.banned_count, 0);
      choices[i] = c;
    }
    for (int32_t i = host.sampled_count; i < sizes.sampled; i++) {
      choices[i] = Choice();
      choices[i].repetition = choices[i].top_p = 1.0f;
    }
  }

  Room plan_;
  char *bytes_ = nullptr, *base_ = nullptr;
  size_t capacity_ = 0, end_ = 0;
  const int32_t* slots_ = nullptr;
  const LoraGroup *adapters_ = nullptr, *heads_ = nullptr;
};

}  // namespace baton
