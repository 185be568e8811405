// The op program as launches on one stream: the same Model and Step as the CPU's. Knows nothing of graphs or buffers; session.cuh,
// which this file holds as well, does. The model's ops, widths and PackedLinear structs are the host's, with addresses of device
// memory in them; everything that Step points at is device memory, read by kernels alone, so that a captured step
// serves any batch of its sizes.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "../rope_append/branches.cuh"
#include "card_rank.h"
#include "fused.cuh"
#include "ops.cuh"

namespace baton {
namespace {

constexpr int GATHER_THREADS = 256;

// The sampled rows of x + delta, one block each.
__global__ void __launch_bounds__(GATHER_THREADS) gather(const float* x, const float* delta, const int32_t* sampled, int64_t n, float* out) {
  grid_wait();
  grid_launch_next();
#if defined(BATON_MUTATION_CUDA_STEP_GATHER)
  const int64_t row = blockIdx.x;
#else
  const int64_t row = sampled[blockIdx.x];
#endif
  const bool quads = n % 4 == 0;
  for (int64_t i = threadIdx.x * 4; quads && i < n; i += GATHER_THREADS * 4) {
    const float4 a = load4(x + row * n + i), b = load4(delta + row * n + i);
    store4(out + blockIdx.x * n + i, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
  }
  for (int64_t i = threadIdx.x; !quads && i < n; i += GATHER_THREADS) out[blockIdx.x * n + i] = x[row * n + i] + delta[row * n + i];
}

constexpr int PUBLISH_THREADS = 256, PUBLISH_WARPS = PUBLISH_THREADS / 32, PUBLISH_PER_DEVICE = 2;

struct Mirror {
  const char* from;
  char* to;
  int64_t page_bytes, plane_bytes;
  int32_t planes, row_bytes, scale_bytes;  // of a token in a plane; its scales lie behind the plane's elements
};

template <class V>
__device__ __forceinline__ void copy_row(char* to, const char* from, int bytes) {
  for (int i = int(threadIdx.x) % 32; i < bytes / int(sizeof(V)); i += 32) reinterpret_cast<V*>(to)[i] = reinterpret_cast<const V*>(from)[i];
}

// A warp to a (row, plane).
__global__ void __launch_bounds__(PUBLISH_THREADS) publish(const Mirror m, const int32_t* slots, int32_t rows) {
  grid_wait();
  grid_launch_next();
  const int64_t units = int64_t(rows) * m.planes, stride = int64_t(gridDim.x) * PUBLISH_WARPS;
  for (int64_t unit = int64_t(blockIdx.x) * PUBLISH_WARPS + threadIdx.x / 32; unit < units; unit += stride) {
    const int32_t slot = slots[unit / m.planes];
    if (slot < 0) continue;
    const int token = slot % PAGE;
    const int64_t plane = int64_t(slot / PAGE) * m.page_bytes + unit % m.planes * m.plane_bytes;
    const int64_t row = plane + int64_t(token) * m.row_bytes, scale = plane + PAGE * int64_t(m.row_bytes) + token * m.scale_bytes;
    if (m.row_bytes % 16 == 0) copy_row<uint4>(m.to + row, m.from + row, m.row_bytes);
    else copy_row<uint32_t>(m.to + row, m.from + row, m.row_bytes);
#if !defined(BATON_MUTATION_CUDA_STEP_SCALES)
    copy_row<uint32_t>(m.to + scale, m.from + scale, m.scale_bytes);
#endif
  }
}

constexpr int CLEAR_THREADS = 256, CLEAR_PER_DEVICE = 4;

__global__ void __launch_bounds__(CLEAR_THREADS) clear(float* out, int64_t count) {
  grid_wait();
  grid_launch_next();
  for (int64_t i = int64_t(blockIdx.x) * CLEAR_THREADS + threadIdx.x; i < count; i += int64_t(gridDim.x) * CLEAR_THREADS) out[i] = 0;
}

// The step's adapters in device memory, and room for their sums; of those beside the head, whose rows are numbers of sampled
// rows, room for what they add to logits.
struct Adapters {
  const LoraGroup* groups;
  int64_t count;
  float* sums;
  const LoraGroup* heads;
  int64_t head_count;
  float* beside;
};

class Run {
 public:
  // `few`: the step's items without the queries of those that prompt attention takes; null: it takes none. `rank`: of one of
  // several, whose program the model is; else null.
  Run(const Model& model, const Step& step, const Adapters& adapters, const Branches& branches, const AttentionItem* few,
      const CardRank* rank, int32_t to, void* stream)
      : m_(model), s_(step), a_(adapters), b_(branches), few_(few), r_(rank), fused_(model, step.rows, to), stream_(stream) {}

  // Op `i`, and those behind it that its launch does as well: `i` goes to the last of them.
  int op(int32_t& i) {
    const Op& o = m_.ops[i];
    switch (o.kind) {
      case OP_EMBED: return embed(o);
      case OP_RMS_NORM: return norm(i);
      case OP_LINEAR: return linear(i);
      case OP_ROPE_APPEND: return rope_append(o);
      case OP_ATTENTION: return attention(o);
      case OP_SWIGLU: return baton_swiglu(at(o.in), s_.rows, width(o.out), at(o.out), stream_);
      case OP_LM_HEAD: return head(o);
      case OP_LORA: return lora(o);
      case OP_MOE:
        return baton_moe(static_cast<const Moe*>(o.table), at(o.in), width(o.in), at(o.delta), s_.rows, at(o.out), width(o.out), stream_);
      case OP_MOE_ADAPTED: return adapted_experts(o);
      case OP_MEETING: return meet(o);
      default: return int(cudaErrorInvalidValue);
    }
  }

 private:
  float* at(int32_t reg) const {
    int64_t before = 0;
    for (int32_t i = 0; i < reg; i++) before += m_.widths[i];
    return s_.arena + before * s_.rows;
  }
  int64_t width(int32_t reg) const { return m_.widths[reg]; }

  // Behind rows of bytes lie their scales: a register has room for floats.
  float* scales(int32_t reg) const { return at(reg) + s_.rows * width(reg) / 4; }

  int embed(const Op& o) const {
    if (!r_) return baton_embedding(s_.tokens, s_.rows, o.table, o.table_dtype, m_.hidden, at(o.out), stream_);
    return baton_embedding_part(s_.tokens, s_.rows, r_->first_token, r_->tokens, o.table, o.table_dtype, m_.hidden, at(o.out), stream_);
  }

  int meet(const Op& o) const {
    if (!r_) return int(cudaErrorInvalidValue);
    const Exchange& x = r_->exchange;
    if (o.window) return baton_gather_rows(&x, at(o.in), s_.tokens, r_->tokens, r_->first_token, s_.rows, width(o.out), at(o.out), stream_);
    return baton_gather_columns(&x, at(o.in), o.layer, o.delta, s_.rows, width(o.out), at(o.out), stream_);
  }

  int norm(int32_t i) {
    const Op& o = m_.ops[i];
    const float* delta = o.delta < 0 ? nullptr : at(o.delta);
    form_ = uintptr_t(at(o.out)) % 16 ? ROWS_F32 : fused_.after_norm(i);
    if (form_ == ROWS_F32) return baton_rms_norm(at(o.in), delta, o.norm, o.eps, s_.rows, m_.hidden, at(o.out), stream_);
    return baton_rms_norm_quantized(at(o.in), delta, o.norm, o.eps, s_.rows, m_.hidden, form_, at(o.out), scales(o.out), stream_);
  }

  // `form_` is of the rows that the op in front wrote for this one.
  int linear(int32_t& i) {
    const Op& o = m_.ops[i];
    const RowForm form = form_;
    const bool gated = fused_.gated(i);
    form_ = gated ? fused_.after_gate(i) : ROWS_F32;
    if (gated) i++;
    const int32_t to = m_.ops[i].out, dtype = form_ == ROWS_BF16 ? BF16 : F32;
    if (form == ROWS_F32 && !gated) return baton_dense(o.weight, at(o.in), width(o.in), s_.rows, o.bias, at(to), width(to), stream_);
    if (form == ROWS_INT8 || form == ROWS_E4M3) {
      const auto product = gated ? baton_linear_rounded_swiglu : baton_linear_rounded;
      return product(o.weight, at(o.in), scales(o.in), s_.rows, o.bias, at(to), dtype, width(to), stream_);
    }
    const auto product = gated ? baton_linear_swiglu : baton_linear;
    return product(o.weight, at(o.in), form == ROWS_BF16 ? BF16 : F32, width(o.in), s_.rows, o.bias, at(to), dtype, width(to), stream_);
  }

  int lora(const Op& o) const {
    if (!a_.count) return 0;
    const float* x = o.in < 0 ? nullptr : at(o.in);
    return baton_lora_rows(a_.groups, a_.count, s_.rows, o.layer, x, o.in < 0 ? 0 : width(o.in), s_.tokens, at(o.out), width(o.out),
                           a_.sums, stream_);
  }

  int adapted_experts(const Op& o) const {
    const AdaptedMoe& moe = *static_cast<const AdaptedMoe*>(o.table);
    const ExpertAdapters of{a_.groups, a_.count, moe.gate_up, moe.down};
    return baton_adapted_moe(&moe, &of, at(o.in), width(o.in), at(o.delta), s_.rows, at(o.out), width(o.out), stream_);
  }

  PagedKv kv(const Op& o) const {
    return {s_.pages, s_.page_bytes, o.layer * s_.layer_bytes, s_.kv_type, m_.kv_heads, m_.head_dim};
  }

  int rope_append(const Op& o) const {
    const PagedKv pages = kv(o);
#if defined(BATON_MUTATION_CUDA_STEP_BRANCH_ORDER)
    if (b_.count) branch(pages);
    const Branches b_{};
#endif
    const int wrong = baton_rope_append(&pages, s_.items, s_.item_count, m_.heads, s_.angles, s_.angles_stride, o.q_norm, o.k_norm,
                                        o.eps, at(o.in), stream_);
    return wrong || !b_.count ? wrong : branch(pages);
  }

  int branch(const PagedKv& pages) const {
    const int32_t element = pages.type == KV_F32 ? 4 : pages.type == KV_BF16 ? 2 : 1, scales = element == 1 ? m_.kv_heads * 4 : 0;
    const int32_t bytes = m_.kv_heads * m_.head_dim * element;
    const HeadRows in{pages.pages + pages.layer_offset, pages.page_bytes, s_.layer_bytes / 2, bytes, 0, scales, 0};
    return BATON_LAUNCH_PDL(begin_branches, dim3(unsigned(processors())), dim3(BRANCH_THREADS), 0, stream_, in, 2, bytes, scales, b_);
  }

  int attention(const Op& o) const {
    const PagedKv pages = kv(o);
    if (s_.group_count && !o.window)
      return baton_cascade_attention(&pages, s_.items, s_.item_count, s_.groups, s_.group_count, m_.heads, m_.scale, at(o.in),
                                     width(o.in), s_.rows, at(o.out), width(o.out), stream_);
    const int wrong = baton_paged_attention(&pages, few_ ? few_ : s_.items, s_.item_count, m_.heads, o.window, m_.scale, at(o.in),
                                            width(o.in), at(o.out), width(o.out), stream_);
    if (wrong || !few_) return wrong;
    return baton_prompt_attention(&pages, s_.items, s_.item_count, m_.heads, o.window, m_.scale, at(o.in), width(o.in), at(o.out),
                                  width(o.out), stream_);
  }

  // Only the sampled rows are normed and projected.
  int head(const Op& o) const {
    if (!s_.sampled_count) return 0;
    const int64_t n = m_.hidden, floats = s_.sampled_count * n;
    float* sum = (float*)workspace(WORKSPACE_STEP, size_t(floats) * 8, stream_);
    if (!sum) return 2;  // cudaErrorMemoryAllocation
    const int wrong = BATON_LAUNCH_PDL(gather, dim3(unsigned(s_.sampled_count)), dim3(GATHER_THREADS), 0, stream_, at(o.in), at(o.delta),
                                       s_.sampled, n, sum);
    if (wrong) return wrong;
    if (const int bad = baton_rms_norm(sum, nullptr, o.norm, o.eps, s_.sampled_count, n, sum + floats, stream_)) return bad;
    if (a_.head_count) return adapted_head(o, sum + floats);
    return baton_lm_head(o.weight, sum + floats, n, s_.sampled_count, s_.choices, stream_);
  }

  // `o.layer` is the head's site.
  int adapted_head(const Op& o, const float* x) const {
    const int64_t rows = s_.sampled_count, vocab = o.weight->n;
    const dim3 grid = dim3(unsigned(CLEAR_PER_DEVICE * processors()));
#if !defined(BATON_MUTATION_CUDA_STEP_HEAD)
    if (const int wrong = BATON_LAUNCH_PDL(clear, grid, dim3(CLEAR_THREADS), 0, stream_, a_.beside, rows * vocab)) return wrong;
#endif
    const int wrong = baton_lora_rows(a_.heads, a_.head_count, rows, o.layer, x, m_.hidden, nullptr, a_.beside, vocab, a_.sums, stream_);
    return wrong ? wrong : baton_lm_head_beside(o.weight, x, m_.hidden, int32_t(rows), a_.beside, s_.choices, stream_);
  }

  const Model& m_;
  const Step& s_;
  const Adapters& a_;
  const Branches b_;
  const AttentionItem* few_;
  const CardRank* r_;
  const Fused fused_;
  void* stream_;
  RowForm form_ = ROWS_F32;
};

// Ops from … to - 1; `appended` is told of each layer whose keys and values are on their way into the pages.
template <class Appended>
int run_ops(const Model& model, const Step& step, const Adapters& adapters, const Branches& branches, const AttentionItem* few,
            const CardRank* rank, int32_t from, int32_t to, void* stream, const Appended& appended) {
  Run run(model, step, adapters, branches, few, rank, to, stream);
  for (int32_t i = from; i < to; i++) {
    if (const int wrong = run.op(i)) return wrong;
    if (model.ops[i].kind != OP_ROPE_APPEND) continue;
    if (const int wrong = appended(model.ops[i].layer)) return wrong;
  }
  return 0;
}

}  // namespace
}  // namespace baton

// Ops from … to - 1 as launches, neighbours in one where fused.cuh allows it. The first that fails ends it. No row has an adapter.
BATON_API int baton_step(const baton::Model* model, const baton::Step* step, int32_t from, int32_t to, void* stream) {
  return baton::run_ops(*model, *step, {}, {}, nullptr, nullptr, from, to, stream, [](int32_t) { return 0; });
}

#include "session.cuh"
