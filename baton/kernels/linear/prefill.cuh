// Many rows by Hopper's warp-group products: 256 outputs by 128 rows a block, two warp groups of 128 outputs and a third of
// which one thread fetches. Outputs are wgmma's rows, so that the panels' chunks are its A operand, loaded from memory into the registers that need
// them, a stage of 128 bytes of K ahead, and nothing else is kept of them; a wide tile of mma.sync (wide.cuh) has the same lanes
// hold the same sums. Knows nothing of rounding.
//
// Rows are B, in shared memory. cuda.cu's rounding writes them as an image of what a block's ring holds: [tile of 128 rows][stage]
// [row][128 bytes], the eight chunks of 16 bytes in a row swapped as the 128-byte swizzle has them; so a stage is one bulk copy.
// K is summed by the same slices as in skinny.cuh: a slice begins a stage, and zeros fill its last one.
#pragma once
#include "../cuda/hopper.cuh"
#include "wide.cuh"

namespace baton {
namespace {

constexpr int PREFILL_ROWS = 128, PREFILL_GROUPS = 8, PREFILL_WARPS = 8, PREFILL_THREADS = 32 * (PREFILL_WARPS + 4);
constexpr int FETCHER_REGISTERS = 24, PRODUCT_REGISTERS = 240;  // of a thread: 168 by launch
constexpr int LINE_BYTES = 128, STAGE_BYTES = PREFILL_ROWS * LINE_BYTES, PREFILL_STAGES = 4;
constexpr int STAGE_STEPS = 32, PRODUCTS = 4;  // the panels' steps in a stage; products along K

// Where rows lie: `slices` of `stages` each, of `slice` inputs. No stages: one behind the other.
struct Image {
  int slice, slices, stages;
  __host__ __device__ int stages_of_all() const { return slices * stages; }
};

struct Prefill {
  Call c;
  Image image;
};

#ifdef BATON_MUTATION_CUDA_LINEAR_PREFILL_ARRIVALS
constexpr int EMPTIED_BY = PREFILL_WARPS - 1;
#else
constexpr int EMPTIED_BY = PREFILL_WARPS;
#endif
#ifdef BATON_MUTATION_CUDA_LINEAR_PREFILL_STRIDE
constexpr uint32_t EIGHT_ROWS = 4 * LINE_BYTES;
#else
constexpr uint32_t EIGHT_ROWS = 8 * LINE_BYTES;
#endif

// The 16 bytes that hold byte `byte` of a row's part in a stage.
__device__ __forceinline__ int swizzled(int row, int byte) {
#ifdef BATON_MUTATION_CUDA_LINEAR_PREFILL_SWIZZLE
  return byte;
#else
  return byte ^ row % 8 * 16;
#endif
}

// Where inputs j … j + 7 of a row lie, of `size` bytes each; j counts through whole stages.
__device__ __forceinline__ int64_t place_of(const Image& image, int64_t row, int j, int size) {
  const int byte = j * size % LINE_BYTES, stage = j * size / LINE_BYTES, line = int(row % PREFILL_ROWS);
  const int64_t tile = row / PREFILL_ROWS * image.stages_of_all() + stage;
  return (tile * PREFILL_ROWS + line) * LINE_BYTES + swizzled(line, byte / 16 * 16) + byte % 16;
}

template <int F>
struct Weights {
  uint4 words[2 * PRODUCTS];  // of the lane's four outputs: product p takes 2 p and 2 p + 1

  // `steps`: that the slice has from `chunks` on.
  __device__ __forceinline__ void load(const char* chunks, int steps) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * PRODUCTS; i++)
      words[i] = 4 * i + t < steps ? __ldg(reinterpret_cast<const uint4*>(chunks + i * 1024)) : make_uint4(0, 0, 0, 0);
    if constexpr (F == FORM_W8)
#pragma unroll
      for (int i = 0; i < 2 * PRODUCTS; i++)
        if (4 * i + t < steps) words[i].x ^= 0x80808080u, words[i].y ^= 0x80808080u, words[i].z ^= 0x80808080u, words[i].w ^= 0x80808080u;
  }
};

template <int F>
__device__ __forceinline__ void multiply_async(typename Traits<F>::Sum (&d)[64], const uint32_t& a0, const uint32_t& a1,
                                               const uint32_t& a2, const uint32_t& a3, uint64_t b, bool more) {
  if constexpr (F == FORM_BF16)
    wgmma_bf16(d, a0, a1, a2, a3, b, more);
  else if constexpr (F == FORM_FP8)
    wgmma_e4m3(d, a0, a1, a2, a3, b, more);
  else
    wgmma_s8(d, a0, a1, a2, a3, b, more);
}

struct Rings {
  char* stages;
  uint64_t *full, *empty;
  float* totals;

  __device__ explicit Rings(char* memory) {
    stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    full = reinterpret_cast<uint64_t*>(stages + PREFILL_STAGES * STAGE_BYTES), empty = full + PREFILL_STAGES;
    totals = reinterpret_cast<float*>(empty + PREFILL_STAGES);
  }
  static constexpr size_t bytes(bool totals) {
    return 1024 + PREFILL_STAGES * (STAGE_BYTES + 16) + (totals ? size_t(128) * 32 * PREFILL_WARPS * 4 : 0);
  }
};

// Stage after stage of rows into the ring, and the weights of the same stage to the L2 cache. One thread.
template <int F>
__device__ __forceinline__ void fetch(const Prefill& p, const Rings& ring, int64_t first_group, int tile) {
  const Call& c = p.c;
  const int count = p.image.stages_of_all(), slice_steps = p.image.slice * STAGE_STEPS / (LINE_BYTES / (F == FORM_BF16 ? 2 : 1));
  for (int i = 0; i < count; i++) {
    const int slot = i % PREFILL_STAGES;
    const int step = i / p.image.stages * slice_steps + i % p.image.stages * STAGE_STEPS;
    const int left = min(panel_steps<F>(c) - step, STAGE_STEPS);
    for (int panel = 0; panel < PREFILL_GROUPS / 2 && left > 0; panel++) {
      const int64_t group = first_group + (c.inner ? panel % 2 * 4 : panel * 2);
      const int64_t n = c.output(group, c.inner && panel >= 2 ? PLACES / 2 : 0) / 64 * 64;
      if (c.covers(group)) bulk_prefetch_l2(chunks_of<F>(c, n) + int64_t(step) * 256, uint32_t(left) * 256);
    }
    if (i == 0) grid_wait();
#ifdef BATON_MUTATION_CUDA_LINEAR_PREFILL_PARITY
    const uint32_t parity = i / PREFILL_STAGES & 1;
#else
    const uint32_t parity = (i / PREFILL_STAGES + 1) & 1;
#endif
    if (i >= PREFILL_STAGES) mbarrier_wait(ring.empty + slot, parity);
    mbarrier_arrive_expect(ring.full + slot, STAGE_BYTES);
    bulk_copy(ring.stages + slot * STAGE_BYTES, c.x + (int64_t(tile) * count + i) * STAGE_BYTES, STAGE_BYTES, ring.full + slot);
  }
}

template <int F>
struct Consumer {
  using Sum = typename Traits<F>::Sum;
  static constexpr bool TOTALS = !Traits<F>::integers;

  const Prefill& p;
  const Rings& ring;
  Sum low[64], high[64];  // the lane's outputs 0 and 1, 2 and 3 of its four
  const char* chunks;
  int slice_steps, steps;
  bool mine;  // the warp has outputs

  __device__ __forceinline__ Consumer(const Prefill& prefill, const Rings& rings, int64_t group) : p(prefill), ring(rings) {
    const int lane = threadIdx.x % 32;
    mine = p.c.covers(group);
    chunks = mine ? chunks_of<F>(p.c, p.c.output(group, lane / 4 * 4)) + lane % 4 * 256 : nullptr;
    slice_steps = p.image.slice * STAGE_STEPS / (LINE_BYTES / (F == FORM_BF16 ? 2 : 1));
    steps = panel_steps<F>(p.c);
  }

  __device__ __forceinline__ void load(Weights<F>& w, int stage) const {
    const int slice = stage / p.image.stages, within = stage % p.image.stages * STAGE_STEPS, from = slice * slice_steps + within;
    w.load(chunks + int64_t(from) * 256, mine ? min(slice_steps - within, steps - from) : 0);
  }

  // Of a stage, and the next one's weights meanwhile.
  __device__ __forceinline__ void multiply(int stage, Weights<F>& w, Weights<F>& next) {
    const int slot = stage % PREFILL_STAGES;
#ifndef BATON_MUTATION_CUDA_LINEAR_PREFILL_WAIT
    mbarrier_wait(ring.full + slot, stage / PREFILL_STAGES & 1);
#endif
    const uint64_t rows = swizzled_matrix(shared_address(ring.stages + slot * STAGE_BYTES), EIGHT_ROWS);
    const bool begins = stage % p.image.stages == 0;
    wgmma_hold(low), wgmma_hold(high);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
      const uint4 &a = w.words[2 * i], &b = w.words[2 * i + 1];
      multiply_async<F>(low, a.x, a.y, b.x, b.y, rows + 2 * i, !begins || i);
      multiply_async<F>(high, a.z, a.w, b.z, b.w, rows + 2 * i, !begins || i);
    }
    wgmma_commit();
    if (stage + 1 < p.image.stages_of_all()) load(next, stage + 1);
#ifdef BATON_MUTATION_CUDA_LINEAR_PREFILL_EMPTY
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty + slot);
#endif
    wgmma_wait();
    wgmma_hold(low), wgmma_hold(high);
#ifndef BATON_MUTATION_CUDA_LINEAR_PREFILL_EMPTY
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty + slot);
#endif
    if (TOTALS && (stage + 1) % p.image.stages == 0) add_slice(stage + 1 == p.image.stages);
  }

  __device__ __forceinline__ float* total(int i) const { return ring.totals + i * 32 * PREFILL_WARPS + threadIdx.x; }

  __device__ __forceinline__ void add_slice(bool first) {
#pragma unroll
    for (int i = 0; i < 64; i++) {
      *total(i) = __fadd_rn(first ? 0.0f : *total(i), float(low[i]));
      *total(i + 64) = __fadd_rn(first ? 0.0f : *total(i + 64), float(high[i]));
    }
  }

  __device__ __forceinline__ void write(int64_t group, int first_row) const {
    const Call& c = p.c;
    const int lane = threadIdx.x % 32, g = lane / 4;
    const int64_t n = c.output(group, 4 * g);
#pragma unroll
    for (int h = 0; h < 32; h++) {
      const int row = first_row + h / 2 * 8 + lane % 4 * 2 + h % 2;
      write_four(c, g, row, n, [&](int q) {
        const int i = h / 2 * 4 + q % 2 * 2 + h % 2;
        return TOTALS ? *total(i + q / 2 * 64) : float(q < 2 ? low[i] : high[i]);
      });
    }
  }
};

template <int F>
__global__ void __launch_bounds__(PREFILL_THREADS, 1) prefill(const Prefill p) {
  BATON_SHARED(char, memory);
  const Rings ring(memory);
  const int warp = threadIdx.x / 32;
  const int64_t first_group = int64_t(blockIdx.y) * PREFILL_GROUPS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < PREFILL_STAGES; i++) mbarrier_init(ring.full + i, 1), mbarrier_init(ring.empty + i, EMPTIED_BY);
    mbarrier_init_done();
  }
  __syncthreads();
  if (warp >= PREFILL_WARPS) {
    give_registers_up<FETCHER_REGISTERS>();
    if (threadIdx.x == 32 * PREFILL_WARPS) fetch<F>(p, ring, first_group, int(blockIdx.x));
    return;
  }
  take_registers<PRODUCT_REGISTERS>();
  Consumer<F> mine(p, ring, first_group + warp);
  Weights<F> even, odd;
  mine.load(even, 0);
  grid_wait();
  grid_launch_next();
  const int count = p.image.stages_of_all();
  for (int stage = 0; stage < count; stage += 2) {
    mine.multiply(stage, even, odd);
    if (stage + 1 < count) mine.multiply(stage + 1, odd, even);
  }
  if (mine.mine) mine.write(first_group + warp, int(blockIdx.x) * PREFILL_ROWS);
}

// Whether rows are many enough to fill three quarters of the device, and the weights are of a form that it multiplies.
inline bool fits_prefill(const Call& c) {
  const bool known = c.w.kind == LINEAR_BF16 || c.w.kind == LINEAR_W8 || c.w.kind == LINEAR_E4M3;
  if (!known || c.w.group || c.m <= 64) return false;
  const int64_t width = PREFILL_GROUPS * (c.inner ? PLACES / 2 : PLACES), outputs = c.inner ? c.inner : c.w.n;
  const int64_t tiles = (c.m + PREFILL_ROWS - 1) / PREFILL_ROWS * ((outputs + width - 1) / width);
  return tiles * 4 >= processors() * 3;
}

inline Image image_of(const Call& c) {
  const int per_line = LINE_BYTES / (c.w.kind == LINEAR_BF16 ? 2 : 1);
  const int slice = c.w.kind == LINEAR_W8 ? (c.padded + 31) / 32 * 32 : c.slice;  // integers are exact in one
  return {slice, (c.padded + slice - 1) / slice, (slice + per_line - 1) / per_line};
}

template <int F>
int run_prefill(const Call& c, const Image& image, void* stream) {
  const int64_t width = PREFILL_GROUPS * (c.inner ? PLACES / 2 : PLACES), outputs = c.inner ? c.inner : c.w.n;
  const dim3 grid(unsigned((c.m + PREFILL_ROWS - 1) / PREFILL_ROWS), unsigned((outputs + width - 1) / width));
  return BATON_LAUNCH_PDL((prefill<F>), grid, dim3(PREFILL_THREADS), Rings::bytes(Consumer<F>::TOTALS), stream, Prefill{c, image});
}

}  // namespace
}  // namespace baton
