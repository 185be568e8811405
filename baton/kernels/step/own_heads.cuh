// Rows of KV between pages that have all heads of a model and pages that have a rank's alone, either way. Knows nothing of steps.
#pragma once
#include "../rope_append/head_rows.cuh"

namespace baton {
namespace {

constexpr int HEADS_THREADS = 256, HEADS_WARPS = HEADS_THREADS / 32, HEADS_PER_DEVICE = 2;

// `rows` slots, page * 16 + token each, negative ones left out; a warp to a (row, plane). `bytes` are of the rank's heads in a row.
__global__ void __launch_bounds__(HEADS_THREADS)
    copy_heads(const HeadRows to, const HeadRows from, int32_t planes, int32_t bytes, int32_t scales, const int32_t* slots, int32_t rows) {
  grid_wait();
  grid_launch_next();
  const int64_t units = int64_t(rows) * planes, stride = int64_t(gridDim.x) * HEADS_WARPS;
  for (int64_t unit = int64_t(blockIdx.x) * HEADS_WARPS + threadIdx.x / 32; unit < units; unit += stride) {
    const int32_t slot = slots[unit / planes];
    if (slot < 0) continue;
    const int64_t plane = unit % planes;
    if (bytes % 16 == 0) copy_words<uint4>(to.row(slot, plane), from.row(slot, plane), bytes);
    else copy_words<uint32_t>(to.row(slot, plane), from.row(slot, plane), bytes);
#if !defined(BATON_MUTATION_CUDA_STEP_HEAD_SCALES)
    copy_words<uint32_t>(to.scale(slot, plane), from.scale(slot, plane), scales);
#endif
  }
}

}  // namespace
}  // namespace baton
