// What blocks of prompt attention take in turn: an item's tiles of rows by KV head, its last rows first, which see the most keys.
// Knows nothing of how a tile is computed.
#pragma once
#include "../cascade_attention/prefix.cuh"
#include "prompt.h"

namespace baton {
namespace {

constexpr int MOST_ITEMS = 1024;

template <int ROWS>
__device__ __forceinline__ int tiles_of(const Call& c, const AttentionItem& item) {
  return item.queries < PROMPT_QUERIES ? 0 : (item.queries * c.group + ROWS - 1) / ROWS;
}

// ends[i]: units up to item i's last; returns those of all. All of the block's `threads` come; `scratch` holds an int per warp.
template <int ROWS, int threads>
__device__ int plan(const Call& c, const AttentionItem* items, int count, int* ends, int* scratch) {
  constexpr int each = (MOST_ITEMS + threads - 1) / threads;
  const int begin = int(threadIdx.x) * each;
  int mine = 0, total = 0;
  for (int i = begin; i < begin + each && i < count; i++) mine += tiles_of<ROWS>(c, items[i]) * c.kv.kv_heads;
  int at = sum_before<threads / 32>(mine, threadIdx.x, scratch, total, [] { __syncthreads(); });
  for (int i = begin; i < begin + each && i < count; i++) ends[i] = at += tiles_of<ROWS>(c, items[i]) * c.kv.kv_heads;
  __syncthreads();
  return total;
}

// Unit `unit` of `count` items; its keys begin at a multiple of TILE, so that a row's sums are made in one order, whatever chunk and
// tile it is in.
template <int ROWS, int TILE>
__device__ __forceinline__ Block unit_of(const Call& c, const AttentionItem* items, const int* ends, int count, int unit) {
  const int at = first_behind(ends, count, unit), within = unit - (at ? ends[at - 1] : 0);
  const AttentionItem item = items[at];
  Block b;
  b.first = item.first, b.head = within % c.kv.kv_heads, b.pages = item.pages, b.start = item.start;
  b.row = (tiles_of<ROWS>(c, item) - 1 - within / c.kv.kv_heads) * ROWS;
  b.rows = item.queries * c.group - b.row < ROWS ? item.queries * c.group - b.row : ROWS;
  const int low = b.seen(c, 0).x;
  b.begin = low > 0 ? low / TILE * TILE : 0, b.end = b.seen(c, b.rows - 1).y + 1;
  return b;
}

// Where row `row` of a unit's item has its result; `b` is the Block, or what is kept of it.
template <class Unit>
__device__ __forceinline__ float* place_of(const Call& c, const Unit& b, int row) {
#ifdef BATON_MUTATION_CUDA_PROMPT_HEAD
  const int head = row % c.group;
#else
  const int head = b.head * c.group + row % c.group;
#endif
  return c.out + (b.first + row / c.group) * c.out_stride + int64_t(head) * c.kv.head_dim;
}

}  // namespace
}  // namespace baton
