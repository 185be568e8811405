// Running sums over a block's threads, and where a number falls among them: which unit of work belongs to whom. Knows nothing
// of what is counted.
#pragma once

namespace baton {

// The sum of x over the threads before thread `me` of `warps` whole warps; `total`: over all of them. `sync`: their barrier.
// `scratch` holds an int per warp and may be written again behind the next barrier.
template <int warps, class Thread, class Sync>
__device__ __forceinline__ int sum_before(int x, Thread me, int* scratch, int& total, Sync sync) {
  const int lane = int(me % 32), warp = int(me / 32);
  int sum = x;
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(ALL_LANES, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  sync();
  int before = 0;
  total = 0;
  for (int i = 0; i < warps; i++) total += scratch[i], before += i < warp ? scratch[i] : 0;
  return before + sum - x;
}

// The first of `count` ends that lies behind `unit`.
__device__ __forceinline__ int first_behind(const int* ends, int count, int unit) {
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

}  // namespace baton
