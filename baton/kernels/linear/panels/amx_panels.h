// linear by AMX tiles: a panel's chunks of weights against a block of rows. Knows nothing of models. Included by cpu.cpp alone.
//
//   per block of rows and run of panels:  for each chunk of K, for each panel:  [int4 or fp8 made wider]  for each two tiles of rows and
//   half of the panel: amx_tiles.h
#pragma once
#include "amx_tiles.h"
#include "results.h"
#include "widen.h"

#if BATON_AMX
namespace baton {
namespace {

// Panels begin … end - 1 against so many tiles of rows, a chunk of all of them after another. Of gated results every second panel
// is one of what the panel before it gates.
class AmxPanels {
 public:
  AmxPanels(const PackedLinear& w, const AmxRows& rows, const Results& results, Range panels, Range tiles)
      : w_(w), rows_(rows), results_(results), panels_(panels), begin_(tiles.begin), end_(tiles.end) {
    size_ = (end_ - begin_) * rows.per_tile * kPanel;
    const int64_t kept = rows.chunks() > 1 ? (panels.end - panels.begin) * size_ * 4 : 0, unpacked = unpacked_bytes();
    char* memory = (char*)scratch(SCRATCH_TASK, size_t(kept + kOwn + unpacked + 2 * kStepBytes));
    own_ = (float*)memory, kept_ = (float*)(memory + kOwn), unpacked_ = (uint8_t*)memory + kOwn + kept, tail_ = unpacked_ + unpacked;
  }

  void run() {
    for (from_ = 0; from_ < rows_.padded; from_ += rows_.chunk) {
      width_ = std::min(rows_.chunk, rows_.padded - from_), last_ = from_ + width_ >= rows_.padded;
      for (turn_ = panels_.begin; turn_ < panels_.end; ++turn_) add_chunk();
    }
  }

 private:
  static constexpr int64_t kOwn = 2 * TILE_ROWS * kPanel * 4;  // bytes of two tiles' rows of sums
  static constexpr int64_t kAll = 2 * TILE_ROWS;               // rows: more than are ever pending

  int64_t panel_of(int64_t turn) const { return results_.panel_of(turn); }

  const uint8_t* weights_at(int64_t turn, int64_t from) const {
    return (const uint8_t*)w_.data + weight_bytes(w_, (panel_of(turn) * rows_.padded + from) * kPanel);
  }

  void add_chunk() {
    panel_ = panel_of(turn_), at_ = weights_at(turn_, from_);
    next_ = turn_ + 1 < panels_.end ? weights_at(turn_ + 1, from_) : last_ ? at_ + chunk_bytes() : weights_at(panels_.begin, from_ + width_);
    if (w_.kind == LINEAR_BF16)
      pairs(as_they_lie());
    else if (w_.kind == LINEAR_E4M3_A16)
      w_.group ? pairs_by_groups(widened_e4m3()) : pairs(widened_e4m3());
    else
      integers(rows_.widened || w_.kind != LINEAR_W8 ? bytes() : as_they_lie());
  }

  int64_t chunk_bytes() const { return weight_bytes(w_, width_ * kPanel); }

  // Of a chunk's weights, where they aren't read as they lie, in whole steps; fp8's scales lie behind them.
  int64_t unpacked_bytes() const {
    if (w_.kind == LINEAR_BF16 || w_.kind == LINEAR_W8) return 0;
    const int64_t scales = w_.kind == LINEAR_E4M3_A16 && w_.group ? rows_.chunk / w_.group * kPanel * 4 : 0;
    return up(std::min(rows_.chunk, rows_.padded), rows_.inputs) / rows_.inputs * kStepBytes + scales;
  }

  AmxWeights as_they_lie() {
    const int64_t steps = width_ / rows_.inputs, rest = weight_bytes(w_, width_ % rows_.inputs * kPanel);
    const AmxWeights found{at_, tail_, from_ / rows_.inputs, steps, rest ? 1 : 0};
    if (rest) std::memcpy(tail_, at_ + steps * kStepBytes, size_t(rest)), std::memset(tail_ + rest, 0, size_t(kStepBytes - rest));
    return found;
  }

  AmxWeights unpacked() const {
    return {unpacked_, tail_, from_ / rows_.inputs, up(width_, rows_.inputs) / rows_.inputs, 0};
  }

  AmxWeights widened_e4m3() {
    widen_e4m3(at_, width_ / 4, (uint16_t*)unpacked_);
    const AmxWeights found = unpacked();
    std::memset(unpacked_ + width_ * kPanel * 2, 0, size_t(found.steps * kStepBytes - width_ * kPanel * 2));
    return found;
  }

  AmxWeights bytes() {
    if (rows_.widened)
      widen({at_, (width_ + w_.group - 1) / w_.group, w_.group / 8, w_.group / 8, kZero4, w_.scales + scale_at(w_.group), nullptr, 0},
            unpacked_);
    else if (w_.kind == LINEAR_CODES)
      look_up(at_, width_ / 8, table_of(w_), unpacked_);
    else
      unpack_w4(at_, width_ / 8, unpacked_);
    const AmxWeights found = unpacked();
    std::memset(unpacked_ + width_ * kPanel, 0, size_t(found.steps * kStepBytes - width_ * kPanel));
    return found;
  }

  // Where the scales of the chunk's groups begin.
  int64_t scale_at(int64_t group) const { return (panel_ * (rows_.padded / group) + from_ / group) * kPanel; }

  // A strip of steps of one block: two tiles of rows by half a panel, or one by a whole one.
  struct Strip {
    int64_t tile, column, begin, end;
    float* sums;  // of the block's rows, 64 apart
    bool done;    // the last one of its columns
  };

  // What becomes of a strip's products while the next one's are under way: tiles and vectors then work side by side.
  struct Pending {
    Strip strip;
    bool two;
    int64_t rows, at;  // of them; the first that is left
    bool is_left() const { return at < rows; }
  };

  // f(whether two tiles of rows, a strip) for all tiles: strips of so many steps one after another, both halves of the panel in each,
  // so that the rows' strip and the sums stay in the nearest cache.
  template <class F>
  void each_strip(int64_t steps, int64_t strip, F&& f) {
    for (int64_t t = begin_; t + 1 < end_; t += 2) pass<true>(t, steps, strip, f);
    if ((end_ - begin_) % 2) pass<false>(end_ - 1, steps, strip, f);
  }

  template <bool Two, class F>
  BATON_INLINE void pass(int64_t tile, int64_t steps, int64_t strip, F& f) {
    const int64_t first = tile * rows_.per_tile, rows = (Two ? 2 : 1) * rows_.per_tile;
    float* sums = rows_.chunks() > 1 ? kept_ + (turn_ - panels_.begin) * size_ + (first - begin_ * rows_.per_tile) * kPanel : own_;
    const int64_t count = std::min(rows, rows_.m - first);
    ahead_.results = last_ ? results_.lines<kPanel>(panel_ * kPanel, first, count) : ResultRows{};
    for (int64_t begin = 0; begin < steps; begin += strip)
      for (int64_t column = 0; column < kPanel; column += Two ? kPanel / 2 : kPanel)
        f(std::bool_constant<Two>(), Strip{tile, column, begin, std::min(begin + strip, steps), sums, begin + strip >= steps});
  }

  // Rows `at` … `at` + `count` - 1 of a strip's sums, with those of the last chunk, go where they belong.
  template <bool Two>
  void finish(const Strip& strip, int64_t at, int64_t count) const {
    const int64_t first = strip.tile * rows_.per_tile + at, there = std::min(count, rows_.m - first);
    if (strip.done && last_ && there > 0)
      results_.write<AmxSums<Two>::columns>(panel_ * kPanel + strip.column, first, there, strip.sums + at * kPanel + strip.column);
  }

  // A strip's products, piece by piece; behind each, `settle` has its part of the pending rows.
  template <TileProduct P, bool Two, class F>
  BATON_INLINE void multiply(const AmxWeights& weights, const Strip& strip, Pending& pending, F&& settle) {
    const auto add = [&](const uint8_t* w, int64_t step, int64_t steps) BATON_LAMBDA {
      add_products<P, Two>(rows_, strip.tile, step, w + 4 * strip.column, steps, ahead_);
    };
    if (!pending.is_left()) return weights.each_run(strip.begin, strip.end, add);
    const int64_t pieces = (strip.end - strip.begin + kAmxPiece - 1) / kAmxPiece, each = (pending.rows + pieces - 1) / pieces;
    for (int64_t begin = strip.begin; begin < strip.end; begin += kAmxPiece) {
      weights.each_run(begin, std::min(begin + kAmxPiece, strip.end), add);
      settle(each);
    }
  }

  // The next `count` pending rows, f(whether of two tiles, the first row, how many).
  template <class F>
  BATON_INLINE void settle(Pending& pending, int64_t count, F&& f) {
    const int64_t at = pending.at, rows = std::min(count, pending.rows - at);
    if (rows <= 0) return;
    pending.at += rows;
#ifdef BATON_MUTATION_AMX_PENDING
    if (at > 0 && at + rows == pending.rows) return;  // a planted bug: the last rows are forgotten
#endif
    pending.two ? f(std::true_type(), at, rows) : f(std::false_type(), at, rows);
  }

  // What comes behind the chunk is fetched evenly beside its products.
  void fetch_beside(const AmxWeights& weights) {
    const int64_t blocks = end_ - begin_, steps = std::max<int64_t>(1, blocks * weights.all()), lines = chunk_bytes() / 64;
    ahead_ = {(const char*)next_, (lines + steps - 1) / steps, {}};
  }

  // bf16: sums stay floats in tiles and go on where they left off, so that strips and chunks don't show in them.
  void pairs(const AmxWeights& weights) {
    fetch_beside(weights);
    const int64_t strips = end_ - begin_ > kAmxFew ? (weights.all() + kAmxStrip - 1) / kAmxStrip : 1;
    Pending pending{};
    const auto settle_some = [&](int64_t count) {
      settle(pending, count, [&](auto two, int64_t at, int64_t rows) { finish<two()>(pending.strip, at, rows); });
    };
    each_strip(weights.all(), (weights.all() + strips - 1) / strips, [&](auto two, const Strip& strip) BATON_LAMBDA {
      const AmxSums<two()> sums(strip.sums, rows_.per_tile, strip.column);
#ifdef BATON_MUTATION_AMX_CHUNK
      zero_tiles();  // a planted bug: earlier chunks are forgotten
#else
      from_ + strip.begin ? sums.load() : zero_tiles();
#endif
      multiply<TILE_BF16, two()>(weights, strip, pending, settle_some);
      settle_some(kAll);
      sums.store();
      if (strip.done && last_) pending = {strip, two(), sums.rows(rows_.per_tile), 0};
    });
    settle_some(kAll);
  }

  // Each group's sum times its scales is added to the rows'.
  void pairs_by_groups(const AmxWeights& weights) {
    fetch_beside(weights);
    float* scales = (float*)(unpacked_ + weights.steps * kStepBytes);
    for (int64_t i = 0; i < width_ / w_.group * kPanel; ++i) scales[i] = from_fp16(w_.scales[scale_at(w_.group) + i]);
    alignas(64) float part[2 * TILE_ROWS * kPanel];
    const int64_t each = w_.group / rows_.inputs;
    each_strip(width_ / w_.group * each, each, [&](auto two, const Strip& strip) BATON_LAMBDA {
      const AmxSums<two()> sums(part, rows_.per_tile, strip.column);
      zero_tiles();
      weights.each_run(strip.begin, strip.end, [&](const uint8_t* w, int64_t step, int64_t steps) BATON_LAMBDA {
        add_products<TILE_BF16, two()>(rows_, strip.tile, step, w + 4 * strip.column, steps, ahead_);
      });
      sums.store();
      for (int64_t n = strip.column; n < strip.column + sums.columns; n += LANES)
        for (int64_t r = 0; r < sums.rows(rows_.per_tile); ++r) {
          float* to = strip.sums + r * kPanel + n;
          store(to, (from_ + strip.begin ? load(to) : vf{}) + load(part + r * kPanel + n) * load(scales + strip.begin / each * kGroupStride + n));
        }
      finish<two()>(strip, 0, sums.rows(rows_.per_tile));
    });
  }

  void integers(const AmxWeights& weights) {
    const TileWeights w{nullptr, 0, 0, 0, rows_.zero, rows_.widened ? nullptr : w_.scales,
                        has_mins(w_) && !rows_.widened ? w_.mins : nullptr, 0};
    if (w.mins)
      by_groups<SCALES_AND_MINS>(weights, w);
    else if (w.scales)
      by_groups<SCALES>(weights, w);
    else
      by_groups<NO_SCALES>(weights, w);
  }

  // A strip's integers are scaled beside the next one's products, since tiles are stored long after they were asked for.
  template <Scales S>
  void by_groups(const AmxWeights& weights, const TileWeights& w) {
    fetch_beside(weights);
    alignas(64) int32_t whole[2 * TILE_ROWS * kPanel];
    const int64_t each = rows_.group / rows_.inputs;
    Pending pending{};
    const auto settle_some = [&](int64_t count) {
      settle(pending, count, [&](auto two, int64_t at, int64_t rows) {
        const Strip& strip = pending.strip;
        const int64_t g = strip.begin / each, start = (strip.tile * rows_.per_tile + at) * rows_.groups + from_ / rows_.group + g;
        add_group<S>(whole + at * kPanel, rows_.starts + start, rows_.groups, rows, strip.column,
                     strip.column + AmxSums<two()>::columns, w, S == NO_SCALES ? 0 : scale_at(rows_.group) + g * kGroupStride,
                     from_ + strip.begin == 0, strip.sums + at * kPanel);
        finish<two()>(strip, at, rows);
      });
    };
    each_strip(weights.all(), each, [&](auto two, const Strip& strip) BATON_LAMBDA {
      const AmxSums<two()> sums(whole, rows_.per_tile, strip.column);
      zero_tiles();
      multiply<TILE_S8_U8, two()>(weights, strip, pending, settle_some);
      settle_some(kAll);
      sums.store();
      pending = {strip, two(), sums.rows(rows_.per_tile), 0};
    });
    settle_some(kAll);
  }

  const PackedLinear& w_;
  const AmxRows& rows_;
  const Results& results_;
  const Range panels_;
  const int64_t begin_, end_;                    // tiles of rows
  int64_t size_;                                 // sums of a panel
  int64_t from_ = 0, width_ = 0, turn_ = 0, panel_ = 0;  // the chunk's inputs, and the panel that passes it, in its turn
  bool last_ = false;                            // of the chunks
  const uint8_t *at_ = nullptr, *next_ = nullptr;  // its weights, and those behind them
  float *own_, *kept_;                           // [row of two tiles][64], and [panel][row from the first tile's first on][64]
  uint8_t *unpacked_, *tail_;
  AmxAhead ahead_{};  // of the chunk, and of a block's results
};

// Blocks of rows, more of them where there are too few panels for the threads.
inline int64_t amx_blocks(const AmxRows& rows, int64_t panels) {
  const int64_t fit = up(rows.tiles, rows.block()) / rows.block(), wanted = (2 * threads() + panels - 1) / panels;
  return std::max(fit, threads() > 1 ? std::min(wanted, rows.tiles / 2) : 1);
}

// Runs of panels that a thread takes one after another, since each fetches the next one's weights: a few for each thread.
inline int64_t amx_runs(const AmxRows& rows, int64_t panels, int64_t blocks) {
  const int64_t most = rows.chunks() > 1 ? kAmxPanels : panels, least = (panels + most - 1) / most;
  return std::min(panels, std::max(least, (4 * threads() + blocks - 1) / blocks));
}

inline void amx_linear(const PackedLinear& w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m, const Results& results,
                       const NormedRows* normed = nullptr) {
  const AmxRows rows = prepare_amx(w, x, x_dtype, x_stride, m, normed);
  Results own = results;
  own.row_scales = rows.inputs == 32 ? nullptr : rows.scales;
  const int64_t panels = (w.n + kPanel - 1) / kPanel, blocks = amx_blocks(rows, panels), runs = amx_runs(rows, panels, blocks);
  const bool few = rows.tiles <= 2;  // then a run is a long stream from memory
  parallel_for(int32_t(runs * blocks), [&](int32_t task) {
    const TileUse use(rows.per_tile);
    const Range run = part(panels, own.gates ? 2 : 1, int32_t(runs), int32_t(task % runs)), tiles = part(rows.tiles, 1, int32_t(blocks), int32_t(task / runs));
    if (!few) return AmxPanels(w, rows, own, run, tiles).run();
    for (int64_t panel = run.begin; panel < run.end; ++panel) AmxPanels(w, rows, own, {panel, panel + 1}, tiles).run();
  });
}

}  // namespace
}  // namespace baton
#endif
