// Rows are sorted by expert, so that an expert's weights pass once for all of its rows; a row's products are summed in one order,
// whatever the rows beside it, and its experts' outputs in order of their rank.
#include "expert_rows.h"

#include "../linear/linear.h"
#include "amx_layers.h"
#include "dots.h"
#include "form.h"
#include "packed.h"

namespace baton {
namespace {

constexpr int64_t OUTPUTS = 32, ROWS_DEALT = 8;  // of a task

// Rows at a time: as many as keep what lies between the layers in FLOATS, so that an expert's weights pass seldom.
constexpr int64_t FEWEST_ROWS = 256, FLOATS = 1 << 24;
int64_t most_rows(const Moe& m) { return std::max(FEWEST_ROWS, FLOATS / (m.hidden + m.chosen * (m.hidden + m.inner))); }

float silu(float x) {
  const float small = exponential(x < 0 ? x : -x);
  return x * (x < 0 ? small : 1.0f) / (1.0f + small);
}

// What experts do between their two layers, and the biases of both where they have any.
struct Form {
  const BiasedMoe* biased;

  // `added`: what adapters have beside the expert's first layer, or null.
  float between(const Moe& m, int32_t expert, int64_t j, float gate, float up, const float* added) const {
    if (added) gate += added[j], up += added[m.inner + j];
    if (!biased) return silu(gate) * up;
    const float* bias = biased->gate_up_bias + expert * 2 * m.inner;
    gate += bias[j], up += bias[m.inner + j];
    const float most = biased->limit;
#if defined(BATON_MUTATION_MOE_LIMIT)
    gate = gate > most ? most : gate, up = up > most ? most : up;
#else
    gate = gate > most ? most : gate, up = up > most ? most : up < -most ? -most : up;
#endif
    return gate / (1.0f + std::exp(-biased->alpha * gate)) * (up + 1.0f);
  }
  float after(const Moe& m, int32_t expert, int64_t j, float y) const {
    return biased ? y + biased->down_bias[expert * m.hidden + j] : y;
  }
};

// Form::between of outputs j … j + outputs - 1 of `rows` rows at once, in place of `gates`; each number by itself, to the same bits.
void between_all(const Moe& m, const Form& form, int32_t expert, int64_t j, int64_t outputs, int64_t rows, const float* const* added,
                 float (*gates)[TOGETHER], float (*ups)[TOGETHER]) {
  if (form.biased || outputs * rows < LANES / 2) {
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t i = 0; i < rows; i++) gates[o][i] = form.between(m, expert, j + o, gates[o][i], ups[o][i], added[i]);
    return;
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t o = 0; added[i] && o < outputs; o++) gates[o][i] += added[i][j + o], ups[o][i] += added[i][m.inner + j + o];
  const int64_t n = outputs * TOGETHER;
  for (int64_t at = 0; at < n; at += LANES) {
    const int left = int(std::min<int64_t>(n - at, LANES));
    const vf gate = load_part(*gates + at, left), small = exponential(select(gate < vf{}, gate, vf{} - gate));
    const vf open = gate * select(gate < vf{}, small, splat(1.0f)) / (splat(1.0f) + small);
    store_part(*gates + at, open * load_part(*ups + at, left), left);
  }
}

// f(slot, first place, rows of it (at most TOGETHER), first output, outputs) for all, over threads.
template <class F>
void each_tile(const Routed& r, int64_t outputs, F&& f) {
  std::vector<int32_t> active;
  for (int32_t e = 0; e < r.slot_count(); e++)
    if (r.rows(e)) active.push_back(e);
  const int64_t blocks = (outputs + OUTPUTS - 1) / OUTPUTS;
  parallel_for(int32_t(int64_t(active.size()) * blocks), [&](int32_t task) {
    const int32_t e = active[size_t(task / blocks)], end = r.ends[size_t(e)];
    const int64_t first = task % blocks * OUTPUTS, count = outputs - first < OUTPUTS ? outputs - first : OUTPUTS;
    for (int32_t at = r.begin(e); at < end; at += TOGETHER)
      f(e, at, end - at < TOGETHER ? end - at : TOGETHER, first, count);
  });
}

// As the weights' own kind of number holds it.
template <int T>
float rounded(float x) {
  return T == KV_BF16 ? from_bf16(to_bf16(x)) : x;
}

// `count` rows of k numbers, dealt as products take them, in a thread's own memory for a step.
template <int T>
const char* dealt(const float* rows, int64_t count, int64_t k, char* to) {
  parallel_for(int32_t((count + ROWS_DEALT - 1) / ROWS_DEALT), [&](int32_t task) {
    for (int64_t i = task * ROWS_DEALT; i < std::min(count, (task + 1) * ROWS_DEALT); i++)
      Inputs<T>::deal(rows + i * k, k, to + i * Inputs<T>::bytes(k));
  });
  return to;
}

template <int T>
void layers(const Moe& m, const Form& form, const Routed& r, const float* x, int64_t count, float* between, float* y) {
  const char *gate_up = (const char*)m.gate_up, *down = (const char*)m.down;
  const int64_t in = m.hidden * kv_bytes<T>(), out = m.inner * kv_bytes<T>();  // bytes of a row of weights
  const int64_t x_bytes = Inputs<T>::bytes(m.hidden), y_bytes = Inputs<T>::bytes(m.inner), places = r.begin(r.slot_count());
  char* memory = (char*)scratch(SCRATCH_STEP, size_t(count * x_bytes + places * y_bytes + 64));
  const char* inputs = dealt<T>(x, count, m.hidden, memory);
  each_tile(r, m.inner, [&](int32_t e, int32_t at, int64_t rows, int64_t first, int64_t outputs) {
    const char* from[TOGETHER];
    const float* added[TOGETHER];
    float gates[SIDE][TOGETHER] = {}, ups[SIDE][TOGETHER] = {};
    for (int64_t i = 0; i < rows; i++) from[i] = inputs + r.row(at + i) * x_bytes, added[i] = r.added(at + i, m.inner);
    for (int64_t j = first, side; j < first + outputs; j += side) {
      side = side_of(r.rows(e), first + outputs - j);
      const char* gate = gate_up + (e * 2 * m.inner + j) * in;
      dots<T>(gate, in, side, from, m.hidden, rows, gates), dots<T>(gate + m.inner * in, in, side, from, m.hidden, rows, ups);
      between_all(m, form, e, j, side, rows, added, gates, ups);
      for (int64_t o = 0; o < side; o++)
        for (int64_t i = 0; i < rows; i++) between[(at + i) * m.inner + j + o] = rounded<T>(gates[o][i]);
    }
  });
  const char* inner = dealt<T>(between, places, m.inner, memory + count * x_bytes);
  each_tile(r, m.hidden, [&](int32_t e, int32_t at, int64_t rows, int64_t first, int64_t outputs) {
    const char* from[TOGETHER];
    float sums[SIDE][TOGETHER];
    for (int64_t i = 0; i < rows; i++) from[i] = inner + (at + i) * y_bytes;
    for (int64_t j = first, side; j < first + outputs; j += side) {
      side = side_of(r.rows(e), first + outputs - j);
      dots<T>(down + (e * m.hidden + j) * out, out, side, from, m.inner, rows, sums);
      for (int64_t o = 0; o < side; o++)
        for (int64_t i = 0; i < rows; i++) y[(at + i) * m.hidden + j + o] = form.after(m, e, j + o, sums[o][i]);
    }
  });
}

#if BATON_AMX
// The same by tiles, beside bf16 weights.
void tile_layers(const Moe& m, const Form& form, const Routed& r, const float* x, float* between, float* y) {
  std::vector<ExpertRows> all;
  for (int32_t e = 0; e < r.slot_count(); e++)
    if (const int64_t count = r.rows(e))
      all.push_back({e, r.begin(e), count, all.empty() ? 0 : all.back().tile + all.back().tiles()});
  const auto rows_from = [](const uint16_t* matrix, int64_t row, int64_t k, int64_t left) {
    return WeightRows{(const char*)(matrix + row * k), k * 2, std::max<int64_t>(0, std::min<int64_t>(TILE_ROWS, left))};
  };
  expert_layer(
      all, m.hidden, (m.inner + 15) / 16, [&](int64_t place) { return x + r.order[size_t(place)] / m.chosen * m.hidden; },
      [&](int32_t e, int64_t part) {
        const int64_t gate = e * 2 * m.inner + 16 * part, left = m.inner - 16 * part;
        return std::make_pair(rows_from(m.gate_up, gate, m.hidden, left), rows_from(m.gate_up, gate + m.inner, m.hidden, left));
      },
      [&](const ExpertRows& e, int64_t part, int64_t n, float gate, float up, int64_t place) {
        const int64_t j = 16 * part + n;
        if (j < m.inner) between[place * m.inner + j] = rounded<KV_BF16>(form.between(m, e.expert, j, gate, up, r.added(place, m.inner)));
      });
  expert_layer(
      all, m.inner, (m.hidden + 31) / 32, [&](int64_t place) { return between + place * m.inner; },
      [&](int32_t e, int64_t part) {
        const int64_t first = e * m.hidden + 32 * part, left = m.hidden - 32 * part;
        return std::make_pair(rows_from(m.down, first, m.inner, left), rows_from(m.down, first + 16, m.inner, left - 16));
      },
      [&](const ExpertRows& e, int64_t part, int64_t n, float one, float other, int64_t place) {
        const int64_t j = 32 * part + n;
        if (j < m.hidden) y[place * m.hidden + j] = form.after(m, e.expert, j, one);
        if (j + 16 < m.hidden) y[place * m.hidden + j + 16] = form.after(m, e.expert, j + 16, other);
      });
}
#endif

// The same by packed matrices: an expert's rows side by side, through its two layers, which round them as a dense layer does.
void packed_layers(const Moe& m, const Form& form, const Routed& r, const float* x, float* between, float* y) {
  const size_t most = r.order.size();
  size_t longest = 0;  // an expert's rows
  for (int32_t e = 0; e < r.slot_count(); e++) longest = std::max(longest, size_t(r.rows(e)));
  std::vector<float> rows(most * size_t(m.hidden)), both(longest * 2 * size_t(m.inner));
  for (int64_t i = 0; i < r.begin(r.slot_count()); i++)
    std::memcpy(rows.data() + i * m.hidden, x + r.order[size_t(i)] / m.chosen * m.hidden, size_t(m.hidden) * 4);
  for (int32_t e = 0; e < r.slot_count(); e++) {
    const int64_t begin = r.begin(e), count = r.rows(e);
    if (!count) continue;
    const PackedLinear gate_up = expert_of(m.gate_up, e, 2 * m.inner), down = expert_of(m.down, e, m.hidden);
    float* own = between + begin * m.inner;
    dense(gate_up, rows.data() + begin * m.hidden, m.hidden, count, nullptr, both.data(), 2 * m.inner);
    parallel_for(int32_t(count), [&](int32_t i) {
      const float *gates = both.data() + i * 2 * m.inner, *ups = gates + m.inner, *added = r.added(begin + i, m.inner);
      for (int64_t j = 0; j < m.inner; j++) own[i * m.inner + j] = form.between(m, e, j, gates[j], ups[j], added);
    });
    const float* bias = form.biased ? form.biased->down_bias + e * m.hidden : nullptr;
    dense(down, own, m.inner, count, bias, y + begin * m.hidden, m.hidden);
  }
}

constexpr int MOE_T_PACKED = -1;  // in place of a kind of number

// `r.sums` for rows x, side by side.
void add_first(const Moe& m, const ExpertAdapters& of, Routed& r, const float* x) {
  r.sums.assign(size_t(r.adapters.rows() * m.chosen * 2 * m.inner), 0);
  add_adapters(r, of.gate_up, 2 * m.inner, [&](int64_t place) { return x + r.row(place) * m.hidden; },
               [&](int64_t place) { return const_cast<float*>(r.added(place, m.inner)); });
}

// The outputs of own experts by place, in scratch memory.
template <int T>
const float* outputs(const Moe& m, const Form& form, const ExpertAdapters& of, Routed& r, const float* x, int64_t x_stride, int64_t rows) {
  const int64_t n = rows * m.chosen;
  // A dense layer has the caller's scratch for its own.
  float* own = (float*)scratch(T == MOE_T_PACKED ? SCRATCH_STEP : SCRATCH_CALLER, size_t(rows * m.hidden + n * (m.inner + m.hidden)) * 4);
  float *between = own + rows * m.hidden, *y = between + n * m.inner;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < m.hidden; j++) own[i * m.hidden + j] = rounded<T>(x[i * x_stride + j]);
  if (r.adapters.rows()) add_first(m, of, r, own);
  if constexpr (T == MOE_T_PACKED)
    packed_layers(m, form, r, own, between, y);
#if BATON_AMX
  else if constexpr (T == KV_BF16)
    tile_layers(m, form, r, own, between, y);
#endif
  else
    layers<T>(m, form, r, own, rows, between, y);
  add_adapters(r, of.down, m.hidden, [&](int64_t place) { return between + place * m.inner; },
               [&](int64_t place) { return y + place * m.hidden; });
  return y;
}

const float* outputs_of(const Moe& m, const Form& form, const ExpertAdapters& of, Routed& r, const float* x, int64_t x_stride,
                        int64_t rows) {
  if (m.dtype == MOE_PACKED) return outputs<MOE_T_PACKED>(m, form, of, r, x, x_stride, rows);
  return m.dtype == F32 ? outputs<KV_F32>(m, form, of, r, x, x_stride, rows) : outputs<KV_BF16>(m, form, of, r, x, x_stride, rows);
}

// y by place -> the rows' sums by weight.
void mix(const Moe& m, const Routed& r, int64_t rows, const float* y, float* out, int64_t out_stride) {
  parallel_for(int32_t(rows), [&](int32_t i) {
    float* to = out + i * out_stride;
    std::memset(to, 0, size_t(m.hidden) * 4);
    for (int64_t k = i * m.chosen; k < (i + 1) * m.chosen; k++) {
#if defined(BATON_MUTATION_MOE_PLACE)
      const float* from = y + r.order[size_t(k)] * m.hidden;
#else
      const float* from = y + r.place[size_t(k)] * m.hidden;
#endif
      const float weight = r.weights[size_t(k)];
      for (int64_t j = 0; j < m.hidden; j++) to[j] = std::fma(weight, from[j], to[j]);
    }
  });
}

// f(first row, rows) for each part of the rows that is computed at a time.
template <class F>
void in_parts(const Moe& m, int64_t rows, F&& f) {
  const int64_t most = most_rows(m);
  for (int64_t at = 0; at < rows; at += most) f(at, std::min(rows - at, most));
}

void all_rows(const Moe& m, const Form& form, const ExpertAdapters& of, const float* x, int64_t x_stride, const float* logits,
              int64_t rows, float* out, int64_t out_stride) {
  in_parts(m, rows, [&](int64_t first, int64_t some) {
    Routed r = sorted(m, nullptr, logits + first * m.experts, first, some);
    r.adapters = RowAdapters(of, first, some);
    const float* y = outputs_of(m, form, of, r, x + first * x_stride, x_stride, some);
    mix(m, r, some, y, out + first * out_stride, out_stride);
  });
}

}  // namespace

int64_t run_own_experts(const Moe& m, const BiasedMoe* biased, const OwnExperts& own, const ExpertAdapters& adapters, const float* x,
                        int64_t x_stride, const float* logits, int64_t rows, float* y, std::atomic<int64_t>* loads, std::vector<int64_t>* places) {
  int64_t computed = 0;
  in_parts(m, rows, [&](int64_t first, int64_t some) {
    Routed r = sorted(m, &own, logits + first * m.experts, first, some);
    for (int32_t e = 0; e < m.experts; e++)
      if (const int32_t slot = own.slot_of[e]; slot >= 0 && r.rows(slot)) loads[e].fetch_add(r.rows(slot), std::memory_order_relaxed);
    r.adapters = RowAdapters(adapters, first, some);
    const float* found = outputs_of(m, {biased}, adapters, r, x + first * x_stride, x_stride, some);
    for (int32_t at = 0; at < r.begin(r.slot_count()); at++) {
      const int64_t place = first * m.chosen + r.order[size_t(at)];
      std::memcpy(y + place * m.hidden, found + at * m.hidden, size_t(m.hidden) * 4);
      if (places) places->push_back(place);
    }
    computed += r.begin(r.slot_count());
  });
  return computed;
}

void mix_experts(const Moe& m, const float* logits, int64_t rows, const float* y, float* out, int64_t out_stride) {
  in_parts(m, rows, [&](int64_t first, int64_t some) {
    Routed r = sorted(m, nullptr, logits + first * m.experts, first, some);
    for (size_t i = 0; i < r.place.size(); i++) r.place[i] = int32_t(i);  // y lies by row and rank
    mix(m, r, some, y + first * m.chosen * m.hidden, out + first * out_stride, out_stride);
  });
}

}  // namespace baton

BATON_API void baton_moe(const baton::Moe* moe, const float* x, int64_t x_stride, const float* logits, int64_t rows, float* out,
                         int64_t out_stride) {
  baton::all_rows(*moe, {nullptr}, {}, x, x_stride, logits, rows, out, out_stride);
}

BATON_API void baton_biased_moe(const baton::BiasedMoe* moe, const float* x, int64_t x_stride, const float* logits, int64_t rows,
                                float* out, int64_t out_stride) {
  baton::all_rows(moe->moe, {moe}, {}, x, x_stride, logits, rows, out, out_stride);
}

BATON_API void baton_adapted_moe(const baton::AdaptedMoe* moe, const baton::ExpertAdapters* of, const float* x, int64_t x_stride,
                                 const float* logits, int64_t rows, float* out, int64_t out_stride) {
  baton::all_rows(*moe->moe, {moe->biased}, *of, x, x_stride, logits, rows, out, out_stride);
}
