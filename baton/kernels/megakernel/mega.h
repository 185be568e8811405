// A Llama's decode step as one launch: what the kernel is told. Knows nothing of sessions or graphs.
//
// `fits` says whether a program is of the shape, and else which op is not; `layers` writes what the kernel reads of each
// layer, to be kept in device memory; `baton_megakernel` launches all ops but the last one, the LM head.
#pragma once
#include "../step/step.h"

namespace baton {

constexpr int32_t MEGA_ROWS = 8;  // at most, and as many items

}  // namespace baton

// Op: the first that the kernel has no form for, or -1; why: a sentence's end about it.
BATON_API int baton_megakernel_fits(const baton::Model* model, int32_t kv_type, int32_t* op, const char** why);
// Bytes of the layers' descriptions; `to`: null, or that many bytes of host memory.
BATON_API int baton_megakernel_layers(const baton::Model* model, void* to, int64_t* bytes);
// blocks: of the grid; 0: one per multiprocessor. cudaErrorInvalidValue where the program doesn't fit.
BATON_API int baton_megakernel(const baton::Model* model, const baton::Step* step, const void* layers, int32_t blocks, void* stream);
