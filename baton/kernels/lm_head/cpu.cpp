// The vocabulary passes in stretches that stay in a core's cache: of a greedy row only the best is kept, of a drawn row
// each 64 tokens' largest logit and mass (the 64 that the number falls into are computed again). Only rows with
// top_k, top_p or min_p, or whose logits are asked for, are written out.
#include "adapted.h"
#include "choose.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "../abi/tanh.h"
#include "../abi/threads.h"
#include "../abi/vector.h"

namespace baton {
namespace {

constexpr int64_t STRETCH = 16;  // panels

struct Stat {
  float most, mass;
};

struct Best {
  float value;
  int32_t token;
  bool nan;
};

// What a row needs beside its choice.
struct Row {
  const Choice* choice;
  const int32_t* counts = nullptr;  // per token: 1 if seen at all, + 2 for each time as an output
  float* kept = nullptr;            // all edited logits
  Stat* stats = nullptr;            // per panel
  const LoraPart* adapter = nullptr;  // what is added to the head's product,
  const float* shrunk = nullptr;      // and the row through its first matrix
  bool drawn = false, filtered = false;
};

void penalise(const Choice& c, const int32_t* counts, int64_t first, int64_t n, float* logits) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t seen = counts[first + i];
    if (!seen) continue;
    float x = logits[i];
    if (c.repetition != 1.0f) x = x > 0 ? x / c.repetition : x * c.repetition;
    const int32_t times = seen >> 1;
    if (times) x -= float(times) * c.frequency + c.presence;
    logits[i] = x;
  }
}

void edit(const Row& row, int64_t first, int64_t n, float* logits) {
  const Choice& c = *row.choice;
  if (row.counts) penalise(c, row.counts, first, n, logits);
  for (int32_t i = 0; i < c.bias_count; i++)
    if (c.bias_ids[i] >= first && c.bias_ids[i] < first + n) logits[c.bias_ids[i] - first] += c.bias[i];
  if (c.allowed)
    for (int64_t i = 0; i < n; i++)
      if (!c.allowed[first + i]) logits[i] = -INFINITY;
  for (int32_t i = 0; i < c.banned_count; i++)
    if (c.banned[i] >= first && c.banned[i] < first + n) logits[c.banned[i] - first] = -INFINITY;
}

Best best_of(const float* logits, int64_t first, int64_t n) {
  Best best{-INFINITY, -1, false};
  vf most = splat(-INFINITY);
  vi wrong{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const vf x = load(logits + i);
    most = maximum(x, most), wrong |= (x != x);
  }
  best.value = largest(most);
  for (int lane = 0; lane < LANES; lane++) best.nan |= wrong[lane] != 0;
  for (; i < n; i++) {
    best.nan |= logits[i] != logits[i];
    if (logits[i] > best.value) best.value = logits[i];
  }
  for (i = 0; i < n && best.token < 0; i++)
    if (logits[i] == best.value) best.token = int32_t(first + i);
  return best;
}

// e^((x - most) / T) summed over a panel, in one order.
float mass_of(const float* logits, int64_t n, float most, float warmth) {
  if (most == -INFINITY) return 0;
  vf mass{};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf x = load_part(logits + i, int(std::min<int64_t>(n - i, LANES)), -INFINITY);
    mass = mass + exponential((x - splat(most)) * splat(warmth));
  }
  return sum(mass);
}

class Head {
 public:
  Head(const PackedLinear& w, const float* x, int64_t x_stride, int32_t rows, float softcap, Choice* choices,
       const float* bias = nullptr, const LoraSite* const* adapters = nullptr)
      : w_(w), x_(x), bias_(bias), stride_(x_stride), softcap_(softcap), choices_(choices), rows_(rows) {
    if (adapters) shrink(adapters);
  }

  // Of logits that are there already: (rows, w.n).
  Head(const PackedLinear& w, const float* given, int32_t rows, Choice* choices)
      : w_(w), x_(nullptr), stride_(0), softcap_(0), choices_(choices), rows_(rows), given_(given) {}

  void run() {
    prepare();
    const int64_t columns = (w_.n + PANEL - 1) / PANEL, stretches = (columns + STRETCH - 1) / STRETCH;
    best_.assign(stretches * rows_.size(), Best{});
    parallel_for(int32_t(stretches), [&](int32_t task) { stretch(task); });
    parallel_for(int32_t(rows_.size()), [&](int32_t row) { choices_[row].token = choose(row, stretches); });
    forget();
  }

 private:
  void prepare() {
    const int64_t columns = (w_.n + PANEL - 1) / PANEL;
    int64_t penalised = 0, filtered = 0;
    for (size_t i = 0; i < rows_.size(); i++) {
      const Choice& c = choices_[i];
      rows_[i].choice = &c;
      rows_[i].drawn = c.temperature > 0 && !c.logits;
      rows_[i].filtered = rows_[i].drawn && (c.top_k > 0 || c.top_p < 1 || c.min_p > 0);
      penalised += counted(c), filtered += rows_[i].filtered;
    }
    if (int64_t(counts().size()) < penalised * w_.n) counts().resize(penalised * w_.n);
    kept_.reset(filtered ? new float[filtered * w_.n] : nullptr);
    stats_.resize(rows_.size() * columns);
    int32_t* at = counts().data();
    float* keep = kept_.get();
    for (size_t i = 0; i < rows_.size(); i++) {
      rows_[i].stats = stats_.data() + i * columns;
      if (rows_[i].filtered) rows_[i].kept = keep, keep += w_.n;
      if (counted(choices_[i])) count(choices_[i], at), rows_[i].counts = at, at += w_.n;
    }
  }

  void shrink(const LoraSite* const* adapters) {
    int64_t ranks = 0;
    for (size_t i = 0; i < rows_.size(); i++)
      if (adapters[i] && adapters[i]->count) rows_[i].adapter = adapters[i]->parts, ranks += adapters[i]->parts->rank;
    shrunk_.resize(ranks);
    float* at = shrunk_.data();
    for (size_t i = 0; i < rows_.size(); i++)
      if (rows_[i].adapter) lora_shrink(*rows_[i].adapter, x_ + i * stride_, at), rows_[i].shrunk = at, at += rows_[i].adapter->rank;
  }

  static bool counted(const Choice& c) {
    return !c.logits && (c.repetition != 1.0f || c.frequency != 0.0f || c.presence != 0.0f);
  }

  // Zero between calls: what a call counted, it takes back.
  static std::vector<int32_t>& counts() {
    static thread_local std::vector<int32_t> all;
    return all;
  }

  void count(const Choice& c, int32_t* at) {
    for (int32_t i = 0; i < c.history_count; i++)
      if (int64_t(c.history[i]) < w_.n) at[c.history[i]] = (at[c.history[i]] | 1) + (i >= c.prompt_count ? 2 : 0);
  }

  void forget() {
    for (size_t i = 0; i < rows_.size(); i++)
      if (rows_[i].counts)
        for (int32_t k = 0; k < choices_[i].history_count; k++)
#if defined(BATON_MUTATION_LM_HEAD_COUNTS)
          if (int64_t(choices_[i].history[k]) < w_.n) const_cast<int32_t*>(rows_[i].counts)[choices_[i].history[k]] &= 2;
#else
          if (int64_t(choices_[i].history[k]) < w_.n) const_cast<int32_t*>(rows_[i].counts)[choices_[i].history[k]] = 0;
#endif
  }

  void stretch(int32_t task) {
    const int64_t first = task * STRETCH * PANEL, n = std::min(STRETCH * PANEL, w_.n - first);
    float* logits = (float*)scratch(SCRATCH_SAMPLE, rows_.size() * n * 4);
    multiply(0, int64_t(rows_.size()), first, n, logits);
    for (size_t i = 0; i < rows_.size(); i++)
      if (rows_[i].adapter) lora_expand(*rows_[i].adapter, rows_[i].shrunk, first, n, logits + i * n);
    cap(logits, int64_t(rows_.size()) * n);
    for (size_t i = 0; i < rows_.size(); i++) take(i, task, first, n, logits + i * n);
  }

  // Rows from `row` on, `n` logits from `first` on, which begins a panel.
  void multiply(int64_t row, int64_t rows, int64_t first, int64_t n, float* logits) const {
    const float* bias = bias_ ? bias_ + first : nullptr;
    if (!given_) return dense(panels(w_, first / PANEL, (n + PANEL - 1) / PANEL), x_ + row * stride_, stride_, rows, bias, logits, n);
    for (int64_t i = 0; i < rows; i++) std::memcpy(logits + i * n, given_ + (row + i) * w_.n + first, size_t(n) * 4);
  }

  void cap(float* logits, int64_t n) const {
    if (softcap_ <= 0) return;
    for (int64_t i = 0; i < n; i += LANES) {
      const int some = int(n - i < LANES ? n - i : LANES);
      store_part(logits + i, capped(load_part(logits + i, some), softcap_), some);
    }
  }

  void take(size_t i, int32_t task, int64_t first, int64_t n, float* logits) {
    Row& row = rows_[i];
    if (row.choice->logits) {
      std::memcpy(row.choice->logits + first, logits, n * 4);
      return;
    }
    edit(row, first, n, logits);
    best_[task * rows_.size() + i] = best_of(logits, first, n);
    if (row.filtered) {
      std::memcpy(row.kept + first, logits, n * 4);
    } else if (row.drawn) {
      for (int64_t at = 0; at < n; at += PANEL) {
        const int64_t width = n - at < PANEL ? n - at : PANEL;
        const float most = best_of(logits + at, 0, width).value;
        row.stats[(first + at) / PANEL] = {most, mass_of(logits + at, width, most, 1.0f / row.choice->temperature)};
      }
    }
  }

  int32_t choose(int32_t i, int64_t stretches) {
    Row& row = rows_[i];
    if (row.choice->logits) return -1;
    Best best{-INFINITY, -1, false};
    for (int64_t s = 0; s < stretches; s++) {
      const Best& found = best_[s * rows_.size() + i];
      best.nan |= found.nan;
#if defined(BATON_MUTATION_LM_HEAD_TIES)
      if (found.value >= best.value) best.value = found.value, best.token = found.token;
#else
      if (found.value > best.value) best.value = found.value, best.token = found.token;
#endif
    }
    if (best.nan || !std::isfinite(best.value)) return -1;
    if (row.filtered) return filter(row, best.value);
    return row.drawn ? draw(i, row, best.value) : best.token;
  }

  // The first token whose cumulative mass passes uniform x total.
  int32_t draw(int32_t i, const Row& row, float most) {
    const int64_t columns = (w_.n + PANEL - 1) / PANEL;
    const float warmth = 1.0f / row.choice->temperature;
    double total = 0, reached = 0;
    auto mass = [&](int64_t panel) {
      return double(row.stats[panel].mass) * std::exp(double(row.stats[panel].most - most) * warmth);
    };
#if defined(BATON_MUTATION_LM_HEAD_MASS)
    for (int64_t p = 0; p + 1 < columns; p++) total += mass(p);
#else
    for (int64_t p = 0; p < columns; p++) total += mass(p);
#endif
    const double target = row.choice->uniform * total;
    int64_t at = -1;
    for (int64_t p = 0; p < columns; p++) {
      const double next = mass(p);
      if (next > 0) at = p;
      if (reached + next > target) break;
      if (p + 1 < columns) reached += next;
    }
    return within(i, row, at, target - reached, most);
  }

  int32_t within(int32_t i, const Row& row, int64_t panel, double target, float most) {
    float logits[PANEL];
    const int64_t n = std::min(int64_t(PANEL), w_.n - panel * PANEL);
    multiply(i, 1, panel * PANEL, n, logits);
    if (row.adapter) lora_expand(*row.adapter, row.shrunk, panel * PANEL, n, logits);
#if !defined(BATON_MUTATION_LM_HEAD_CAP)
    cap(logits, n);
#endif
    edit(row, panel * PANEL, n, logits);
    double reached = 0;
    int64_t last = -1;
    for (int64_t k = 0; k < n; k++) {
      const double p = std::exp(double(logits[k] - most) / row.choice->temperature);
      if (p > 0) last = k;
      reached += p;
      if (p > 0 && reached > target) break;
    }
    return int32_t(panel * PANEL + last);
  }

  // top_k, top_p, min_p as thresholds on the mass; ties stay.
  int32_t filter(const Row& row, float most) {
    const Choice& c = *row.choice;
    std::vector<float> p(w_.n);
    const float warmth = 1.0f / c.temperature;
    for (int64_t i = 0; i < w_.n; i += LANES) {
      const int n = int(w_.n - i < LANES ? w_.n - i : LANES);
      store_part(p.data() + i, exponential((load_part(row.kept + i, n) - splat(most)) * splat(warmth)), n);
    }
    float least = 0;
    if (c.top_k > 0 && c.top_k < w_.n) {
      std::vector<float> ranked(p);
      std::nth_element(ranked.begin(), ranked.begin() + c.top_k - 1, ranked.end(), std::greater<float>());
      least = ranked[c.top_k - 1];
    }
    if (c.top_p < 1) least = std::max(least, nucleus(p, least, c.top_p));
    least = std::max(least, c.min_p);
    double total = 0, reached = 0;
    for (float x : p) total += x >= least ? x : 0;
    int32_t last = 0;
    for (int64_t i = 0; i < w_.n; i++) {
      if (p[i] < least || p[i] == 0) continue;
      last = int32_t(i), reached += p[i];
      if (reached > c.uniform * total) break;
    }
    return last;
  }

  // The smallest mass of the likeliest tokens that together hold top_p of all those not below `least`.
  static float nucleus(const std::vector<float>& p, float least, float top_p) {
    double all = 0;
    for (float x : p) all += x >= least ? x : 0;
    std::vector<float> few;
    for (float from = 1e-2f;; from = from > 1e-12f ? from * 1e-3f : 0) {
      const float low = std::max(from, least);
      double held = 0;
      few.clear();
      for (float x : p)
        if (x >= low) few.push_back(x), held += x;
      if (held >= top_p * all || low == least) break;
    }
    std::sort(few.begin(), few.end(), std::greater<float>());
    double held = 0;
    float last = few.empty() ? 0 : few[0];
    for (float x : few) {
#if defined(BATON_MUTATION_LM_HEAD_NUCLEUS)
      if (held + x >= top_p * all) break;
#else
      if (held >= top_p * all) break;
#endif
      last = x, held += x;
    }
    return last;
  }

  const PackedLinear& w_;
  const float* x_;
  const float* bias_ = nullptr;
  int64_t stride_;
  float softcap_;
  Choice* choices_;
  std::vector<Row> rows_;
  std::vector<Best> best_;
  std::vector<float> shrunk_;
  std::vector<Stat> stats_;
  std::unique_ptr<float[]> kept_;
  const float* given_ = nullptr;
};

}  // namespace

void choose_tokens(const float* logits, int64_t vocab, int32_t rows, Choice* choices) {
  PackedLinear sizes{};
  sizes.n = vocab;
  if (rows) Head(sizes, logits, rows, choices).run();
}

void adapted_head(const PackedLinear& w, const float* bias, const float* x, int64_t x_stride, int32_t rows, float softcap,
                  Choice* choices, const LoraSite* const* adapters) {
  if (rows) Head(w, x, x_stride, rows, softcap, choices, bias, adapters).run();
}

}  // namespace baton

BATON_API void baton_lm_head(const baton::PackedLinear* w, const float* x, int64_t x_stride, int32_t rows,
                             baton::Choice* choices) {
  if (rows) baton::Head(*w, x, x_stride, rows, 0, choices).run();
}

BATON_API void baton_lm_head_capped(const baton::PackedLinear* w, const float* x, int64_t x_stride, int32_t rows,
                                    float softcap, baton::Choice* choices) {
  if (rows) baton::Head(*w, x, x_stride, rows, softcap, choices).run();
}
