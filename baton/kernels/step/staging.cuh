// One step's plan as one run of bytes: written into pinned memory, copied to the device in one go. Knows nothing of ops.
//
//   tokens | items | sampled rows | slots | copies | choices | groups | adapters' groups | their rows | those of the head | their rows
//                                                       at places that depend on the batch's padded sizes alone
//   items without the long ones' queries                where prompt attention takes these: in no graph
//   block tables, histories, biases, masks, bans        behind them, found through items and choices
//   whose token rows take (feed.cuh)                    behind these: no graph reads it
//
// Slots: page * 16 + token of each row, behind them of what each copy writes; -1 of padding. Addresses in items and choices are the
// device's.
#pragma once
#include <tuple>
#include <vector>

#include "../cuda/runtime.cuh"
#include "../lora/lora.h"
#include "../prompt_attention/prompt.h"
#include "../rope_append/branches.cuh"
#include "groups.cuh"

namespace baton {

// Padded sizes; a step of these is one captured graph.
struct Sizes {
  int32_t rows = 0, items = 0, sampled = 0, groups = 0, adapters = 0, heads = 0, copies = 0;
  bool divided = false;  // whether long items are attended to apart

  bool operator<(const Sizes& o) const {
    return std::tie(rows, items, sampled, groups, adapters, heads, copies) <
           std::tie(o.rows, o.items, o.sampled, o.groups, o.adapters, o.heads, o.copies);
  }
};

// The next size that has a graph: 0, 1, 2, 4, 8, then eighths up to 64, then by sixteen, by thirty-two.
inline int32_t bucket(int32_t n) {
  if (n <= 2) return n;
  if (n <= 8) return n <= 4 ? 4 : 8;
  const int32_t step = n <= 64 ? 8 : n <= 128 ? 16 : 32;
  return (n + step - 1) / step * step;
}

// Copies with which branches begin go by powers of two from a page on: their number is another in each step.
inline int32_t copies_bucket(int32_t n) {
  int32_t found = n ? PAGE : 0;
  while (found < n) found *= 2;
  return found;
}

// The host's memory that copies of the device are fast with; it grows, and what lay in it is gone then.
struct Pinned {
  char* at = nullptr;
  size_t bytes = 0;

  ~Pinned() { pinned_release(at); }
  int reach(size_t wanted) {
    if (wanted <= bytes) return 0;
    pinned_release(at);
    void* found = nullptr;
    at = nullptr, bytes = 0;
    if (const int wrong = pinned_allocate(&found, wanted + wanted / 2)) return wrong;
    return at = static_cast<char*>(found), bytes = wanted + wanted / 2, 0;
  }
};

class Staging {
 public:

  // `host` with addresses of the host -> the device's step, its plan on the way. `moved`: the plan's place is a new one.
  // `adapters`: which rows have which, their sites on the device already; null where nobody has one. `heads`: the same of
  // sampled rows and adapters beside the head. `copies`: with which branches of drafts begin.
  // `fed`: for each row, which of the choices of the step before it takes as its token; empty where none does.
  int upload(const Step& host, const std::vector<SlotCopy>& copies, const std::vector<int32_t>& fed, const LoraStep* adapters,
             const LoraStep* heads, Sizes sizes, int64_t vocab, float* logits, void* stream, Step& device, bool& moved) {
    if (const int wrong = reach(size_of(host, sizes, vocab) + up(fed.size() * 4), moved)) return wrong;
    base_ = static_cast<char*>(plan_.at), end_ = 0;
    device.tokens = put(host.tokens, host.rows, sizes.rows, 0);
    AttentionItem* items = room<AttentionItem>(sizes.items, device.items);
    device.sampled = put(host.sampled, host.sampled_count, sizes.sampled, 0);
    int32_t* slots = room<int32_t>(sizes.rows + sizes.copies, slots_);
    branch(copies, sizes, slots + sizes.rows);
    Choice* choices = room<Choice>(sizes.sampled, device.choices);
    PrefixGroup* groups = room<PrefixGroup>(sizes.groups, device.groups);
    for (int32_t i = 0; i < sizes.groups; i++) groups[i] = i < host.group_count ? host.groups[i] : NOBODY;
    adapt(adapters, sizes.adapters, sizes.rows, adapters_);
    adapt(heads, sizes.heads, sizes.sampled, heads_);
    AttentionItem* few = room<AttentionItem>(sizes.divided ? sizes.items : 0, few_);
    if (!sizes.divided) few_ = nullptr;
    place(host, sizes, items, slots);
    for (int32_t i = 0; few_ && i < sizes.items; i++) {
      few[i] = items[i];
#if defined(BATON_MUTATION_CUDA_STEP_LONG)
      if (few[i].queries >= PROMPT_QUERIES - 1) few[i].queries = 0;
#else
      if (few[i].queries >= PROMPT_QUERIES) few[i].queries = 0;
#endif
    }
    choose(host, sizes, vocab, logits, choices);
    fed_ = put(fed.data(), int64_t(fed.size()), int64_t(fed.size()), -1);
    device.rows = sizes.rows, device.item_count = sizes.items, device.sampled_count = sizes.sampled;
    device.group_count = sizes.groups;
    return copy(plan_.at, bytes_, end_, stream);
  }

  // Whether `upload` would move the plan on the device, which a step that runs may still read.
  bool lacks(const Step& host, Sizes sizes, int64_t vocab, size_t fed) const {
    return size_of(host, sizes, vocab) + up(fed * 4) > plan_.bytes;
  }

  const int32_t* slots() const { return slots_; }
  const int32_t* fed() const { return fed_; }
  const SlotCopy* copies() const { return copies_; }
  const AttentionItem* few() const { return few_; }
  const LoraGroup* adapters() const { return adapters_; }
  const LoraGroup* heads() const { return heads_; }

 private:
  static size_t up(size_t bytes) { return (bytes + 15) / 16 * 16; }
  static int64_t blocks(const AttentionItem& item) { return (int64_t(item.start) + item.queries + PAGE - 1) / PAGE; }

  static size_t size_of(const Step& host, Sizes s, int64_t vocab) {
    size_t all = up(size_t(s.rows) * 4) + up(size_t(s.rows + s.copies) * 4) + up(s.copies * sizeof(SlotCopy)) +
                 (s.divided ? 2 : 1) * up(s.items * sizeof(AttentionItem)) + up(size_t(s.sampled) * 4) + up(s.sampled * sizeof(Choice)) +
                 up(size_t(s.groups) * sizeof(PrefixGroup)) + up(size_t(s.adapters) * sizeof(LoraGroup)) + up(size_t(s.adapters ? s.rows : 0) * 4) +
                 up(size_t(s.heads) * sizeof(LoraGroup)) + up(size_t(s.heads ? s.sampled : 0) * 4);
    for (int32_t i = 0; i < host.item_count; i++) all += up(size_t(blocks(host.items[i])) * 4);
    for (int32_t i = 0; i < host.sampled_count; i++) {
      const Choice& c = host.choices[i];
      all += up(size_t(c.history_count) * 4) + 2 * up(size_t(c.bias_count) * 4) + up(c.allowed ? size_t(vocab) : 0) + up(size_t(c.banned_count) * 4);
    }
    return all;
  }

  // The plan before this one may still be on its way from the other of the host's two rooms.
  int reach(size_t wanted, bool& moved) {
    Pinned& host = host_[turn_ ^= 1];
    if (const int wrong = host.reach(wanted)) return wrong;
    return bytes_ = host.at, plan_.reach(wanted, moved);
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

  void branch(const std::vector<SlotCopy>& copies, Sizes sizes, int32_t* slots) {
    SlotCopy* to = room<SlotCopy>(sizes.copies, copies_);
    for (int32_t i = 0; i < sizes.copies; i++) {
      to[i] = i < int32_t(copies.size()) ? copies[size_t(i)] : SlotCopy{-1, -1};
#if defined(BATON_MUTATION_CUDA_STEP_BRANCH_SLOTS)
      slots[i] = -1;
#else
      slots[i] = to[i].to;
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
  Pinned host_[2];
  int turn_ = 0;
  char *bytes_ = nullptr, *base_ = nullptr;
  size_t end_ = 0;
  const int32_t *slots_ = nullptr, *fed_ = nullptr;
  const SlotCopy* copies_ = nullptr;
  const AttentionItem* few_ = nullptr;
  const LoraGroup *adapters_ = nullptr, *heads_ = nullptr;
};

}  // namespace baton
