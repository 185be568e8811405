// linear by AMX tiles: a panel's chunks of weights against a block of rows. Knows nothing of models. Included by cpu.cpp alone.
//
//   per block of rows and panel:  for each chunk of K:  [int4 or fp8 made wider]  for each two tiles of rows: amx_tiles.h
#pragma once
#include "amx_tiles.h"
#include "results.h"
#include "widen.h"

#if BATON_AMX
namespace baton {
namespace {

class AmxPanel {
 public:
  AmxPanel(const PackedLinear& w, const AmxRows& rows, const Results& results, int64_t panel, int64_t begin, int64_t end)
      : w_(w), rows_(rows), results_(results), panel_(panel), begin_(begin), end_(end) {
    const int64_t size = (end - begin) * rows.per_tile * kPanel * 4, unpacked = unpacked_bytes();
    char* memory = (char*)scratch(SCRATCH_TASK, size_t(size + unpacked + 2 * kStepBytes));
    sums_ = (float*)memory, unpacked_ = (uint8_t*)memory + size, tail_ = unpacked_ + unpacked;
    std::memset(sums_, 0, size_t(size));
  }

  void run() {
    for (from_ = 0; from_ < rows_.padded; from_ += rows_.chunk) {
      width_ = std::min(rows_.chunk, rows_.padded - from_);
      at_ = (const uint8_t*)w_.data + weight_bytes(w_, (panel_ * rows_.padded + from_) * kPanel);
      if (w_.kind == LINEAR_BF16)
        pairs(as_they_lie());
      else if (w_.kind == LINEAR_E4M3_A16)
        w_.group ? pairs_by_groups(widened_e4m3()) : pairs(widened_e4m3());
      else
        integers(rows_.widened || w_.kind != LINEAR_W8 ? bytes() : as_they_lie());
    }
    const int64_t first = begin_ * rows_.per_tile, last = std::min(end_ * rows_.per_tile, rows_.m);
    results_.write<kPanel>(panel_ * kPanel, first, last - first, sums_);
  }

 private:
  // Of a chunk's weights, where they aren't read as they lie, in whole steps; fp8's scales lie behind them.
  int64_t unpacked_bytes() const {
    if (w_.kind == LINEAR_BF16 || w_.kind == LINEAR_W8) return 0;
    const int64_t scales = w_.kind == LINEAR_E4M3_A16 && w_.group ? rows_.chunk / w_.group * kPanel * 4 : 0;
    return up(std::min(rows_.chunk, rows_.padded), rows_.inputs) / rows_.inputs * kStepBytes + scales;
  }

  AmxWeights as_they_lie() {
    const int64_t steps = width_ / rows_.inputs, rest = weight_bytes(w_, width_ % rows_.inputs * kPanel);
    const AmxWeights found{at_, rest ? tail_ : nullptr, from_ / rows_.inputs, steps};
    if (rest) std::memcpy(tail_, at_ + steps * kStepBytes, size_t(rest)), std::memset(tail_ + rest, 0, size_t(kStepBytes - rest));
    return found;
  }

  AmxWeights unpacked() const {
    return {unpacked_, nullptr, from_ / rows_.inputs, up(width_, rows_.inputs) / rows_.inputs};
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

  // f(whether two tiles of rows, the first one, the first column) for all tiles; half a panel stays in the nearest cache for its
  // rows.
  template <class F>
  void each_block(F&& f) const {
    for (int64_t column = 0; column < kPanel; column += kPanel / 2)
      for (int64_t t = begin_; t + 1 < end_; t += 2) f(std::true_type(), t, column);
    if ((end_ - begin_) % 2) f(std::false_type(), end_ - 1, int64_t(0));
  }

  // What comes behind the chunk is fetched evenly beside its products.
  AmxAhead ahead(const AmxWeights& weights) const {
    const int64_t blocks = (end_ - begin_) / 2 * 2 + (end_ - begin_) % 2, steps = std::max<int64_t>(1, blocks * weights.all());
    const int64_t lines = weight_bytes(w_, width_ * kPanel) / 64;
    return {(const char*)at_ + weight_bytes(w_, width_ * kPanel), (lines + steps - 1) / steps};
  }

  float* sums_of(int64_t tile) const { return sums_ + (tile - begin_) * rows_.per_tile * kPanel; }

  // bf16: sums stay floats in tiles and go on where they left off, so that chunks don't show in them.
  void pairs(const AmxWeights& weights) {
    AmxAhead beside = ahead(weights);
    each_block([&](auto two, int64_t tile, int64_t column) {
      const AmxSums<two()> sums(sums_of(tile), rows_.per_tile, column);
#ifdef BATON_MUTATION_AMX_CHUNK
      zero_tiles();  // a planted bug: earlier chunks are forgotten
#else
      sums.load();
#endif
      weights.each_run(0, weights.all(), [&](const uint8_t* w, int64_t step, int64_t steps) {
        add_products<TILE_BF16, two()>(rows_, tile, step, w + 4 * column, steps, beside);
      });
      sums.store();
    });
  }

  // Each group's sum times its scales is added to the rows'.
  void pairs_by_groups(const AmxWeights& weights) {
    AmxAhead beside = ahead(weights);
    float* scales = (float*)(unpacked_ + weights.steps * kStepBytes);
    for (int64_t i = 0; i < width_ / w_.group * kPanel; ++i) scales[i] = from_fp16(w_.scales[scale_at(w_.group) + i]);
    alignas(64) float part[2 * TILE_ROWS * kPanel];
    each_block([&](auto two, int64_t tile, int64_t column) {
      const AmxSums<two()> sums(part, rows_.per_tile, column);
      for (int64_t g = 0, each = w_.group / rows_.inputs; g < width_ / w_.group; ++g) {
        zero_tiles();
        weights.each_run(g * each, (g + 1) * each, [&](const uint8_t* w, int64_t step, int64_t steps) {
          add_products<TILE_BF16, two()>(rows_, tile, step, w + 4 * column, steps, beside);
        });
        sums.store();
        for (int64_t n = column; n < (two() ? column + kPanel / 2 : kPanel); n += LANES)
          for (int64_t r = 0; r < (two() ? 2 : 1) * rows_.per_tile; ++r) {
            float* to = sums_of(tile) + r * kPanel + n;
            store(to, load(to) + load(part + r * kPanel + n) * load(scales + g * kGroupStride + n));
          }
      }
    });
  }

  void integers(const AmxWeights& weights) {
    const TileWeights w{nullptr, (width_ + rows_.group - 1) / rows_.group, 0, 0, rows_.zero, rows_.widened ? nullptr : w_.scales,
                        has_mins(w_) && !rows_.widened ? w_.mins : nullptr, 0};
    if (w.mins)
      by_groups<SCALES_AND_MINS>(weights, w);
    else if (w.scales)
      by_groups<SCALES>(weights, w);
    else
      by_groups<NO_SCALES>(weights, w);
  }

  template <Scales S>
  void by_groups(const AmxWeights& weights, const TileWeights& w) {
    AmxAhead beside = ahead(weights);
    alignas(64) int32_t whole[2 * TILE_ROWS * kPanel];
    const int64_t each = rows_.group / rows_.inputs;
    each_block([&](auto two, int64_t tile, int64_t column) {
      const AmxSums<two()> sums(whole, rows_.per_tile, column);
      for (int64_t g = 0; g < w.groups; ++g) {
        zero_tiles();
        weights.each_run(g * each, std::min((g + 1) * each, weights.all()), [&](const uint8_t* from, int64_t step, int64_t steps) {
          add_products<TILE_S8_U8, two()>(rows_, tile, step, from + 4 * column, steps, beside);
        });
        sums.store();
        const int32_t* starts = rows_.starts + tile * rows_.per_tile * rows_.groups + from_ / rows_.group + g;
        add_group<S>(whole, starts, rows_.groups, (two() ? 2 : 1) * rows_.per_tile, column, two() ? column + kPanel / 2 : kPanel, w,
                     S == NO_SCALES ? 0 : scale_at(rows_.group) + g * kGroupStride, sums_of(tile));
      }
    });
  }

  const PackedLinear& w_;
  const AmxRows& rows_;
  const Results& results_;
  const int64_t panel_, begin_, end_;  // tiles of rows
  int64_t from_ = 0, width_ = 0;       // the chunk's inputs
  const uint8_t* at_ = nullptr;        // its weights
  float* sums_;                        // [row from the first tile's first on][64]
  uint8_t *unpacked_, *tail_;
};

// Blocks of rows, more of them where there are too few panels for the threads.
inline int64_t amx_blocks(const AmxRows& rows, int64_t panels) {
  const int64_t fit = up(rows.tiles, kAmxBlock) / kAmxBlock, wanted = (2 * threads() + panels - 1) / panels;
  return std::max(fit, threads() > 1 ? std::min(wanted, rows.tiles / 2) : 1);
}

inline void amx_linear(const PackedLinear& w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m, const Results& results) {
  const AmxRows rows = prepare_amx(w, x, x_dtype, x_stride, m);
  Results own = results;
  own.row_scales = rows.inputs == 32 ? nullptr : rows.scales;
  const int64_t panels = (w.n + kPanel - 1) / kPanel, blocks = amx_blocks(rows, panels);
  const bool few = rows.tiles <= 2;  // then each part of the panels is a long stream from memory
  const int32_t parts = int32_t(few ? std::min<int64_t>(panels, 4 * threads()) : panels * blocks);
  parallel_for(parts, [&](int32_t task) {
    const TileUse tiles(rows.per_tile);
    if (!few) {
      const Range block = part(rows.tiles, 1, int32_t(blocks), int32_t(task / panels));
      return AmxPanel(w, rows, own, task % panels, block.begin, block.end).run();
    }
    const Range range = part(panels, 1, parts, task);
    for (int64_t panel = range.begin; panel < range.end; ++panel) AmxPanel(w, rows, own, panel, 0, rows.tiles).run();
  });
}

}  // namespace
}  // namespace baton
#endif
