// What ops over pages are given, on the CPU and on a GPU: plain structs. Knows nothing of how elements are read; kv.h and
// cuda/ do.
#pragma once
#include <cstdint>

namespace baton {

enum KvType : int { KV_F32 = 0, KV_BF16 = 1, KV_INT8 = 2, KV_FP8 = 3 };

constexpr int PAGE = 16;

// The pages as one layer sees them.
struct PagedKv {
  char* pages;
  int64_t page_bytes;
  int64_t layer_offset;  // bytes from a page's start to the layer's K plane; its V plane follows
  int32_t type, kv_heads, head_dim;
};

// Query rows first … first + queries - 1, at positions start, start + 1, …; pages[i] holds keys 16 i … 16 i + 15.
struct AttentionItem {
  int64_t first;
  const int32_t* pages;
  int32_t queries, start;
};

}  // namespace baton
