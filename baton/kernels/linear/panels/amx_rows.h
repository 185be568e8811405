// Rows of activations as AMX tiles read them, rounded once. Knows nothing of weights' values.
//
//   [tile of rows][step][row][64 bytes: 64 int8 or 32 bf16], zeros past k and behind the last row
#pragma once
#include "../../abi/amx.h"
#include "../../rms_norm/norm_row.h"
#include "../../rms_norm/normed.h"
#include "rows.h"

#if BATON_AMX

namespace baton {

// Rows of integers from which on tiles are taken; fewer wait for memory either way, and VNNI reads weights as they lie. int4 becomes
// bytes for tiles first.
constexpr int64_t kAmxRows = 8, kAmxRowsW4 = 16;
constexpr int64_t kAmxChunk = 4096;          // bytes of a row whose weights stay in the L2 cache while rows pass
constexpr int64_t kAmxStrip = 14;            // steps of two tiles of rows that stay in the nearest cache for both halves of a panel
constexpr int64_t kAmxPiece = 4;             // steps between which vectors have their turn
constexpr int64_t kAmxFew = 4;               // tiles of rows up to which weights are read from afar, and strips would save nothing
constexpr int64_t kAmxBlockBytes = 1 << 20;  // of rows that pass a panel's chunk together: they stay in the L2 cache from panel to panel
constexpr int64_t kAmxPanels = 8;            // that pass a chunk one after another, where there are several: their sums stay there, too

// Whether tiles multiply. What they make of bf16 differs in bits from what other instructions do: so all rows go by them, or none.
// Integers' sums are exact: their rows go by what is quicker, as long as a group is whole steps.
inline bool by_amx(const PackedLinear& w, int64_t m) {
  if (w.kind == LINEAR_BF16) return true;
  if (w.kind == LINEAR_E4M3_A16) return w.group % 32 == 0;
  if (becomes_bf16(w.kind)) return false;
  return m >= (w.kind == LINEAR_W8 ? kAmxRows : kAmxRowsW4) && (w.exact || w.group % 64 == 0);
}

struct AmxRows {  // what is multiplied, in the calling thread's scratch
  int64_t m, tiles, per_tile;          // per_tile: rows of a tile
  int64_t k, padded, inputs, steps;    // inputs of a step
  int64_t chunk, group, groups;        // inputs per chunk and per sum, sums per row
  bool widened;                        // int4 times its whole scales is int8
  int32_t zero;
  char* x;
  int32_t* starts;  // [row][group]: -zero x the sum of the group's activations
  float* scales;    // [row]

  int64_t rows() const { return tiles * per_tile; }
  int64_t chunks() const { return up(padded, chunk) / chunk; }
  // Tiles of rows that pass a panel together, an even number.
  int64_t block() const { return std::max<int64_t>(2, kAmxBlockBytes / (std::min(chunk / inputs, steps) * apart()) / 2 * 2); }
  int64_t apart() const { return per_tile * TILE_BYTES; }  // bytes from a tile's step to the next one
  char* at(int64_t tile, int64_t step) const { return x + (tile * steps + step) * apart(); }
};

// One row, to the places of its tile. `own`: the thread's scratch of steps x 64 bytes.
inline void deal_amx_row(const AmxRows& rows, int64_t row, const char* x, int32_t dtype, char* own) {
  std::memset(own, 0, size_t(rows.steps * TILE_BYTES));
  if (row < rows.m && rows.inputs == 32)
    round_row(x, dtype, rows.k, rows.padded, (bf16*)own);
  else if (row < rows.m)
    rows.scales[row] = quantize_row(x, x, dtype, rows.k, rows.padded, rows.group, (int8_t*)own,
                                    {rows.starts + row * rows.groups, 1, rows.zero});
  else
    std::memset(rows.starts + row * rows.groups, 0, size_t(rows.groups) * 4);
  char* to = rows.at(row / rows.per_tile, 0) + row % rows.per_tile * TILE_BYTES;
  for (int64_t s = 0; s < rows.steps; ++s, to += rows.apart(), own += TILE_BYTES) std::memcpy(to, own, TILE_BYTES);
}

// How rows lie, before there is memory for them.
inline AmxRows amx_shape(const PackedLinear& w, int64_t m) {
  AmxRows rows{};
  const bool is_float = w.kind == LINEAR_BF16 || w.kind == LINEAR_E4M3_A16;
  rows.m = m, rows.tiles = up(m, TILE_ROWS) / TILE_ROWS, rows.per_tile = up(m, rows.tiles) / rows.tiles;
  rows.k = w.k, rows.padded = up(w.k, w.group ? w.group : 8);
  rows.inputs = is_float ? 32 : 64, rows.steps = up(rows.padded, rows.inputs) / rows.inputs;
  rows.widened = w.exact != 0;
  rows.group = rows.widened ? 2 * w.exact : w.group ? w.group : is_float ? rows.padded : kSum;
  rows.groups = up(rows.padded, rows.group) / rows.group;
  rows.chunk = up(kAmxChunk * rows.inputs / TILE_BYTES, is_float && !w.group ? rows.inputs : rows.group);
  rows.zero = w.kind == LINEAR_W4 && !rows.widened ? kZero4 : kZero8;
  return rows;
}

inline const float* delta_of(const NormedRows& rows, int64_t row, int64_t k) {
#ifdef BATON_MUTATION_LINEAR_NORMED
  return rows.delta;  // a planted bug: every row gets the first one's
#else
  return rows.delta ? rows.delta + row * k : nullptr;
#endif
}

// `normed`: the rows are what norms make of these, while they are near.
inline AmxRows prepare_amx(const PackedLinear& w, const void* x, int32_t dtype, int64_t x_stride, int64_t m, const NormedRows* normed) {
  AmxRows rows = amx_shape(w, m);
  const int64_t count = rows.rows(), x_bytes = count * rows.steps * TILE_BYTES, start_bytes = up(count * rows.groups * 4, 64);
  rows.x = (char*)scratch(SCRATCH_CALLER, size_t(x_bytes + start_bytes + count * 4));
  rows.starts = (int32_t*)(rows.x + x_bytes), rows.scales = (float*)(rows.x + x_bytes + start_bytes);
  const int32_t parts = m * w.k < 1 << 15 ? 1 : int32_t(std::min<int64_t>(count, 4 * threads()));
  parallel_for(parts, [&](int32_t p) {
    const size_t bytes = size_t(rows.steps * TILE_BYTES);
    char* own = (char*)scratch(SCRATCH_TASK, bytes + (normed ? size_t(w.k) * 4 : 0));
    const Range range = part(count, 1, parts, p);
    for (int64_t r = range.begin; r < range.end; ++r) {
      const char* row = (const char*)x + std::min(r, m - 1) * x_stride * (dtype == BF16 ? 2 : 4);
      if (normed) row = own + bytes;
      if (normed && r < m)
        add_and_norm(normed->x + r * w.k, delta_of(*normed, r, w.k), normed->weight, normed->eps, w.k, (float*)row);
      deal_amx_row(rows, r, row, dtype, own);
    }
  });
  return rows;
}

}  // namespace baton
#endif
