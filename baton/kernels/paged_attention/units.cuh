// Which unit of work a block takes, from counts that are read on the device. Included by cuda.cu files.
#pragma once
#include "split.cuh"

namespace baton {
namespace {
namespace attention {

// The sum of x over the threads before this one; `total` over all of them.
__device__ int scan(int x, int* scratch, int& total) {
  const int lane = me() % 32, warp = me() / 32;
  int sum = x;
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(ALL_LANES, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  BATON_TEAM_SYNC();
  int before = 0;
  total = 0;
  for (int i = 0; i < WARPS; i++) total += scratch[i], before += i < warp ? scratch[i] : 0;
  BATON_TEAM_SYNC();
  return before + sum - x;
}

// The first whose end lies behind `unit`.
__device__ int item_of(const int* ends, int count, int unit) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > unit)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

}  // namespace attention
}  // namespace
}  // namespace baton
