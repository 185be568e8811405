// A sequence per task; a row of logits is passed twice at most: its largest and its mass, then where the number falls.
#include "accept.h"

#include <algorithm>
#include <cmath>

#include "../abi/threads.h"
#include "../abi/vector.h"

namespace baton {
namespace {

constexpr int64_t STRETCH = 4096;

struct Spread {
  float most;
  double total;
  int32_t best;
  bool fine;
};

vf masses(const float* x, int64_t at, int64_t n, float most, float warmth) {
  const vf part = load_part(x + at, int(std::min<int64_t>(n - at, LANES)), -INFINITY);
  return exponential((part - splat(most)) * splat(warmth));
}

class Sequence {
 public:
  Sequence(Draft& draft, int64_t vocab)
      : d_(draft), vocab_(vocab), count_(std::min(draft.count, MOST_DRAFTS)), warmth_(d_.temperature > 0 ? 1 / d_.temperature : 0) {}

  void run() {
    std::fill(d_.emitted, d_.emitted + d_.count + 1, -1);
    int32_t place = 0;
    while (place < count_ && stands(place)) d_.emitted[place] = d_.tokens[place], place++;
    d_.accepted = place;
    d_.emitted[place] = behind(place);
  }

 private:
  int32_t chosen(int32_t place) const { return *(const int32_t*)((const char*)d_.chosen + place * d_.chosen_stride); }
  const float* row(int32_t place) const { return d_.target + place * d_.target_stride; }

  Spread spread(int32_t place) const {
    const float* x = row(place);
    Spread s{-INFINITY, 0, 0, true};
    for (int64_t i = 0; i < vocab_; i++) {
      s.fine &= x[i] == x[i];
      if (x[i] > s.most) s.most = x[i], s.best = int32_t(i);
    }
    s.fine &= std::isfinite(s.most);
    if (!s.fine || d_.temperature <= 0) return s;
    for (int64_t from = 0; from < vocab_; from += STRETCH) {
      vf sums{};
      for (int64_t i = from; i < std::min(vocab_, from + STRETCH); i += LANES) sums = sums + masses(x, i, vocab_, s.most, warmth_);
      s.total += sum(sums);
    }
    return s;
  }

  bool stands(int32_t place) {
    const int32_t token = d_.tokens[place];
    if (d_.chosen) return token >= 0 && chosen(place) == token;
    last_ = spread(place), known_ = place;
    if (!last_.fine || token < 0 || token >= vocab_) return false;
    if (d_.temperature <= 0) return token == last_.best;
    const double mass = std::exp(double(row(place)[token] - last_.most) * warmth_);
    const double q = d_.proposed ? d_.proposed[place * d_.proposed_stride + token] : 1;
#ifdef BATON_MUTATION_ACCEPT_RATIO
    return d_.accept[place] < mass / last_.total;
#else
    return d_.accept[place] * q * last_.total < mass;
#endif
  }

  int32_t behind(int32_t place) {
    if (d_.chosen) return chosen(place);
    if (known_ != place) last_ = spread(place);
    if (!last_.fine) return -1;
    if (d_.temperature <= 0) return last_.best;
    const int32_t found = place < count_ ? draw(place, true) : -1;
    return found < 0 ? draw(place, false) : found;
  }

  // From what is left of the target's mass above the draft's, or from all of it; -1 where nothing is left.
  int32_t draw(int32_t place, bool left) const {
    const float *x = row(place), *q = left && d_.proposed ? d_.proposed + place * d_.proposed_stride : nullptr;
    const int32_t certain = left && !d_.proposed ? d_.tokens[place] : -1;
    float part[LANES];
    auto each = [&](auto&& f) {
      for (int64_t at = 0; at < vocab_; at += LANES) {
        store(part, masses(x, at, vocab_, last_.most, warmth_));
        for (int64_t i = at; i < std::min<int64_t>(vocab_, at + LANES); i++) {
#ifdef BATON_MUTATION_ACCEPT_RESIDUAL
          const double mass = part[i - at];
#else
          const double mass = std::max(0.0, part[i - at] - (q ? q[i] * last_.total : i == certain ? last_.total : 0.0));
#endif
          if (mass > 0 && f(i, mass)) return;
        }
      }
    };
    double total = 0, reached = 0;
    each([&](int64_t, double mass) { return total += mass, false; });
    int32_t found = -1;
#ifdef BATON_MUTATION_ACCEPT_PLACE
    const double target = d_.draw[0] * total;
#else
    const double target = d_.draw[place] * total;
#endif
    each([&](int64_t i, double mass) { return found = int32_t(i), (reached += mass) > target; });
    return found;
  }

  Draft& d_;
  int64_t vocab_;
  int32_t count_, known_ = -1;
  float warmth_;
  Spread last_{};
};

}  // namespace
}  // namespace baton

BATON_API void baton_speculative_accept(baton::Draft* drafts, int32_t count, int64_t vocab) {
  baton::parallel_for(count, [&](int32_t task) { baton::Sequence(drafts[task], vocab).run(); });
}
