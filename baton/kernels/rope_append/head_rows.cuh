// Where heads' rows of KV lie in pages, and copies of them by a warp. Knows nothing of steps, nor of who asks for a copy.
#pragma once
#include "../cuda/device.cuh"
#include "../abi/paged.h"

namespace baton {

// A token's KV that is copied to another place: page * 16 + token of either. Both are -1 in a copy that fills a table up to a
// graph's size.
struct SlotCopy {
  int32_t from, to;
};

// Copies of a step in device memory; none of a step without branches.
struct Branches {
  const SlotCopy* copies;
  int32_t count;
};

namespace {

// Where a token's row of a plane lies: `row_bytes` per token, the heads at `row_at` of it; its scales behind the plane's elements.
struct HeadRows {
  char* at;
  int64_t page_bytes, plane_bytes;
  int32_t row_bytes, row_at, scale_bytes, scale_at;

  __device__ __forceinline__ char* row(int32_t slot, int64_t plane) const {
    return plane_of(slot, plane) + int64_t(slot % PAGE) * row_bytes + row_at;
  }
  __device__ __forceinline__ char* scale(int32_t slot, int64_t plane) const {
    return plane_of(slot, plane) + PAGE * int64_t(row_bytes) + slot % PAGE * scale_bytes + scale_at;
  }
  __device__ __forceinline__ char* plane_of(int32_t slot, int64_t plane) const {
    return at + int64_t(slot / PAGE) * page_bytes + plane * plane_bytes;
  }
};

template <class V>
__device__ __forceinline__ void copy_words(char* to, const char* from, int bytes) {
  for (int i = int(threadIdx.x) % 32; i < bytes / int(sizeof(V)); i += 32) reinterpret_cast<V*>(to)[i] = reinterpret_cast<const V*>(from)[i];
}

// One token's heads of a plane, by a warp: `bytes` of elements and `scales` of scales.
__device__ __forceinline__ void copy_token(const HeadRows& in, const SlotCopy& copy, int64_t plane, int32_t bytes, int32_t scales) {
  if (copy.to < 0) return;
  if (bytes % 16 == 0) copy_words<uint4>(in.row(copy.to, plane), in.row(copy.from, plane), bytes);
  else copy_words<uint32_t>(in.row(copy.to, plane), in.row(copy.from, plane), bytes);
#if !defined(BATON_MUTATION_CUDA_BRANCH_SCALES)
  copy_words<uint32_t>(in.scale(copy.to, plane), in.scale(copy.from, plane), scales);
#endif
}

}  // namespace
}  // namespace baton
