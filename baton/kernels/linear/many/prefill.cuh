// Many rows by Hopper's warp-group products: 256 outputs by 128 rows a block, two warp groups of 128 outputs and a third of
// which one thread fetches. Outputs are wgmma's rows, so that the panels' chunks are its A operand, loaded from memory into the registers that need
// them, a stage of 128 bytes of K ahead, and nothing else is kept of them; a wide tile of mma.sync (wide.cuh) has the same lanes
// hold the same sums. Knows nothing of rounding.
//
// Rows are B, in shared memory. cuda.cu's rounding writes them as an image of what a block's ring holds: [tile of 128 rows][stage]
// [row][128 bytes], the eight chunks of 16 bytes in a row swapped as the 128-byte swizzle has them; so a stage is one bulk copy.
// K is summed by the same slices as in skinny.cuh: a slice begins a stage, and zeros fill its last one. Split along K (split.cuh), a
// block has a part of the slices.
#pragma once
#include "../../cuda/hopper.cuh"
#include "split.cuh"

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
  Parts parts;
  uint32_t flip;  // of a weight's bits: what is stored as value + 128

  __device__ __forceinline__ int first() const { return int(blockIdx.z) * parts.stages; }  // of the block's stages
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

// A stage's weights of the lane's four outputs, as they lie in the panel: product p takes words 2 p and 2 p + 1. They become wgmma's
// registers, which are others, once the stage is waited for: so all of a stage's loads are under way together, while the stage
// before is multiplied.
struct Weights {
  uint4 words[2 * PRODUCTS];

  // `steps`: that the slice has from `chunks` on.
  __device__ __forceinline__ void load(const char* chunks, int steps) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * PRODUCTS; i++)
      words[i] = 4 * i + t < steps ? __ldg(reinterpret_cast<const uint4*>(chunks + i * 1024)) : make_uint4(0, 0, 0, 0);
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
  const int all = p.image.stages_of_all(), slice_steps = p.image.slice * STAGE_STEPS / (LINE_BYTES / (F == FORM_BF16 ? 2 : 1));
  for (int i = 0; i < p.parts.stages; i++) {
    const int slot = i % PREFILL_STAGES, stage = p.first() + i;
    const int step = stage / p.image.stages * slice_steps + stage % p.image.stages * STAGE_STEPS;
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
    bulk_copy(ring.stages + slot * STAGE_BYTES, c.x + (int64_t(tile) * all + stage) * STAGE_BYTES, STAGE_BYTES, ring.full + slot);
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

  // Of the block's stage `number`.
  __device__ __forceinline__ void load(Weights& w, int number) const {
#ifdef BATON_MUTATION_CUDA_LINEAR_SPLIT_BEGIN
    const int stage = number;
#else
    const int stage = p.first() + number;
#endif
    const int slice = stage / p.image.stages, within = stage % p.image.stages * STAGE_STEPS, from = slice * slice_steps + within;
    w.load(chunks + int64_t(from) * 256, mine ? min(slice_steps - within, steps - from) : 0);
  }

  // Of a stage, and the next one's weights meanwhile.
  __device__ __forceinline__ void multiply(int stage, Weights& w) {
    const int slot = stage % PREFILL_STAGES;
#ifndef BATON_MUTATION_CUDA_LINEAR_PREFILL_WAIT
    mbarrier_wait(ring.full + slot, stage / PREFILL_STAGES & 1);
#endif
    const uint64_t rows = swizzled_matrix(shared_address(ring.stages + slot * STAGE_BYTES), EIGHT_ROWS);
    const bool begins = TOTALS ? stage % p.image.stages == 0 : stage == 0;
    uint32_t a[PRODUCTS][2][4];  // of outputs 0 and 1, 2 and 3
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
      const uint4 &one = w.words[2 * i], &two = w.words[2 * i + 1];
      a[i][0][0] = one.x ^ p.flip, a[i][0][1] = one.y ^ p.flip, a[i][0][2] = two.x ^ p.flip, a[i][0][3] = two.y ^ p.flip;
      a[i][1][0] = one.z ^ p.flip, a[i][1][1] = one.w ^ p.flip, a[i][1][2] = two.z ^ p.flip, a[i][1][3] = two.w ^ p.flip;
    }
    wgmma_hold(low), wgmma_hold(high);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
      const uint32_t(&x)[4] = a[i][0], (&y)[4] = a[i][1];
      multiply_async<F>(low, x[0], x[1], x[2], x[3], rows + 2 * i, !begins || i);
      multiply_async<F>(high, y[0], y[1], y[2], y[3], rows + 2 * i, !begins || i);
    }
    wgmma_commit();
    if (stage + 1 < p.parts.stages) load(w, stage + 1);
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
      const auto sum = [&](int q) {
        const int i = h / 2 * 4 + q % 2 * 2 + h % 2;
        if constexpr (TOTALS)
          return *total(i + q / 2 * 64);
        else
          return q < 2 ? low[i] : high[i];
      };
      if (p.parts.at)
        leave_four(p.parts, c, row, n, [&](int q) { return TOTALS ? float(sum(q)) : __int_as_float(int(sum(q))); });
      else
        write_four(c, g, row, n, [&](int q) { return float(sum(q)); });
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
  Weights weights;
  mine.load(weights, 0);
  grid_wait();
  grid_launch_next();
  for (int stage = 0; stage < p.parts.stages; stage++) mine.multiply(stage, weights);
  if (mine.mine) mine.write(first_group + warp, int(blockIdx.x) * PREFILL_ROWS);
}

inline dim3 prefill_grid(const Call& c, int count) {
  const int64_t width = PREFILL_GROUPS * (c.inner ? PLACES / 2 : PLACES), outputs = c.inner ? c.inner : c.w.n;
  return dim3(unsigned((c.m + PREFILL_ROWS - 1) / PREFILL_ROWS), unsigned((outputs + width - 1) / width), unsigned(count));
}

// Into how many parts K falls: 1 where the tiles of all rows fill three quarters of the device. 0: rows are too few, or of a form
// that it doesn't multiply.
inline int prefill_parts(const Call& c) {
  const bool known = c.w.kind == LINEAR_BF16 || c.w.kind == LINEAR_W8 || c.w.kind == LINEAR_E4M3;
  if (!known || c.w.group || c.m <= 64) return 0;
  const dim3 grid = prefill_grid(c, 1);
  const int64_t tiles = int64_t(grid.x) * grid.y;
  if (tiles * 4 >= processors() * 3) return 1;
  const int count = splits(c, tiles, 1);
  return count > 1 ? count : 0;
}

// Of rows for a product in `count` parts.
inline Image image_of(const Call& c, int count) {
  const int per_line = LINE_BYTES / (c.w.kind == LINEAR_BF16 ? 2 : 1);
  const int whole = count > 1 ? slices_of(c) / count * c.slice : (c.padded + 31) / 32 * 32;
  const int slice = c.w.kind == LINEAR_W8 ? whole : c.slice;  // integers are exact in one
  return {slice, (c.padded + slice - 1) / slice, (slice + per_line - 1) / per_line};
}

}  // namespace
}  // namespace baton
