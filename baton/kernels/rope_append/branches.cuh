// The KV that branches of a tree of drafts begin with, copied into their pages in each layer before attention reads it
// (engine/backends/native/branches.py): every path is a plain text from then on. Knows nothing of trees.
#pragma once
#include "head_rows.cuh"

namespace baton {
namespace {

constexpr int BRANCH_THREADS = 256, BRANCH_WARPS = BRANCH_THREADS / 32;

// A warp to a (copy, plane).
__global__ void __launch_bounds__(BRANCH_THREADS)
    begin_branches(const HeadRows in, int32_t planes, int32_t bytes, int32_t scales, const Branches of) {
  grid_wait();
  grid_launch_next();
  const int64_t units = int64_t(of.count) * planes, stride = int64_t(gridDim.x) * BRANCH_WARPS;
  for (int64_t unit = int64_t(blockIdx.x) * BRANCH_WARPS + threadIdx.x / 32; unit < units; unit += stride)
    copy_token(in, of.copies[unit / planes], unit % planes, bytes, scales);
}

}  // namespace
}  // namespace baton
