// linear on a CPU: quantize or round the rows once, then panels of 64 outputs over the threads. Knows nothing of models.
//
//   per block of rows and panel:  for each chunk of K:  [int4 to int8]  for each tile of rows: tiles.h
//
// A chunk's weights stay in a near cache for all the block's rows (rows.h: kChunk), and so do the rows' float sums where
// there are several chunks. The activations lie as they are read, so that they stream in from wherever they are.
#include "linear.h"

#include <atomic>
#include <vector>

#include "../abi/shares.h"
#include "../rms_norm/normed.h"
#include "../swiglu/product.h"
#include "panels/amx_panels.h"
#include "panels/half_panel.h"
#include "panels/narrow_forms.h"
#include "panels/order.h"
#include "panels/outliers.h"
#include "panels/results.h"
#include "panels/rows.h"
#include "panels/widen.h"

namespace baton {
namespace {

constexpr int64_t kGatedFrom = 33;  // rows from which on gates are kept; fewer read their weights as one stream from memory
constexpr int64_t kBlock = 126, kWideBlock = 1020;  // rows; where weights are widened first, once a block

struct Call {
  const PackedLinear* w;
  Rows rows;
  Results results;
  NibbleTable nibbles;
  ByteTable bytes;
};

template <int R, class F>
BATON_INLINE void with_rows(int64_t rows, F&& f) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, f);
  f(std::integral_constant<int, R>());
}

// The tiles [begin, end) of rows against one chunk of one panel, or of half of one.
struct Work {
  int64_t panel, from, begin, end;
  int64_t column;  // the first of the panel's 64 outputs
  bool one_tile;  // the sums are one tile's, else [row from the first tile's first on][64]
  float* sums;
  uint8_t* unpacked;
  const char* at;  // the weights
  int64_t bytes;   // of them
};

// Where small groups store many sums, results are written when all of them are there: a store to memory far away keeps those
// behind it waiting.
bool writes_each_tile(const Rows& rows) { return rows.halves || rows.group >= 128; }

// The rows' sums begin at zero.
template <int Columns>
BATON_INLINE void clear(int64_t m, float* sums) {
  if (Columns == kPanel) return (void)std::memset(sums, 0, m * kPanel * 4);
  for (int64_t r = 0; r < m; ++r) std::memset(sums + r * kPanel, 0, Columns * 4);
}

// A tile alone reads weights from memory, and asks for them so far ahead, since hardware stops at every page. Of several, and of a
// tile that passes its chunk more than once, the first four fetch a share each of what comes after the chunk.
constexpr int64_t kAhead = 12288;

// Tile t's share of `bytes` from `next` on, where rows are wide or weights are made bf16: all of it in one's steps.
inline Ahead share_of(const char* next, int64_t bytes, int64_t t, int64_t tiles) {
  const int64_t share = bytes / std::min<int64_t>(tiles, 4);
  return Ahead{next + t * share, 0, share};
}

// What tile t of so many asks for beside its products.
BATON_INLINE Ahead ahead_of(const Rows& rows, const Work& work, int64_t t, int64_t tiles) {
  const char* next = work.at + work.bytes;
  if (tiles == 1 && !rows.spread() && !rows.made_bf16) return {work.at + kAhead, 64, 256};
  if (t >= 4 || work.column) return {next, 0, 0};
  if (rows.made_bf16) return spread(share_of(next, work.bytes, t, tiles), rows.width(work.from) / 2);
  return rows.spread() ? share_of(next, work.bytes, t, tiles) : Ahead{next + t * work.bytes / 4, 0, 64};
}

// f(size as a constant, the tile's rows) for each tile, whose sums begin at zero and end in the result.
template <int Columns = kPanel, class F>
BATON_INLINE void each_tile(const Call& call, const Work& work, F&& f) {
  const Rows& rows = call.rows;
  const bool last = work.from + rows.chunk >= rows.padded, each = writes_each_tile(rows);
  const Results& results = call.results;
  const int64_t base = rows.first(work.begin), tiles = work.end - work.begin, n0 = work.panel * kPanel + work.column;
  for (int64_t t = 0; t < tiles; ++t) {
    int64_t first = rows.first(work.begin + t), count = rows.first(work.begin + t + 1) - first;
    float* sums = work.sums + (work.one_tile ? 0 : first - base) * kPanel + work.column;
#ifdef BATON_MUTATION_LINEAR_CHUNK
    clear<Columns>(count, sums);  // earlier chunks are forgotten
#else
    if (!work.from) clear<Columns>(count, sums);
#endif
    TileRows tile{rows.at(work.from, first),
                  rows.starts + first * rows.groups + Rows::before(work.from, rows.group) * count,
                  sums,
                  ahead_of(rows, work, t, tiles),
                  results.lines<Columns>(n0, first, last ? count : 0)};
    with_rows<kRows>(count, [&](auto size) { f(size, tile); });
    if (last && each) results.write<Columns>(n0, first, count, sums);
  }
  if (last && !each) results.write<Columns>(n0, base, rows.first(work.end) - base, work.sums + work.column);
}

void chunk_bf16(const Call& call, const Work& work) {
  const Rows& rows = call.rows;
  int64_t steps = rows.width(work.from) / 2;
  each_tile(call, work, [&](auto size, const TileRows& tile) { tile_bf16<size>((const bf16*)work.at, steps, tile); });
}

void chunk_widened(const Call& call, const Work& work) {
  const Rows& rows = call.rows;
  const PackedLinear& w = *call.w;
  const int64_t width = rows.width(work.from), groups = !w.group || width == rows.padded ? rows.groups : width / w.group;
  const int64_t from = w.group ? (work.panel * rows.groups + Rows::before(work.from, w.group)) * kPanel : 0;
  const GroupScales scales{w.scales + from, has_mins(w) ? w.mins + from : nullptr};
  with_floats(w, call.nibbles, (const uint8_t*)work.at, width, rows.m, (uint16_t*)work.unpacked, [&](const auto& floats) {
    each_tile(call, work, [&](auto size, const TileRows& tile) {
      if (!w.group) return floats.template add<size>(0, width, tile);
      tile_groups<size>(floats, width, w.group, groups, scales, tile, rows.are_e4m3);
    });
  });
}

void chunk_integers(const Call& call, const Work& work) {
  const Rows& rows = call.rows;
  const PackedLinear& w = *call.w;
  const int64_t width = rows.width(work.from);
  int64_t scale_at = (work.panel * rows.scales_of + Rows::before(work.from, rows.scaled)) * kPanel + work.column;
#ifdef BATON_MUTATION_LINEAR_HALF
  scale_at -= work.column;  // the second half of a panel takes the first one's scales
#endif
  const bool codes = w.kind == LINEAR_CODES;
  const Steps steps = rows.is_whole(width) ? rows.steps : Steps(width, rows.scaled, w.kind == LINEAR_W8 ? 4 : 8);
  TileWeights packed{(const uint8_t*)work.at + 4 * work.column, steps.groups, steps.each, steps.last, rows.zero, nullptr, nullptr, 0};
  packed.scales = w.scales ? w.scales + scale_at : nullptr, packed.mins = has_mins(w) ? w.mins + scale_at : nullptr;
  if (w.exact) packed.exact = w.exact / rows.scaled;
#if BATON_AVX512
  if (codes && rows.in_registers) {
    return each_tile(call, work, [&](auto size, const TileRows& tile) { tile_codes<size>(packed, tile, call.bytes.at); });
  }
  if (rows.halves)
    return each_tile<kPanel / 2>(call, work, [&](auto size, const TileRows& tile) { half_tile_w4<size>(packed, tile); });
#endif
#if BATON_AVX2
  if (rows.in_registers) return each_tile(call, work, [&](auto size, const TileRows& tile) { tile_w4<size>(packed, tile); });
#endif
  TileWeights bytes = packed;
  if (rows.widened) {
    widen(packed, work.unpacked);
    const Steps wide(width, rows.group, 4);
    bytes = {work.unpacked, wide.groups, wide.each, wide.last, rows.zero, nullptr, nullptr, 0};
  } else if (w.kind != LINEAR_W8) {
    codes ? look_up(packed.w, width / 8, table_of(w), work.unpacked) : unpack_w4(packed.w, width / 8, work.unpacked);
    bytes.w = work.unpacked, bytes.steps *= 2, bytes.last *= 2;
  }
  each_tile(call, work, [&](auto size, const TileRows& tile) { tile_w8<size>(bytes, tile); });
}

// Of a chunk's weights as the tiles read them, where they aren't read as they lie.
int64_t unpacked_bytes(const PackedLinear& w, const Rows& rows) {
  const int64_t width = rows.width(0);
  if (becomes_bf16(w.kind)) return 2 * width * kPanel;
  return (w.kind == LINEAR_CODES || w.kind == LINEAR_W4) && !rows.in_registers ? width * kPanel : 0;
}

void one_panel(const Call& call, int64_t panel, int64_t begin, int64_t end) {
  const Rows& rows = call.rows;
  bool one_tile = rows.chunk >= rows.padded && writes_each_tile(rows);
  int64_t sums = (one_tile ? kRows : rows.first(end) - rows.first(begin)) * kPanel;
  char* memory = (char*)scratch(SCRATCH_TASK, sums * 4 + unpacked_bytes(*call.w, rows));
  Work work{panel, 0, begin, end, 0, one_tile, (float*)memory, (uint8_t*)memory + sums * 4, nullptr, 0};
  for (; work.from < rows.padded; work.from += rows.chunk) {
    work.at = (const char*)call.w->data + weight_bytes(*call.w, (panel * rows.padded + work.from) * kPanel);
    work.bytes = weight_bytes(*call.w, rows.width(work.from) * kPanel);
    for (work.column = 0; work.column < kPanel; work.column += rows.halves ? kPanel / 2 : kPanel)
      if (call.w->kind == LINEAR_BF16)
        chunk_bf16(call, work);
      else if (becomes_bf16(call.w->kind))
        chunk_widened(call, work);
      else
        chunk_integers(call, work);
  }
}

// Blocks of rows: as few as fit the cache, more where there are too few panels for the threads. Where weights are widened a
// thread has a block of its own, unless it were small: then its rows stay in its cache.
int64_t blocks(const Rows& rows, int64_t panels) {
  if (rows.widened) return std::max(up(rows.m, kWideBlock) / kWideBlock, std::min<int64_t>(threads(), rows.m / 128));
  int64_t fit = up(rows.m, kBlock) / kBlock, wanted = (2 * threads() + panels - 1) / panels;
  return std::min(std::max(fit, threads() > 1 ? wanted : 1), std::max<int64_t>(fit, rows.m / 48));
}

// Few rows: a thread's panels are one stream from memory.
void few_rows(const Call& call, int64_t panels) {
  each_item(panels, [&](int64_t panel) { one_panel(call, panel, 0, call.rows.tiles); });
}

// Many rows: panels singly, so that threads end together; a thread begins with a block of its own, then helps with others.
// What threads on lent cores have left is the caller's.
void many_rows(const Call& call, int64_t panels) {
  const int64_t split = blocks(call.rows, panels), tasks = threads(), each = call.results.gates ? 2 : 1;
  std::vector<std::atomic<int64_t>> taken(split);
  const auto take = [&](int64_t first, bool leaves) {
    for (int64_t i = 0; i < split; ++i) {
      const int64_t block = (first + i) % split;
      const Range tiles = part(call.rows.tiles, 1, int32_t(split), int32_t(block));
      for (int64_t turn; !(leaves && wanted_back()) && (turn = each * taken[block]++) < panels;)
        for (int64_t own = turn; own < turn + each; ++own) one_panel(call, call.results.panel_of(own), tiles.begin, tiles.end);
    }
  };
  parallel_for(int32_t(tasks), [&](int32_t task) { take(task * split / tasks, true); });
  take(0, false);
}

void linear(const PackedLinear& w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m, const Results& results) {
#if BATON_AMX
  if (by_amx(w, m)) return amx_linear(w, x, x_dtype, x_stride, m, results);
#endif
  const Rows rows = prepare(w, x, x_dtype, x_stride, m);
  Call call{&w, rows, results, NibbleTable(w), ByteTable(w.kind == LINEAR_CODES ? table_of(w) : nullptr)};
  call.results.row_scales = rows.unit == 4 || (rows.are_e4m3 && !w.group) ? rows.scales : nullptr;
  const int64_t panels = (w.n + kPanel - 1) / kPanel;
  m > 16 ? many_rows(call, panels) : few_rows(call, panels);
}

void with_outliers(const PackedLinear& w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m, const Results& results) {
  PackedLinear plain = w;
  plain.kind = LINEAR_W8, plain.mins = nullptr;
  std::vector<float> rest(size_t(m * w.k));
  const std::vector<Outlier> outliers = split_rows(x, x_dtype, x_stride, m, w.k, threshold_of(w), rest.data());
  Results own = results;
  own.w = &plain;
  linear(plain, rest.data(), F32, w.k, m, own);
  add_outliers(w, outliers, results.out, results.dtype, results.stride);
}

// From the last order to the first: where two meet within a panel, its outputs before those of the latter are written twice, at last
// by the former.
void with_order(const PackedLinear& w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m, const Results& results) {
  const Order* orders = orders_of(w);
  PackedLinear plain = w;
  plain.kind += (form_of(w.kind) == LINEAR_W8_ORDERED ? LINEAR_W8 : LINEAR_W4) - form_of(w.kind), plain.mins = orders->mins;
  for (int64_t first, last = (w.n - 1) / orders->rows; last >= 0; last = first - 1) {
    for (first = last; first && is_same(orders[first - 1], orders[last], w.k);) --first;
    const int64_t panel = first * orders->rows / kPanel, from = panel * kPanel;
    PackedLinear part = from_panel(plain, panel);
    part.n = std::min(w.n, (last + 1) * orders->rows) - from;
    Results own = results;
    own.w = &part, own.out = (char*)results.out + from * (results.dtype == BF16 ? 2 : 4);
    if (own.bias) own.bias += from;
    linear(part, in_order(orders[last], w.k, x, x_dtype, x_stride, m).data(), F32, w.k, m, own);
  }
}

// Whether an epilogue may gate, of weights that are multiplied as a whole.
bool is_whole(const PackedLinear& w) { return w.kind < 2 * LINEAR_A16 && w.kind != LINEAR_W8_OUTLIERS && !is_ordered(w.kind); }

}  // namespace
}  // namespace baton

bool baton::rounds_to_bf16(const PackedLinear& w) {
  return w.kind == LINEAR_BF16 || (becomes_bf16(w.kind) && w.kind != LINEAR_E4M3_A8 && !is_ordered(w.kind));
}

BATON_API int32_t baton_linear_gated(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                                     const float* bias, void* out, int32_t out_dtype, int64_t out_stride) {
  using namespace baton;
  const int64_t gates = w->n / 2;
  if (m < kGatedFrom || !is_whole(*w) || w->n % (2 * kPanel)) return 0;
  Results results{w, bias, out, out_dtype, out_stride, nullptr, m};
  results.gates = gates;
  return linear(*w, x, x_dtype, x_stride, m, results), 1;
}

BATON_API int32_t baton_linear_normed(const baton::PackedLinear* w, const baton::NormedRows* rows, int64_t m, const float* bias,
                                      int32_t gated, void* out, int32_t out_dtype, int64_t out_stride) {
  using namespace baton;
#if BATON_AMX
  if (m < kGatedFrom || !is_whole(*w) || (gated && w->n % (2 * kPanel)) || !by_amx(*w, m)) return 0;
  Results results{w, bias, out, out_dtype, out_stride, nullptr, m};
  results.gates = gated ? w->n / 2 : 0;
  return amx_linear(*w, rows->x, F32, w->k, m, results, rows), 1;
#else
  return 0;
#endif
}

BATON_API void baton_linear(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                            const float* bias, void* out, int32_t out_dtype, int64_t out_stride) {
  using namespace baton;
  if (m <= 0) return;
  const Results results{w, bias, out, out_dtype, out_stride, nullptr, m};
  const auto run = w->kind == LINEAR_W8_OUTLIERS ? with_outliers : is_ordered(w->kind) ? with_order : linear;
  run(*w, x, x_dtype, x_stride, m, results);
}
