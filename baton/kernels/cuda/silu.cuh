// The gate of SwiGLU, so that an op of its own and a GEMM's epilogue give the same bits. Knows nothing of layers.
#pragma once

namespace baton {

// x / (1 + e^-x), from e^-|x| so that nothing overflows.
__device__ __forceinline__ float silu(float x) {
  const float small = expf(-fabsf(x));
#if defined(BATON_MUTATION_CUDA_SWIGLU_SIGN)
  return __fdividef(x, 1.0f + small);
#else
  return __fdividef(x * (x < 0 ? small : 1.0f), 1.0f + small);
#endif
}

}  // namespace baton
