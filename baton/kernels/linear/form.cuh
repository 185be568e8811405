// What a GEMM's kernels are told, and how each form's weights and rows lie for mma. Knows nothing of schedules.
//
// The unit of K is a block of 32 inputs (16 of bf16): a lane (g = lane / 4, t = lane % 4) takes, of row g, the bytes
// t x PIECE … of the block, and of the weights one 16-byte chunk per CHUNKS: the words of outputs 4g … 4g + 3 in one step of
// the panel. Those words are what the lane holds of mma's A, two outputs (its rows g and g + 8) in each of two m-tiles, and
// the row's piece is what it holds of B. The order of K within a block is the panels' own, the same in both.
#pragma once
#include "linear.h"

namespace baton {
namespace {

// PackedLinear.kind of a GPU alone: steps of 4 inputs, [n 64][k 4] e4m3, and row_scale; rows are rounded to e4m3, too.
constexpr int32_t LINEAR_E4M3 = 3;

enum Form { FORM_BF16, FORM_W8, FORM_W4, FORM_W4A16, FORM_FP8 };
enum Mode { PLAIN, GROUPS, ANY };  // no groups; groups of whole blocks, no mins; groups of 16, 48 …, or mins

constexpr int WARPS = 8, THREADS = 32 * WARPS, SLICES = WARPS, PLACES = 32;

template <int F>
struct Traits {
  static constexpr bool int4 = F == FORM_W4 || F == FORM_W4A16, integers = F == FORM_W8 || F == FORM_W4;
  static constexpr int INPUTS = F == FORM_BF16 ? 16 : 32;  // of a block
  static constexpr int PIECE = F == FORM_W4A16 ? 16 : 8;   // bytes of a row per lane and block
  static constexpr int CHUNKS = int4 ? 1 : 2;              // 16 bytes of weights per lane and block
  static constexpr int STEPS = 4 * CHUNKS;                 // of the panel per block
  using Sum = std::conditional_t<integers, int, float>;
};

struct Call {
  PackedLinear w;
  const char* x;  // rows as they are multiplied: int8, e4m3 or bf16 (of W4A16 each eight as 0 2 1 3 4 6 5 7)
  int64_t x_bytes;         // from row to row
  const float* x_scales;   // per row, or null
  const float* bias;
  void* out;
  int64_t out_stride;
  int out_dtype, m, valid;  // valid: bytes of a row that may be read
  int padded, groups, slice;  // inputs of the panels, groups of them, inputs of each of the SLICES in which K is summed
  int inner;                // 0, or: out is silu(gate) x up, of which w holds `inner` rows each
  bool aligned;             // out takes four columns at once

  // The output behind place p of a group of 32: with a gate, 16 of it and 16 of what it is for.
  __device__ __forceinline__ int64_t output(int64_t group, int p) const {
    return !inner ? group * PLACES + p : group * (PLACES / 2) + p % (PLACES / 2) + (p < PLACES / 2 ? 0 : inner);
  }
  __device__ __forceinline__ bool covers(int64_t group) const { return group * (inner ? PLACES / 2 : PLACES) < (inner ? inner : w.n); }
};

template <int F>
__device__ __forceinline__ int panel_steps(const Call& c) {
  return c.padded / (F == FORM_BF16 ? 2 : Traits<F>::int4 ? 8 : 4);
}

// The chunk of 16 bytes for outputs n … n + 3 in their panel's first step; a step is 256 bytes.
template <int F>
__device__ __forceinline__ const char* chunks_of(const Call& c, int64_t n) {
  return static_cast<const char*>(c.w.data) + (n / 64 * panel_steps<F>(c) * 64 + n % 64) * 4;
}

// Where the eight scales (or mins) of outputs n … n + 7 lie in their panel's first group; a group is 64 numbers.
__device__ __forceinline__ int64_t groups_of(const Call& c, int64_t n) { return n / 64 * c.groups * 64 + n % 64; }

__device__ __forceinline__ int group_place(int group) {
#ifdef BATON_MUTATION_CUDA_LINEAR_GROUP
  return 0;
#else
  return group * 64;
#endif
}

// Which of the blocks' parts close a group: walks along K, a part at a time.
struct Groups {
  int parts, left, index;  // parts per group, those to come, the group's number

  __device__ Groups(const Call& c, int part, int from) {
    parts = c.w.group ? c.w.group / part : 1 << 30;
    index = from / part / parts, left = parts;  // a slice begins with a group
  }
  __device__ bool closes() {  // the part that comes next
    if (--left) return false;
    left = parts;
    index++;
    return true;
  }
};

}  // namespace
}  // namespace baton
