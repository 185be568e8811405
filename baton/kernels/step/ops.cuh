// The ops' symbols that the step calls on a stream. Knows nothing of their order. Each op's cuda.cu defines its own.
#pragma once
#include "../cascade_attention/cascade.h"
#include "../collective/exchange.h"
#include "../lora/rows.cuh"
#include "../moe/adapted.h"
#include "../prompt_attention/prompt.h"
#include "step.h"

BATON_API int baton_embedding(const int32_t* tokens, int64_t rows, const void* table, int32_t dtype, int64_t hidden, float* out,
                              void* stream);
BATON_API int baton_embedding_part(const int32_t* tokens, int64_t rows, int32_t first, int32_t count, const void* table, int32_t dtype,
                                   int64_t hidden, float* out, void* stream);
BATON_API int baton_gather_columns(const baton::Exchange* x, const float* in, int64_t own, int64_t first, int64_t rows, int64_t width,
                                   float* out, void* stream);
BATON_API int baton_gather_rows(const baton::Exchange* x, const float* in, const int32_t* tokens, int64_t own, int64_t first, int64_t rows,
                                int64_t width, float* out, void* stream);
BATON_API int baton_rms_norm(float* x, const float* delta, const float* weight, float eps, int64_t rows, int64_t hidden, float* out,
                             void* stream);
BATON_API int baton_rms_norm_quantized(float* x, const float* delta, const float* weight, float eps, int64_t rows, int64_t hidden,
                                       int32_t rounding, void* out, float* scales, void* stream);
BATON_API int baton_dense(const baton::PackedLinear* w, const float* x, int64_t x_stride, int64_t m, const float* bias, float* out,
                          int64_t out_stride, void* stream);
BATON_API int baton_linear(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m, const float* bias,
                           void* out, int32_t out_dtype, int64_t out_stride, void* stream);
BATON_API int baton_linear_swiglu(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                                  const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream);
BATON_API int baton_linear_rounded(const baton::PackedLinear* w, const void* q, const float* scales, int64_t m, const float* bias,
                                   void* out, int32_t out_dtype, int64_t out_stride, void* stream);
BATON_API int baton_linear_rounded_swiglu(const baton::PackedLinear* w, const void* q, const float* scales, int64_t m,
                                          const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream);
BATON_API int baton_rope_append(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count, int32_t heads,
                                const float* angles, int64_t angles_stride, const float* q_norm, const float* k_norm, float eps,
                                float* qkv, void* stream);
BATON_API int baton_paged_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count, int32_t heads,
                                    int32_t window, float scale, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                                    void* stream);
BATON_API int baton_cascade_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                                      const baton::PrefixGroup* groups, int32_t group_count, int32_t heads, float scale,
                                      const float* q, int64_t q_stride, int64_t rows, float* out, int64_t out_stride, void* stream);
BATON_API int baton_moe(const baton::Moe* moe, const float* x, int64_t x_stride, const float* logits, int64_t rows, float* out,
                        int64_t out_stride, void* stream);
BATON_API int baton_adapted_moe(const baton::AdaptedMoe* moe, const baton::ExpertAdapters* of, const float* x, int64_t x_stride,
                                const float* logits, int64_t rows, float* out, int64_t out_stride, void* stream);
BATON_API int baton_swiglu(const float* gate_up, int64_t rows, int64_t inner, float* out, void* stream);
BATON_API int baton_lm_head(const baton::PackedLinear* w, const float* x, int64_t x_stride, int32_t rows, baton::Choice* choices,
                            void* stream);
BATON_API int baton_lm_head_beside(const baton::PackedLinear* w, const float* x, int64_t x_stride, int32_t rows, const float* beside,
                                   baton::Choice* choices, void* stream);
