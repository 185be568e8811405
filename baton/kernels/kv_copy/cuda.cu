// Scattered blocks copied and checksummed in one pass, a thread block to each: gather (pages to the wire) and scatter (the wire
// to pages, verified) are the same launch for all layers, as a page holds every layer. Knows nothing of pages or frames.
//
// XXH3-64 is a chain over rounds of 1 KiB, but what a round adds to its eight lanes depends on that round alone: the warps sum
// rounds side by side into shared memory, and eight threads run the chain behind them. What is hashed is what was
// stored: registers, and for the last stripe, which overlaps, the copy itself. Places may not overlap.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "codec.cuh"
#include "xxh3.h"

namespace baton {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32, PER_WARP = 4, TILE = WARPS * PER_WARP, LANES = 8, RESIDENT = 3;

__constant__ const uint64_t START[LANES] = {BATON_XXH3_START};
__constant__ const uint8_t SECRET[SECRET_BYTES] = {BATON_XXH3_SECRET};

struct Job {
  const uint64_t *dst, *src;
  int64_t count, bytes;
  uint64_t* sums;
  const uint64_t* expected;
  int32_t* wrong;
};

struct Pair {
  uint64_t low, high;
};

__device__ __forceinline__ uint64_t word_at(const uint8_t* p) {
  uint64_t word = 0;
  for (int i = 0; i < 8; i++) word |= uint64_t(p[i]) << (8 * i);
  return word;
}

__device__ __forceinline__ Pair load_pair(const uint8_t* p, bool aligned) {
  if (!aligned) return {word_at(p), word_at(p + 8)};
  const uint4 v = load_once(p);
  return {uint64_t(v.y) << 32 | v.x, uint64_t(v.w) << 32 | v.z};
}

__device__ __forceinline__ void store_pair(uint8_t* p, Pair v, bool aligned) {
  if (aligned)
    return store_once(p, make_uint4(uint32_t(v.low), uint32_t(v.low >> 32), uint32_t(v.high), uint32_t(v.high >> 32)));
  for (int i = 0; i < 8; i++) p[i] = uint8_t(v.low >> (8 * i)), p[8 + i] = uint8_t(v.high >> (8 * i));
}

__device__ __forceinline__ uint64_t mixed(uint64_t data, uint64_t key) {
  const uint64_t x = data ^ key;
  return (x & 0xffffffffu) * (x >> 32);
}

// What two neighbouring lanes of a stripe add to their accumulators.
__device__ __forceinline__ Pair added(Pair data, Pair key) {
  return {data.high + mixed(data.low, key.low), data.low + mixed(data.high, key.high)};
}

__device__ __forceinline__ uint64_t scrambled(uint64_t acc, int lane) {
  return (acc ^ acc >> 47 ^ word_at(SECRET + SECRET_BYTES - STRIPE + 8 * lane)) * P32_1;
}

__device__ __forceinline__ uint64_t folded(uint64_t a, uint64_t b) { return a * b ^ __umul64hi(a, b); }

__device__ uint64_t merged(const uint64_t* acc, int64_t bytes) {
  uint64_t sum = uint64_t(bytes) * P64_1;
  for (int pair = 0; pair < 4; pair++)
    sum += folded(acc[2 * pair] ^ word_at(SECRET + 11 + 16 * pair), acc[2 * pair + 1] ^ word_at(SECRET + 19 + 16 * pair));
  sum ^= sum >> 37;
  sum *= P_AVALANCHE;
  return sum ^ sum >> 32;
}

// A warp's view of a round of 64 pairs: lane l has pairs l and l + 32, pair q is lanes 2 (q % 4), + 1 of stripe q / 4.
struct Warp {
  int lane;
  Pair key[2];

  __device__ explicit Warp(int lane_) : lane(lane_) {
    for (int h = 0; h < 2; h++) {
      const uint8_t* at = SECRET + 8 * ((lane + 32 * h) / 4) + 16 * (lane % 4);
      key[h] = {word_at(at), word_at(at + 8)};
    }
  }

  // Over the lanes that have the same pair of a stripe; lanes 0 … 3 write the eight sums.
  __device__ __forceinline__ void sum(Pair x, uint64_t* to) const {
#pragma unroll
    for (int by = 4; by < 32; by *= 2) {
      x.low += __shfl_xor_sync(ALL_LANES, static_cast<unsigned long long>(x.low), by);
      x.high += __shfl_xor_sync(ALL_LANES, static_cast<unsigned long long>(x.high), by);
    }
    if (lane < 4) to[2 * lane] = x.low, to[2 * lane + 1] = x.high;
  }

  // `rounds` (at most PER_WARP) whole rounds, WARPS apart.
  __device__ __forceinline__ void rounds(const uint8_t* in, uint8_t* out, bool aligned, int count, uint64_t (*to)[LANES]) const {
    Pair data[PER_WARP][2];
#pragma unroll
    for (int r = 0; r < PER_WARP; r++)
      for (int h = 0; h < 2; h++)
        if (r < count) data[r][h] = load_pair(in + r * WARPS * ROUND + 16 * (lane + 32 * h), aligned);
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
      if (r >= count) break;
      for (int h = 0; h < 2; h++)
        if (out) store_pair(out + r * WARPS * ROUND + 16 * (lane + 32 * h), data[r][h], aligned);
      const Pair a = added(data[r][0], key[0]), b = added(data[r][1], key[1]);
      sum({a.low + b.low, a.high + b.high}, to[r * WARPS]);
    }
  }

  // The stripes behind the last whole round, and the bytes behind those, which are only copied.
  __device__ __forceinline__ void rest(const uint8_t* in, uint8_t* out, bool aligned, int stripes, int bytes, uint64_t* to) const {
    Pair all{0, 0};
    for (int h = 0; h < 2; h++) {
      const int pair = lane + 32 * h;
      if (pair >= 4 * stripes) continue;
      const Pair data = load_pair(in + 16 * pair, aligned), more = added(data, key[h]);
      if (out) store_pair(out + 16 * pair, data, aligned);
      all.low += more.low, all.high += more.high;
    }
    sum(all, to);
#ifdef BATON_MUTATION_KV_COPY_SHORT
    bytes--;
#endif
    if (out)
      for (int i = 64 * stripes + lane; i < bytes; i += 32) out[i] = in[i];
  }
};

__global__ void __launch_bounds__(THREADS, RESIDENT) copy(const Job job) {
  BATON_STATIC_SHARED(uint64_t, sums, 2 * TILE * LANES);
  BATON_STATIC_SHARED(uint64_t, last, LANES);
  auto* buffer = reinterpret_cast<uint64_t(*)[TILE][LANES]>(sums);
  grid_wait();
  grid_launch_next();
  const int me = int(threadIdx.x), warp = me / 32;
  const Warp mine(me % 32);
  const int64_t stripes = (job.bytes - 1) / STRIPE, rounds = stripes / STRIPES, tiles = (rounds + TILE - 1) / TILE;
  for (int64_t block = blockIdx.x; block < job.count; block += gridDim.x) {
    const uint8_t* in = reinterpret_cast<const uint8_t*>(job.src[block]);
    uint8_t* out = job.dst ? reinterpret_cast<uint8_t*>(job.dst[block]) : nullptr;
    const bool aligned = (job.src[block] | (job.dst ? job.dst[block] : 0)) % 16 == 0;
    uint64_t acc = me < LANES ? START[me] : 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t first = tile * TILE + warp, left = rounds - first;
      const int count = left <= 0 ? 0 : left > TILE - WARPS ? PER_WARP : int((left + WARPS - 1) / WARPS);
      mine.rounds(in + first * ROUND, out ? out + first * ROUND : nullptr, aligned, count, buffer[tile & 1] + warp);
#ifndef BATON_MUTATION_CUDA_KV_COPY_BARRIER
      __syncthreads();
#endif
      // The other warps are on their way to the next tile, which has the other half of the buffer.
      if (me < LANES)
        for (int64_t r = 0; r < TILE && tile * TILE + r < rounds; r++) {
          acc += buffer[tile & 1][r][me];
#ifndef BATON_MUTATION_KV_COPY_NO_SCRAMBLE
          acc = scrambled(acc, me);
#endif
        }
    }
    if (warp == 0) {
      const int64_t done = rounds * ROUND;
      __syncwarp();
      mine.rest(in + done, out ? out + done : nullptr, aligned, int(stripes % STRIPES), int(job.bytes - done), buffer[tiles & 1][0]);
    }
#ifndef BATON_MUTATION_CUDA_KV_COPY_TAIL
    __syncthreads();  // the copy is whole
#endif
    if (me < LANES) {
      const uint8_t* tail = (out ? out : in) + job.bytes - STRIPE;
      const uint64_t key = word_at(SECRET + SECRET_BYTES - STRIPE - 7 + 8 * me);
      acc += buffer[tiles & 1][0][me] + mixed(word_at(tail + 8 * me), key) + word_at(tail + 8 * (me ^ 1));
      last[me] = acc;
    }
    __syncthreads();
    if (me == 0) {
      const uint64_t sum = merged(last, job.bytes);
      if (job.sums) job.sums[block] = sum;
      if (job.wrong) job.wrong[block] = sum != job.expected[block];
    }
  }
}

__global__ void __launch_bounds__(THREADS, RESIDENT) copy_only(const Job job) {
  grid_wait();
  grid_launch_next();
  for (int64_t block = blockIdx.x; block < job.count; block += gridDim.x) {
    const uint8_t* in = reinterpret_cast<const uint8_t*>(job.src[block]);
    uint8_t* out = reinterpret_cast<uint8_t*>(job.dst[block]);
    const bool aligned = (job.src[block] | job.dst[block]) % 16 == 0;
    const int64_t pairs = job.bytes / 16;
    for (int64_t i = threadIdx.x; i < pairs; i += THREADS) store_pair(out + 16 * i, load_pair(in + 16 * i, aligned), aligned);
    for (int64_t i = 16 * pairs + threadIdx.x; i < job.bytes; i += THREADS) out[i] = in[i];
  }
}

int launch(const Job& job, void* stream) {
  if (!job.count) return 0;
  const int64_t most = int64_t(RESIDENT) * processors();
  const dim3 grid = dim3(unsigned(job.count < most ? job.count : most));
  if (!job.sums && !job.wrong) return BATON_LAUNCH_PDL(copy_only, grid, dim3(THREADS), 0, stream, job);
  return BATON_LAUNCH_PDL(copy, grid, dim3(THREADS), 0, stream, job);
}

}  // namespace
}  // namespace baton

// Addresses and sums are in device memory.
BATON_API int baton_kv_copy(const uint64_t* dst, const uint64_t* src, int64_t count, int64_t bytes, uint64_t* sums, void* stream) {
  return baton::launch({dst, src, count, bytes, sums, nullptr, nullptr}, stream);
}

// The same with the sums held against `expected`: wrong[i] is 1 where block i is not what was sent, else 0. sums may be null.
BATON_API int baton_kv_verify(const uint64_t* dst, const uint64_t* src, int64_t count, int64_t bytes, uint64_t* sums,
                              const uint64_t* expected, int32_t* wrong, void* stream) {
  return baton::launch({dst, src, count, bytes, sums, expected, wrong}, stream);
}

// Pages of `rows` rows of head_dim (KvType `type`: float32 or bf16) to their wire form of `codec` (int8 or fp8), count of them.
BATON_API int baton_kv_compress(const uint64_t* dst, const uint64_t* src, int64_t count, int64_t rows, int32_t head_dim,
                                int32_t type, int32_t codec, void* stream) {
  return baton::launch_codec<false>({dst, src, count, rows, head_dim}, type, codec, stream);
}

// And back: what came over the wire into pages.
BATON_API int baton_kv_expand(const uint64_t* dst, const uint64_t* src, int64_t count, int64_t rows, int32_t head_dim,
                              int32_t type, int32_t codec, void* stream) {
  return baton::launch_codec<true>({dst, src, count, rows, head_dim}, type, codec, stream);
}
