// A prompt's attention over bf16 KV by warp-group products: 128 rows of queries x group a block, 64 for each of two warp groups, which
// take turns at the tensor cores. A third group copies K and V, tiles of 128 keys, from their pages into a ring. Knows nothing of
// who the rows are.
//
// A row of a page belongs to one token and KV head, so that the keys of a head are 16 bytes or more apart in memory: cp.async brings
// them chunk by chunk, each to its place under the 128-byte swizzle. A slot of the ring holds one tile of K or of V, in the order in
// which they are read: K 0, K 1, V 0, K 2, V 1, …, the last V. It is [64 numbers of a row][key][128 bytes]; what no row sees is zero.
//
// While the scores of a tile are softened, the other group multiplies. Within a group the next tile's scores and this tile's values
// are under way together, so that a running sum is scaled behind a tile's values:
//   sum = (sum + weights V) 2^(most before - most now)
#pragma once
#include "../cuda/hopper_across.cuh"
#include "units.cuh"

namespace baton {
namespace {

constexpr int PAIR_ROWS = 128, PAIR_WARPS = 8, PAIR_THREADS = 32 * (PAIR_WARPS + 4), GROUP_THREADS = 128;
constexpr int COPIER_REGISTERS = 56, SOFTENER_REGISTERS = 224;  // of a thread: 168 by launch
constexpr int TILE_KEYS = 128, LINE = 128;                      // LINE: bytes of a key in a half of a slot

#ifdef BATON_MUTATION_CUDA_PROMPT_ARRIVALS
constexpr int READ_BY = PAIR_WARPS - 1;
#else
constexpr int READ_BY = PAIR_WARPS;
#endif

template <int D>
struct TileRing {
  static constexpr int HALF = TILE_KEYS * LINE, SLOT = D / 64 * HALF, SLOTS = 6;
  static constexpr size_t BYTES = 1024 + SLOTS * (SLOT + 16);

  char* slots;
  uint64_t *full, *empty;

  __device__ explicit TileRing(char* memory) {
    slots = memory + (1024 - shared_address(memory) % 1024) % 1024;
    full = reinterpret_cast<uint64_t*>(slots + SLOTS * SLOT), empty = full + SLOTS;
  }
};

// A place in the ring, and how often its slot has been used before.
template <int D>
struct Turn {
  int slot = 0, round = 0;
  __device__ __forceinline__ void next() {
    if (++slot == TileRing<D>::SLOTS) slot = 0, round++;
  }
};

// What writing a unit's rows needs of it, in shared memory meanwhile: registers are short.
struct Kept {
  int64_t first;
  int row, rows, head;
};

// The group that copies.
template <int D>
struct Copier {
  static constexpr int CHUNKS = D / 8, ROWS = GROUP_THREADS / CHUNKS, EACH = TILE_KEYS / ROWS;  // rows that the group copies at once

  const Call& c;
  const TileRing<D>& ring;
  Turn<D> turn;

  // The page of the tile at `key` that this lane holds: lane i that of its 16 keys i.
  __device__ __forceinline__ int look_up(const Block& b, int key) const {
    const int lane = threadIdx.x % 32;
    if (lane >= TILE_KEYS / PAGE || key + lane * PAGE >= b.end) return 0;
    return b.pages[key / PAGE + lane];
  }

  // The tile at `key` of a head's K or V, of which rows see keys low … end - 1.
  __device__ __forceinline__ void copy(int head, int low, int end, int key, int page, bool values) {
    const int me = int(threadIdx.x) % GROUP_THREADS, first = me / CHUNKS, chunk = me % CHUNKS;
#ifdef BATON_MUTATION_CUDA_PROMPT_PARITY
    const uint32_t parity = turn.round & 1;
#else
    const uint32_t parity = (turn.round + 1) & 1;
#endif
    if (turn.round) mbarrier_wait(ring.empty + turn.slot, parity);
    char* to = ring.slots + turn.slot * TileRing<D>::SLOT + chunk / 8 * TileRing<D>::HALF + first * LINE + (chunk % 8 ^ first % 8) * 16;
    const int line = c.kv.kv_heads * c.kv.head_dim * 2, place = first % PAGE * line + head * c.kv.head_dim * 2 + chunk * 16;
    const bool filled = chunk * 8 < c.kv.head_dim;
    low -= key + first, end -= key + first;
    const char* plane = Plane<KV_BF16>(c.kv, 0, values).at + place;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int64_t at = int64_t(__shfl_sync(ALL_LANES, page, i * ROWS / PAGE)) * c.kv.page_bytes;
#ifdef BATON_MUTATION_CUDA_PROMPT_BEYOND
      const bool has = filled;
#else
      const bool has = filled && i * ROWS >= low && i * ROWS < end;
#endif
      cp_async_16(to + i * ROWS * LINE, has ? plane + at + i * ROWS % PAGE * line : c.kv.pages, has);
    }
    cp_async_arrive(ring.full + turn.slot);
    turn.next();
  }

  __device__ __forceinline__ void run(const Block& b) {
    const int seen = b.seen(c, 0).x, low = seen > 0 ? seen : 0, steps = 2 * ((b.end - b.begin + TILE_KEYS - 1) / TILE_KEYS);
    int next = look_up(b, b.begin), page = next, before = next, key = b.begin;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const bool last = step == steps - 1, values = last || (step && step % 2 == 0);
      if (!values) {
        key = b.begin + (step + 1) / 2 * TILE_KEYS;
        before = page, page = next, next = look_up(b, key + TILE_KEYS);
      }
      copy(b.head, low, b.end, values && !last ? key - TILE_KEYS : key, values && !last ? before : page, values);
    }
  }
};

// A group's 64 rows, of which a warp has 16 and a lane two: g and g + 8 (g = lane / 4).
template <int D>
struct Softener {
  const Call& c;
  const TileRing<D>& ring;
  Kept* kept;  // of this warp
  Turn<D> turn;
  uint32_t q[D / 16][4], weights[TILE_KEYS / 16][4];
  float scores[TILE_KEYS / 2], sums[D / 2];
  float most[2], total[2], keep[2];

  __device__ __forceinline__ Softener(const Call& call, const TileRing<D>& rings, Kept* all) : c(call), ring(rings), kept(all + threadIdx.x / 32) {}

  __device__ __forceinline__ int first_row() const { return int(threadIdx.x) / 32 * 16; }

  __device__ __forceinline__ void load_rows(const Block& b) {
    const int lane = threadIdx.x % 32, d = c.kv.head_dim;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first_row() + lane / 4 + 8 * half, at = b.row + row;
      const float* from = c.q + (b.first + at / c.group) * c.q_stride + int64_t(b.head * c.group + at % c.group) * d + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < D / 8; k++) {
        const bool has = row < b.rows && 8 * k < d;
        const float2 pair = has ? *reinterpret_cast<const float2*>(from + 8 * k) : make_float2(0, 0);
        q[k / 2][k % 2 * 2 + half] = to_bf16x2(pair.x, pair.y);
      }
      most[half] = -INFINITY, total[half] = 0;
    }
  }

  __device__ __forceinline__ void wait_for_tile() const {
#ifndef BATON_MUTATION_CUDA_PROMPT_WAIT
    mbarrier_wait(ring.full + turn.slot, turn.round & 1);
#endif
    async_proxy_fence();
  }
  __device__ __forceinline__ uint32_t tile() const { return shared_address(ring.slots + turn.slot * TileRing<D>::SLOT); }
  __device__ __forceinline__ void release(const Turn<D>& read) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty + read.slot);
  }

  // Begins scores = q K of the next tile in the ring.
  __device__ __forceinline__ void begin_scores() {
    wait_for_tile();
    const uint64_t keys = swizzled_matrix(tile(), 8 * LINE);
    wgmma_hold(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      wgmma_bf16(scores, q[k][0], q[k][1], q[k][2], q[k][3], keys + (k / 4 * TileRing<D>::HALF + k % 4 * 32) / 16, k > 0);
    wgmma_commit();
    turn.next();
  }

  // Begins sums += weights V of the next tile in the ring.
  __device__ __forceinline__ void begin_values(bool first) {
    wait_for_tile();
#ifdef BATON_MUTATION_CUDA_PROMPT_LEADING
    const uint64_t values = swizzled_columns(tile(), 0, 8 * LINE);
#else
    const uint64_t values = swizzled_columns(tile(), TileRing<D>::HALF, 8 * LINE);
#endif
    wgmma_hold(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_KEYS / 16; k++)
      wgmma_bf16_across(sums, weights[k][0], weights[k][1], weights[k][2], weights[k][3], values + k * 16 * LINE / 16, k > 0 || !first);
    wgmma_commit();
    turn.next();
  }

  // Scores of the tile at `key` to weights, not rounded yet; `keep`: what the sums so far must be multiplied by. `newest`: the last
  // keys that the lane's rows see.
  __device__ __forceinline__ void soften(const int (&newest)[2], int key) {
    const int low = __shfl_sync(ALL_LANES, newest[0], 0), high = __shfl_sync(ALL_LANES, newest[1], 31);  // of the warp's rows
    if (key + TILE_KEYS - 1 > low || (c.window && key <= high - c.window)) {                             // some don't see all of the tile
      const int column = threadIdx.x % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; half++) {
#ifdef BATON_MUTATION_CUDA_PROMPT_CAUSAL
        const int last = newest[half] + 1 - key - column;
#else
        const int last = newest[half] - key - column;
#endif
        const int first = c.window ? last - c.window + 1 : -TILE_KEYS;
#pragma unroll
        for (int i = 2 * half; i < TILE_KEYS / 2; i += 4)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (i / 4 * 8 + e > last || i / 4 * 8 + e < first) scores[i + e] = -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = most[half];
#pragma unroll
      for (int i = 2 * half; i < TILE_KEYS / 2; i += 4) top = fmaxf(top, fmaxf(scores[i], scores[i + 1]));
      top = warp_max<4>(top);
      const float base = top == -INFINITY ? 0.0f : -top * c.scale;
#ifdef BATON_MUTATION_CUDA_PROMPT_KEEP
      keep[half] = 1.0f;
#else
      keep[half] = exp2_fast(fmaf(most[half], c.scale, base));
#endif
      float sum = 0;
#pragma unroll
      for (int i = 2 * half; i < TILE_KEYS / 2; i += 4)
#pragma unroll
        for (int e = 0; e < 2; e++) sum += scores[i + e] = exp2_fast(fmaf(scores[i + e], c.scale, base));
      most[half] = top, total[half] = fmaf(total[half], keep[half], sum);
    }
    wgmma_hold(scores);  // all of this in front of the wait for the values before
    stays_in_front(total[0] + total[1]);
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 4; i++) weights[i / 4][i % 4] = to_bf16x2(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void run(const Block& b) {
    const int lane = threadIdx.x % 32, group = int(threadIdx.x) / GROUP_THREADS, row = first_row();
    if (lane == 0) kept->first = b.first, kept->row = b.row, kept->rows = b.rows, kept->head = b.head;
    load_rows(b);
    const int newest[2] = {b.seen(c, row + lane / 4).y, b.seen(c, row + lane / 4 + 8).y};
    Turn<D> keys = turn;
    begin_scores();
    wgmma_wait();
    wgmma_hold(scores);
    release(keys);
    soften(newest, b.begin);
    round_weights();
    for (int key = b.begin + TILE_KEYS; key < b.end; key += TILE_KEYS) {
      named_barrier_sync(1 + group, 2 * GROUP_THREADS);
      keys = turn;
      begin_scores();
      const Turn<D> values = turn;
      begin_values(key == b.begin + TILE_KEYS);
      named_barrier_arrive(2 - group, 2 * GROUP_THREADS);
      wgmma_wait_but_one();
      wgmma_hold(scores);
      release(keys);
      soften(newest, key);
#ifdef BATON_MUTATION_CUDA_PROMPT_EMPTY
      release(values);
#endif
      wgmma_wait();
      wgmma_hold(sums);
#ifndef BATON_MUTATION_CUDA_PROMPT_EMPTY
      release(values);
#endif
#pragma unroll
      for (int i = 0; i < D / 2; i++) sums[i] *= keep[i / 2 % 2];
      round_weights();
    }
    const Turn<D> values = turn;
    begin_values(b.end - b.begin <= TILE_KEYS);
    wgmma_wait();
    wgmma_hold(sums);
    release(values);
    __syncwarp();
    write(*kept);
    __syncwarp();
  }

  __device__ __forceinline__ void write(const Kept& b) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first_row() + lane / 4 + 8 * half;
      const float unit = __frcp_rn(warp_sum<4>(total[half]));
      if (row >= b.rows) continue;
      float* to = place_of(c, b, b.row + row) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        if (8 * n < c.kv.head_dim)
          __stcg(reinterpret_cast<float2*>(to + 8 * n), make_float2(sums[4 * n + 2 * half] * unit, sums[4 * n + 2 * half + 1] * unit));
    }
  }
};

template <int D>
__global__ void __launch_bounds__(PAIR_THREADS, 1) prompt_pair(Call c, const AttentionItem* items, int count) {
  BATON_SHARED(char, memory);
  BATON_STATIC_SHARED(int, ends, MOST_ITEMS);
  BATON_STATIC_SHARED(int, scratch, PAIR_THREADS / 32);
  BATON_STATIC_SHARED(Kept, kept, PAIR_WARPS);
  const TileRing<D> ring(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < TileRing<D>::SLOTS; i++) mbarrier_init(ring.full + i, GROUP_THREADS), mbarrier_init(ring.empty + i, READ_BY);
    mbarrier_init_done();
  }
  const int units = plan<PAIR_ROWS, PAIR_THREADS>(c, items, count, ends, scratch);
  if (threadIdx.x / 32 >= PAIR_WARPS) {
    give_registers_up<COPIER_REGISTERS>();
    Copier<D> copier{c, ring, {}};
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) copier.run(unit_of<PAIR_ROWS, TILE_KEYS>(c, items, ends, count, unit));
    return;
  }
  take_registers<SOFTENER_REGISTERS>();
  Softener<D> softener(c, ring, kept);
  const bool second = threadIdx.x >= GROUP_THREADS;
  if (second) named_barrier_arrive(1, 2 * GROUP_THREADS);  // the first group's turn
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) softener.run(unit_of<PAIR_ROWS, TILE_KEYS>(c, items, ends, count, unit));
  if (!second) named_barrier_sync(1, 2 * GROUP_THREADS);  // as many come as wait
}

}  // namespace
}  // namespace baton
