// Which rows go to which experts, sorted by expert, and what adapters add to their gates and ups. For cpu.cpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../abi/threads.h"
#include "../lora/rows.h"
#include "adapted.h"
#include "own_experts.h"

namespace baton {
namespace {

// The adapters of `count` rows of a step from `first` on. Empty where none has anything beside these experts.
class RowAdapters {
 public:
  RowAdapters() = default;
  RowAdapters(const ExpertAdapters& of, int64_t first, int64_t count) {
    for (int64_t g = 0; of.groups && g < of.count; g++) {
      const LoraGroup& group = of.groups[g];
      if (!group.sites[of.gate_up].count && !group.sites[of.down].count) continue;
      sites_.resize(size_t(count)), numbers_.resize(size_t(count));
      for (int64_t i = 0; i < group.count; i++)
        if (const int64_t row = group.rows[i] - first; row >= 0 && row < count)
          sites_[size_t(row)] = group.sites, numbers_[size_t(row)] = rows_++;
    }
  }

  int64_t rows() const { return rows_; }  // that have one
  const LoraSite* sites(int64_t row) const { return rows_ ? sites_[size_t(row)] : nullptr; }
  int64_t number(int64_t row) const { return numbers_[size_t(row)]; }  // of a row that has one, among these

 private:
  int64_t rows_ = 0;
  std::vector<const LoraSite*> sites_;
  std::vector<int64_t> numbers_;
};

struct Routed {
  std::vector<int32_t> slots, order, place, ends;  // by row and rank (-1: not here); by place; by row and rank; by slot
  std::vector<int32_t> experts;  // by slot; empty where all experts are here, in order
  std::vector<float> weights;
  int32_t chosen = 1;
  RowAdapters adapters;
  std::vector<float> sums;  // what adapters add to gates and ups: (rows that have one, chosen, 2 inner)

  int32_t slot_count() const { return int32_t(ends.size()); }
  int32_t expert(int32_t slot) const { return experts.empty() ? slot : experts[size_t(slot)]; }
  int32_t begin(int32_t slot) const { return slot ? ends[size_t(slot - 1)] : 0; }
  int32_t rows(int32_t slot) const { return ends[size_t(slot)] - begin(slot); }
  int64_t row(int64_t place) const { return order[size_t(place)] / chosen; }
  const LoraSite* sites(int64_t place) const { return adapters.sites(row(place)); }

  // The place's part of `sums`, null where its row has no adapter.
  const float* added(int64_t place, int64_t inner) const {
    if (sums.empty() || !sites(place)) return nullptr;
    return sums.data() + (adapters.number(row(place)) * chosen + order[size_t(place)] % chosen) * 2 * inner;
  }
};

// The best `chosen` experts of a row, best first.
void route(const Moe& m, const float* logits, int32_t* experts, float* weights) {
  std::vector<bool> taken(size_t(m.experts), false);
  bool fine = true;
  for (int e = 0; e < m.experts; e++) fine &= logits[e] == logits[e];
  for (int k = 0; k < m.chosen; k++) {
    int best = -1;
    for (int e = 0; e < m.experts; e++) {
      if (taken[size_t(e)]) continue;
#if defined(BATON_MUTATION_MOE_TIES)
      if (best < 0 || logits[e] >= logits[best]) best = e;
#else
      if (best < 0 || logits[e] > logits[best]) best = e;
#endif
    }
    taken[size_t(best)] = true, experts[k] = best;
  }
  float total = 0;
  const float top = logits[experts[0]];
  for (int k = 0; k < m.chosen; k++) weights[k] = fine ? std::exp(logits[experts[k]] - top) : NAN;
  if (m.renormalise)
    for (int k = 0; k < m.chosen; k++) total += weights[k];
  else
    for (int e = 0; e < m.experts; e++) total += std::exp(logits[e] - top);
  for (int k = 0; k < m.chosen; k++) weights[k] /= total;
}

// The slot of `expert` for the row of this number; -1: somebody else's. Without `own` all experts are here, in order.
int32_t slot_of(const OwnExperts* own, int32_t expert, int64_t row) {
  if (!own) return expert;
  return own->owners[expert * EXPERT_SHARES + row % EXPERT_SHARES] == own->owner ? own->slot_of[expert] : -1;
}

// `first`: the number of the first row.
Routed sorted(const Moe& m, const OwnExperts* own, const float* logits, int64_t first, int64_t rows) {
  Routed r;
  r.chosen = m.chosen;
  const size_t n = size_t(rows) * size_t(m.chosen), chosen = size_t(m.chosen);
  r.slots.resize(n), r.weights.resize(n), r.order.resize(n), r.place.resize(n), r.ends.assign(size_t(own ? own->slots : m.experts), 0);
  for (int64_t i = 0; i < rows; i++) route(m, logits + i * m.experts, r.slots.data() + i * m.chosen, r.weights.data() + i * m.chosen);
  for (size_t i = 0; i < n; i++) r.slots[i] = slot_of(own, r.slots[i], first + int64_t(i / chosen));
  for (const int32_t slot : r.slots)
    if (slot >= 0) r.ends[size_t(slot)]++;
  int32_t before = 0;
  if (own) {
    r.experts.resize(r.ends.size());
    for (int32_t e = 0; e < m.experts; e++)
      if (own->slot_of[e] >= 0) r.experts[size_t(own->slot_of[e])] = e;
  }
  for (int32_t& end : r.ends) before += end, end = before - end;
  for (size_t i = 0; i < n; i++) {
    if (r.slots[i] < 0) continue;
    const int32_t at = r.ends[size_t(r.slots[i])]++;
    r.order[size_t(at)] = int32_t(i), r.place[i] = at;
  }
  return r;
}

// The parts beside outputs `first` … `first + outputs - 1` of a stacked layer, which lie in their order.
inline LoraSite parts_of(const LoraSite& site, int64_t first, int64_t outputs) {
  const LoraPart *end = site.parts + site.count, *from = site.parts, *to;
  from = std::lower_bound(from, end, first, [](const LoraPart& part, int64_t at) { return part.first < at; });
  for (to = from; to < end && to->first < first + outputs;) to++;
  return {from, to - from};
}

// Adds B · (A · x) of each place's adapter to its outputs of the layer at `site`, of which an expert has `outputs`. x(place)
// and out(place) are rows. Places that share expert and adapter are taken together; their bits don't depend on it.
template <class X, class Out>
void add_adapters(const Routed& r, int64_t site, int64_t outputs, X&& x, Out&& out) {
  constexpr int64_t MOST = 32;  // places of a task
  struct Piece {
    LoraSite parts;
    int64_t first;
    size_t begin, end;  // among `places`
  };
  if (!r.adapters.rows()) return;
  std::vector<int32_t> places;
  std::vector<Piece> pieces;
  for (int32_t slot = 0; slot < r.slot_count(); slot++) {
    const int64_t first = r.expert(slot) * outputs;
    size_t at = places.size();
    for (int32_t place = r.begin(slot); place < r.ends[size_t(slot)]; place++)
      if (r.sites(place)) places.push_back(place);
    std::stable_sort(places.begin() + int64_t(at), places.end(), [&](int32_t a, int32_t b) { return r.sites(a) < r.sites(b); });
    for (size_t end; at < places.size(); at = end) {
      const LoraSite* own = r.sites(places[at]);
#if defined(BATON_MUTATION_MOE_ADAPTER)
      for (end = at + 1; end < places.size() && int64_t(end - at) < MOST;) end++;
#else
      for (end = at + 1; end < places.size() && r.sites(places[end]) == own && int64_t(end - at) < MOST;) end++;
#endif
      const LoraSite parts = parts_of(own[site], first, outputs);
      if (parts.count) pieces.push_back({parts, first, at, end});
    }
  }
  parallel_for(int32_t(pieces.size()), [&](int32_t task) {
    const Piece& piece = pieces[size_t(task)];
    const float* from[MOST];
    float* to[MOST];
    for (size_t i = piece.begin; i < piece.end; i++) from[i - piece.begin] = x(places[i]), to[i - piece.begin] = out(places[i]);
    for (int64_t i = 0; i < piece.parts.count; i++) {
      LoraPart part = piece.parts.parts[i];
      part.first -= piece.first;
      lora_rows(part, from, int64_t(piece.end - piece.begin), to);
    }
  });
}

}  // namespace
}  // namespace baton
