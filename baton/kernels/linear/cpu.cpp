// linear on a CPU: quantize or round the rows once, then panels of 64 outputs over the threads. Knows nothing of models.
//
//   per panel:  for each block of rows, for each chunk of K:  [unpack int4]  for each tile of rows: tiles.h
//
// A chunk is a few hundred inputs, whole groups of the weights' scales: its weights stay in the L1 cache for all the
// block's rows, and the rows' float sums in the L2 cache from chunk to chunk. The activations lie as they are read,
// [chunk][tile of rows][step][row][4 bytes], so that they stream in from wherever they are.
#include <algorithm>

#include "../abi/threads.h"
#include "quantize_rows.h"
#include "tiles.h"

namespace baton {
namespace {

constexpr int64_t kChunk = 384, kBlock = 252;  // inputs per chunk, at least; rows per block

// Planted bugs, one per library, which the op's tests must catch.
#ifdef BATON_MUTATION_LINEAR_GROUP
constexpr int64_t kGroupStride = 0;  // every chunk takes the first one's scales
#else
constexpr int64_t kGroupStride = 1;
#endif
#ifdef BATON_MUTATION_LINEAR_ZERO
constexpr int32_t kZero4 = 7;
#else
constexpr int32_t kZero4 = 8;
#endif
#ifdef BATON_MUTATION_LINEAR_GUARD
constexpr int64_t kOver = 1;  // one output too many in the last panel
#else
constexpr int64_t kOver = 0;
#endif

int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Rows {  // what is multiplied, in the calling thread's scratch
  int64_t m, tiles, k, padded, unit;  // unit: inputs in 4 bytes
  int64_t chunk, group, groups;       // inputs per chunk and per sum, sums per row
  char* x;
  int32_t* sums;  // [m][groups]
  float* scales;  // [m]

#ifdef BATON_MUTATION_LINEAR_TILE
  int64_t first(int64_t tile) const { return tile == tiles ? m - (m > kRows) : m * tile / tiles; }  // drops a row
#else
  int64_t first(int64_t tile) const { return m * tile / tiles; }
#endif
  int64_t width(int64_t from) const { return std::min(chunk, padded - from); }
  char* at(int64_t from, int64_t row) const { return x + (from * m + row * width(from)) / unit * 4; }
};

struct Call {
  const PackedLinear* w;
  Rows rows;
  const float* bias;
  void* out;
  int32_t out_dtype;
  int64_t out_stride;
};

// Row `r` of the tile's `count` into its places.
void deal(const Rows& rows, int64_t first, int64_t r, int64_t count, const uint32_t* row) {
  for (int64_t from = 0; from < rows.padded; from += rows.chunk) {
    uint32_t* out = (uint32_t*)rows.at(from, first) + r;
    int64_t steps = rows.width(from) / rows.unit;
    for (int64_t s = 0; s < steps; ++s) out[s * count] = *row++;
  }
}

void prepare_tile(const Rows& rows, int64_t tile, const char* x, int32_t dtype, int64_t x_bytes) {
  int64_t first = rows.first(tile), count = rows.first(tile + 1) - first;
  bool alone = rows.m == 1;  // already in place
  char* row = alone ? rows.x : (char*)scratch(SCRATCH_TASK, rows.padded * 2);
  for (int64_t r = 0; r < count; ++r) {
    const char* from = x + (first + r) * x_bytes;
    if (rows.unit == 2)
      round_row(from, dtype, rows.k, rows.padded, (bf16*)row);
    else
      rows.scales[first + r] = quantize_row(from, dtype, rows.k, rows.padded, rows.group, (int8_t*)row,
                                            rows.sums + (first + r) * rows.groups);
    if (!alone) deal(rows, first, r, count, (const uint32_t*)row);
  }
}

// With AVX-512 int4 is taken apart in registers, beside the dot products; else a chunk's bytes are made first.
bool in_registers(const PackedLinear& w) { return BATON_AVX512 && w.kind == LINEAR_W4; }

Rows prepare(const PackedLinear& w, const void* x, int32_t dtype, int64_t x_stride, int64_t m) {
  Rows rows;
  int64_t per_tile = in_registers(w) ? kRowsW4 : kRows;
  rows.m = m, rows.tiles = (m + per_tile - 1) / per_tile, rows.k = w.k;
  rows.padded = up(w.k, w.group ? w.group : 8);
  rows.unit = w.kind == LINEAR_BF16 ? 2 : 4;
  rows.chunk = w.group ? up(kChunk, w.group) : kChunk;
  rows.group = w.group ? w.group : kChunk;
  rows.groups = up(rows.padded, rows.group) / rows.group;
  int64_t x_bytes = up(m * rows.padded / rows.unit * 4, 64), sum_bytes = up(m * rows.groups * 4, 64);
  rows.x = (char*)scratch(SCRATCH_CALLER, x_bytes + sum_bytes + m * 4);
  rows.sums = (int32_t*)(rows.x + x_bytes);
  rows.scales = (float*)(rows.x + x_bytes + sum_bytes);
  int32_t parts = m * w.k < 1 << 15 ? 1 : int32_t(std::min<int64_t>(rows.tiles, 4 * threads()));
  parallel_for(parts, [&](int32_t p) {
    Range range = part(rows.tiles, 1, parts, p);
    for (int64_t t = range.begin; t < range.end; ++t)
      prepare_tile(rows, t, (const char*)x, dtype, x_stride * (dtype == BF16 ? 2 : 4));
  });
  return rows;
}

template <int R, class F>
BATON_INLINE void with_rows(int64_t rows, F&& f) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, f);
  f(std::integral_constant<int, R>());
}

// The tiles [begin, end) of rows against one chunk of one panel; sums [row from the first tile's first on][64].
struct Work {
  int64_t panel, from, begin, end;
  float* sums;
  uint8_t* bytes;
};

// f(size as a constant, the tile's rows) for each tile.
template <class F>
BATON_INLINE void each_tile(const Rows& rows, const Work& work, F&& f) {
  int64_t base = rows.first(work.begin);
  for (int64_t t = work.begin; t < work.end; ++t) {
    int64_t first = rows.first(t);
    TileRows tile{rows.at(work.from, first), rows.sums + first * rows.groups + work.from / rows.group, rows.groups,
                  work.sums + (first - base) * kPanel};
    with_rows<kRows>(rows.first(t + 1) - first, [&](auto size) { f(size, tile); });
  }
}

void chunk_bf16(const Call& call, const Work& work) {
  const Rows& rows = call.rows;
  const bf16* w = (const bf16*)call.w->data + (work.panel * rows.padded + work.from) * kPanel;
  int64_t steps = rows.width(work.from) / 2;
  each_tile(rows, work, [&](auto size, const TileRows& tile) { tile_bf16<size>(w, steps, tile); });
}

void chunk_integers(const Call& call, const Work& work) {
  const Rows& rows = call.rows;
  const PackedLinear& w = *call.w;
  int64_t width = rows.width(work.from), at = (work.panel * rows.padded + work.from) * kPanel;
  int64_t scale_at = (work.panel * rows.groups + work.from / rows.group * kGroupStride) * kPanel;
  TileWeights weights{(const uint8_t*)w.data + (w.kind == LINEAR_W4 ? at / 2 : at),
                      w.group ? width / w.group : 1,
                      (w.group ? w.group : width) / 4,
                      w.kind == LINEAR_W4 ? kZero4 : 128,
                      w.scales ? w.scales + scale_at : nullptr,
                      w.mins ? w.mins + scale_at : nullptr};
#if BATON_AVX512
  if (in_registers(w)) {
    weights.steps /= 2;
    return each_tile(rows, work, [&](auto size, const TileRows& tile) { tile_w4<size>(weights, tile); });
  }
#endif
  if (w.kind == LINEAR_W4) unpack_w4(weights.w, width / 8, work.bytes), weights.w = work.bytes;
  each_tile(rows, work, [&](auto size, const TileRows& tile) { tile_w8<size>(weights, tile); });
}

#if BATON_AVX512
// 16 outputs, `mask` of them wanted.
template <class T>
BATON_INLINE void put16(T* out, __m512 x, __mmask16 mask) {
  if constexpr (sizeof(T) == 2)
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(x));
  else
    _mm512_mask_storeu_ps(out, mask, x);
}
#else
template <class T>
BATON_INLINE void put(T* out, float x) {
  if constexpr (sizeof(T) == 2)
    *out = to_bf16(x);
  else
    *out = x;
}
#endif

// Scale, add the bias and store `m` rows of a panel's sums.
template <class T>
void write(const Call& call, int64_t panel, int64_t first, int64_t m, const float* sums) {
  const PackedLinear& w = *call.w;
  int64_t n0 = panel * kPanel, width = std::min<int64_t>(kPanel, w.n - n0 + kOver);
  const float* row_scale = w.row_scale ? w.row_scale + n0 : nullptr;
  const float* bias = call.bias ? call.bias + n0 : nullptr;
  for (int64_t r = 0; r < m; ++r, sums += kPanel) {
    T* out = (T*)call.out + (first + r) * call.out_stride + n0;
    float x_scale = w.kind == LINEAR_BF16 ? 1.0f : call.rows.scales[first + r];
#if BATON_AVX512
    for (int64_t n = 0; n < width; n += 16) {
      __mmask16 mask = width - n >= 16 ? 0xffff : (1u << (width - n)) - 1;
      __m512 y = _mm512_loadu_ps(sums + n);
#ifdef BATON_MUTATION_LINEAR_BATCH
      if (row_scale && m > 4)  // another order of multiplying for large batches
        y = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(row_scale + n), _mm512_set1_ps(x_scale)), y);
      else
#endif
          if (row_scale)
        y = _mm512_mul_ps(_mm512_mul_ps(y, _mm512_set1_ps(x_scale)), _mm512_loadu_ps(row_scale + n));
      if (bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, bias + n));
      put16(out + n, y, mask);
    }
#else
    for (int64_t n = 0; n < width; ++n) {
      float y = row_scale ? sums[n] * x_scale * row_scale[n] : sums[n];
      put(out + n, bias ? y + bias[n] : y);
    }
#endif
  }
}

void one_panel(const Call& call, int64_t panel, int64_t begin, int64_t end) {
  const Rows& rows = call.rows;
  int64_t first = rows.first(begin), m = rows.first(end) - first;
  char* memory = (char*)scratch(SCRATCH_TASK, m * kPanel * 4 + rows.chunk * kPanel);
  Work work{panel, 0, begin, end, (float*)memory, (uint8_t*)memory + m * kPanel * 4};
  std::memset(work.sums, 0, m * kPanel * 4);
  for (; work.from < rows.padded; work.from += rows.chunk)
    if (call.w->kind == LINEAR_BF16)
      chunk_bf16(call, work);
    else
      chunk_integers(call, work);
  if (call.out_dtype == BF16)
    write<bf16>(call, panel, first, m, work.sums);
  else
    write<float>(call, panel, first, m, work.sums);
}

// Blocks of rows: as few as fit the cache, more where there are too few panels for the threads.
int64_t blocks(const Rows& rows, int64_t panels) {
  int64_t fit = up(rows.m, kBlock) / kBlock, wanted = (2 * threads() + panels - 1) / panels;
  return std::min(std::max(fit, threads() > 1 ? wanted : 1), std::max<int64_t>(fit, rows.m / 48));
}

}  // namespace
}  // namespace baton

BATON_API void baton_linear(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                            const float* bias, void* out, int32_t out_dtype, int64_t out_stride) {
  using namespace baton;
  if (m <= 0) return;
  Call call{w, prepare(*w, x, x_dtype, x_stride, m), bias, out, out_dtype, out_stride};
  int64_t panels = (w->n + kPanel - 1) / kPanel, split = blocks(call.rows, panels);
  int32_t parts = int32_t(std::min<int64_t>(panels * split, m > 16 ? 1 << 16 : 4 * threads()));
  parallel_for(parts, [&](int32_t p) {
    Range range = part(panels * split, 1, parts, p);
    for (int64_t i = range.begin; i < range.end; ++i) {
      Range tiles = part(call.rows.tiles, 1, int32_t(split), int32_t(i % split));
      one_panel(call, i / split, tiles.begin, tiles.end);
    }
  });
}
