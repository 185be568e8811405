// Blocks that meet (megakernel/grid.cuh) and do next to nothing else, from any count on. Knows nothing of models.
#include "../../../baton/kernels/cuda/device.cuh"
#include "../../../baton/kernels/megakernel/grid.cuh"

namespace baton {
namespace {

constexpr int MOST_ROWS = 8;

// A block writes the number of the meeting; each of its rows adds up what all blocks wrote: sums[meeting][row].
__global__ void meet(uint32_t* counts, const int32_t* rows, int32_t meetings, uint32_t* written, uint32_t* sums) {
  BATON_STATIC_SHARED(int, word, 1);
  Grid grid(counts, word);
  for (int i = 0; i < meetings; i++) {
    for (unsigned wait = 0; wait < 8 * ((blockIdx.x + unsigned(i)) % gridDim.x); wait++) __syncthreads();  // some are slower
    if (threadIdx.x == 0) written[blockIdx.x] = uint32_t(i + 1);
    grid.arrive(rows[i]);
    grid.serve(rows[i], [&](int row) {
      uint32_t sum = 0;
      for (unsigned block = 0; block < gridDim.x; block++) sum += written[block];
      if (threadIdx.x == 0) sums[i * MOST_ROWS + row] = sum;
    });
    grid.enter();
  }
}

}  // namespace
}  // namespace baton

BATON_API int baton_meet(uint32_t* counts, const int32_t* rows, int32_t meetings, uint32_t* written, uint32_t* sums, int32_t blocks,
                         void* stream) {
  return BATON_LAUNCH_RESIDENT(baton::meet, dim3(unsigned(blocks)), dim3(32), 0, stream, counts, rows, meetings, written, sums);
}
