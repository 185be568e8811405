// Small kernels, right and wrong on purpose, that show what the SIMT shim does with them. Knows nothing of ops.
#include "../../../baton/kernels/cuda/device.cuh"
#include "../../../baton/kernels/cuda/hopper_across.cuh"

namespace baton {
namespace {

// Reverses its block's values through shared memory.
template <bool Barrier>
__global__ void reverse(const float* in, float* out) {
  BATON_SHARED(float, line);
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  line[threadIdx.x] = in[i];
  if (Barrier) __syncthreads();
  out[i] = line[blockDim.x - 1 - threadIdx.x];
}

__global__ void half_of_the_block_waits() {
  if (threadIdx.x < blockDim.x / 2) __syncthreads();
}

__global__ void one_lane_shuffles(float* out) {
  if (threadIdx.x == 3) out[0] = __shfl_sync(0xffffffffu, 1.0f, 0);
  else __syncthreads();
}

__global__ void outside(float* out) {
  BATON_STATIC_SHARED(float, line, 8);
  line[threadIdx.x] = 1;
  out[threadIdx.x] = line[threadIdx.x];
}

__global__ void wild(float* out) { out[size_t(1) << 40] = 1; }

__global__ void waits_for_nobody(uint32_t* flag) {
  while (!load_acquire(flag)) {
  }
}

// One warp: 16 bytes per lane come in by cp.async; without the wait they are not there yet.
template <bool Wait>
__global__ void copied(const float* in, float* out) {
  BATON_SHARED(float, line);
  cp_async_16(line + 4 * threadIdx.x, in + 4 * threadIdx.x, threadIdx.x < 31);
  cp_async_commit();
  if (Wait) cp_async_wait<0>();
  __syncwarp();
  for (int i = 0; i < 4; i++) out[32 * i + threadIdx.x] = line[32 * i + threadIdx.x];
}

// d (16, 8) = a (16, 16) b (16, 8), bf16, all row major: a by ldmatrix, b by its transposing form.
__global__ void multiplied(const bf16* a, const bf16* b, float* d) {
  BATON_SHARED(bf16, tile);
  bf16 *mine = tile, *theirs = tile + 256;
  for (int i = int(threadIdx.x); i < 256; i += 32) mine[i] = a[i];
  for (int i = int(threadIdx.x); i < 128; i += 32) theirs[i] = b[i];
  __syncwarp();
  const int lane = int(threadIdx.x);
  uint32_t ra[4], rb[2];
  ldmatrix_x4(ra, mine + (lane % 16) * 16 + lane / 16 * 8);
  ldmatrix_x2_trans(rb, theirs + (lane % 16) * 8);
  float sum[4] = {};
  mma_bf16_16816(sum, ra, rb);
  for (int i = 0; i < 4; i++) d[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = sum[i];
}

// Sums the block's values by atomics, and by warps through named barrier 1.
__global__ void summed(const int* in, int* out) {
  BATON_STATIC_SHARED(int, parts, 8);
  const int warp = int(threadIdx.x) / 32;
  const int sum = __reduce_add_sync(0xffffffffu, in[threadIdx.x]);
  if (threadIdx.x % 32 == 0) parts[warp] = sum;
  if (warp) return named_barrier_arrive(1, int(blockDim.x));
  named_barrier_sync(1, int(blockDim.x));
  if (threadIdx.x < blockDim.x / 32) atomicAdd(out, parts[threadIdx.x]);
}

enum Group : int32_t { RIGHT, UNSWIZZLED, NO_FENCE, NO_WAIT, CHANGED_A, CROOKED, TWO_DESCRIPTORS, WRONG_STRIDE, SWIZZLED_BY_HALF };

// One warp group: d (64, 128) = a (64, 16) b (128, 16) transposed, bf16. b lies in shared memory under the 128-byte swizzle, in the
// second of the four places of 32 bytes that a row has there; UNSWIZZLED: in matrices of 8 rows by 16 bytes.
__global__ void grouped(const bf16* a, const bf16* b, float* d, int32_t how) {
  BATON_SHARED(char, memory);
  const bool plain = how == UNSWIZZLED;
  for (int i = int(threadIdx.x); i < 256; i += 128) {
    const int row = i / 2, chunk = 2 + i % 2;
    const int at = plain ? i % 2 * 2048 + row * 16 : row * 128 + (chunk ^ (row % (how == SWIZZLED_BY_HALF ? 4 : 8))) * 16;
    std::memcpy(memory + at, b + row * 16 + i % 2 * 8, 16);
  }
  __syncthreads();
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, row = 16 * warp + lane / 4, column = lane % 4 * 2;
  uint32_t r[4];
  for (int i = 0; i < 4; i++) std::memcpy(r + i, a + (row + 8 * (i % 2)) * 16 + column + i / 2 * 8, 4);
  uint32_t start = shared_address(memory) + 32;
  if (how == CROOKED) start += 256;
  if (how == TWO_DESCRIPTORS && warp == 2) start += 32;
  uint64_t at = swizzled_matrix(start, how == WRONG_STRIDE ? 512 : 1024);
  if (plain) at = shared_address(memory) >> 4 | uint64_t(2048 >> 4) << 16 | uint64_t(128 >> 4) << 32;
  float sums[64] = {};
  if (how != NO_FENCE) wgmma_fence();
  wgmma_bf16(sums, r[0], r[1], r[2], r[3], at, false);
  wgmma_commit();
  if (how == CHANGED_A) r[2]++;
  if (how != NO_WAIT) wgmma_wait();
  for (int i = 0; i < 64; i++) d[(row + 8 * (i / 2 % 2)) * 128 + i / 4 * 8 + column + i % 2] = sums[i];
}

enum Copy : int32_t { FINE, TOO_EARLY, TOO_MANY, NOT_BEGUN, NOT_ALIGNED, NOBODY_COMES };

// 512 bytes by a bulk copy, which a barrier tells of.
__global__ void bulk_copied(const float* in, float* out, int32_t how) {
  BATON_SHARED(float, line);
  BATON_STATIC_SHARED(uint64_t, barrier, 1);
  if (threadIdx.x == 0 && how != NOT_BEGUN) mbarrier_init(barrier, how == NOBODY_COMES ? 2 : 1), mbarrier_init_done();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, 512);
    if (how == TOO_MANY) mbarrier_arrive(barrier);
    bulk_copy(line + (how == NOT_ALIGNED), in, 512, barrier);
  }
  if (how != TOO_EARLY) mbarrier_wait(barrier, 0);
  for (int i = int(threadIdx.x); i < 128; i += 32) out[i] = line[i];
}

enum Across : int32_t { ACROSS, NO_PROXY_FENCE, NO_LEADING, LATER_ONE };

// One warp group: d (64, 128) = a (64, 16) b (16, 128), bf16, which cp.async brings to shared memory with its columns innermost, 64 of
// them a row of 128 bytes. LATER_ONE: what is waited for is the product before.
__global__ void across(const bf16* a, const bf16* b, float* d, int32_t how) {
  BATON_SHARED(char, memory);
  BATON_STATIC_SHARED(uint64_t, barrier, 1);
  if (threadIdx.x == 0) mbarrier_init(barrier, 128), mbarrier_init_done();
  __syncthreads();
  for (int i = int(threadIdx.x); i < 256; i += 128) {
    const int k = i / 16, chunk = i % 16;
    cp_async_16(memory + chunk / 8 * 2048 + k * 128 + (chunk % 8 ^ k % 8) * 16, b + k * 128 + chunk * 8);
  }
  cp_async_arrive(barrier);
  mbarrier_wait(barrier, 0);
  if (how != NO_PROXY_FENCE) async_proxy_fence();
  const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 * 16 + lane / 4, column = lane % 4 * 2;
  uint32_t r[4];
  for (int i = 0; i < 4; i++) std::memcpy(r + i, a + (row + 8 * (i % 2)) * 16 + column + i / 2 * 8, 4);
  const uint64_t at = swizzled_columns(shared_address(memory), how == NO_LEADING ? 0 : 2048, 1024);
  float first[64] = {}, sums[64] = {};
  wgmma_fence();
  if (how == LATER_ONE) {
    wgmma_bf16_across(first, r[0], r[1], r[2], r[3], at, false);
    wgmma_commit();
  }
  wgmma_bf16_across(sums, r[0], r[1], r[2], r[3], at, false);
  wgmma_commit();
  if (how == LATER_ONE)
    wgmma_wait_but_one();
  else
    wgmma_wait();
  const int half = threadIdx.x < 64 && how == LATER_ONE;  // the upper rows are the first's, which is there
  for (int i = 0; i < 64; i++) d[(row + 8 * (i / 2 % 2)) * 128 + i / 4 * 8 + column + i % 2] = half ? first[i] : sums[i];
  wgmma_wait();
}

}  // namespace
}  // namespace baton

using namespace baton;

BATON_API int baton_across(const bf16* a, const bf16* b, float* d, int32_t how, void* stream) {
  return BATON_LAUNCH(across, 1, 128, 4096, stream, a, b, d, how);
}

BATON_API int baton_grouped(const bf16* a, const bf16* b, float* d, int32_t how, void* stream) {
  return BATON_LAUNCH(grouped, 1, 128, 128 * 128, stream, a, b, d, how);
}
BATON_API int baton_bulk_copied(const float* in, float* out, int32_t how, void* stream) {
  return BATON_LAUNCH(bulk_copied, 1, 32, 1024, stream, in, out, how);
}

BATON_API int baton_reverse(const float* in, float* out, int32_t barrier, void* stream) {
  return barrier ? BATON_LAUNCH(reverse<true>, 3, 96, 96 * 4, stream, in, out) : BATON_LAUNCH(reverse<false>, 3, 96, 96 * 4, stream, in, out);
}
BATON_API int baton_half(int32_t, void* stream) { return baton::launch_simt("half_of_the_block_waits", false, half_of_the_block_waits, 1, 64, 0, stream); }
BATON_API int baton_one_lane(float* out, void* stream) { return BATON_LAUNCH(one_lane_shuffles, 1, 32, 0, stream, out); }
BATON_API int baton_outside(float* out, void* stream) { return BATON_LAUNCH(outside, 1, 32, 0, stream, out); }
BATON_API int baton_wild(float* out, void* stream) { return BATON_LAUNCH(wild, 1, 32, 0, stream, out); }
BATON_API int baton_spin(uint32_t* flag, void* stream) { return BATON_LAUNCH(waits_for_nobody, 1, 1, 0, stream, flag); }
BATON_API int baton_copied(const float* in, float* out, int32_t wait, void* stream) {
  return wait ? BATON_LAUNCH(copied<true>, 1, 32, 512, stream, in, out) : BATON_LAUNCH(copied<false>, 1, 32, 512, stream, in, out);
}
BATON_API int baton_multiplied(const bf16* a, const bf16* b, float* d, void* stream) {
  return BATON_LAUNCH(multiplied, 1, 32, 1024, stream, a, b, d);
}
BATON_API int baton_summed(const int* in, int* out, void* stream) { return BATON_LAUNCH(summed, 1, 256, 0, stream, in, out); }
BATON_API int baton_too_much(float* out, void* stream) { return BATON_LAUNCH(outside, 1, 32, 300 * 1024, stream, out); }
