// A copy, widened: a block to a row. Knows nothing of layers. A table may have some tokens of a vocabulary alone.
#include "../cuda/device.cuh"

namespace baton {
namespace {

constexpr int THREADS = 256, QUAD = 4;

template <class T>
__device__ __forceinline__ float widened(T x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else return from_bf16(x);
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    look_up(const int32_t* tokens, int32_t first, int32_t count, const T* table, int64_t hidden, bool quads, float* out) {
  grid_wait();
  grid_launch_next();
#if defined(BATON_MUTATION_CUDA_EMBEDDING_ROW)
  const int64_t token = tokens[0] - first;
#else
  const int64_t token = int64_t(tokens[blockIdx.x]) - first;
#endif
#if defined(BATON_MUTATION_CUDA_EMBEDDING_PART)
  if (token < 0 || token > count) return;
#else
  if (token < 0 || token >= count) return;
#endif
  const T* from = table + token * hidden;
  float* to = out + int64_t(blockIdx.x) * hidden;
  if (quads)
    for (int64_t i = QUAD * int64_t(threadIdx.x); i < hidden; i += QUAD * THREADS) store4(to + i, load4(from + i));
  else
    for (int64_t i = threadIdx.x; i < hidden; i += THREADS) to[i] = widened(from[i]);
}

template <class T>
int launch(const int32_t* tokens, int64_t rows, int32_t first, int32_t count, const T* table, int64_t hidden, float* out, void* stream) {
  const bool quads = hidden % QUAD == 0 && reinterpret_cast<uintptr_t>(table) % (QUAD * sizeof(T)) == 0 &&
                     reinterpret_cast<uintptr_t>(out) % 16 == 0;
  return BATON_LAUNCH_PDL(look_up<T>, dim3(unsigned(rows)), dim3(THREADS), 0, stream, tokens, first, count, table, hidden, quads, out);
}

}  // namespace
}  // namespace baton

// The table has `count` tokens from `first` on; rows of others' tokens are left as they are.
BATON_API int baton_embedding_part(const int32_t* tokens, int64_t rows, int32_t first, int32_t count, const void* table, int32_t dtype,
                                   int64_t hidden, float* out, void* stream) {
  using namespace baton;
  if (!rows || !hidden) return 0;
  if (dtype == BF16) return launch(tokens, rows, first, count, static_cast<const bf16*>(table), hidden, out, stream);
  return launch(tokens, rows, first, count, static_cast<const float*>(table), hidden, out, stream);
}

BATON_API int baton_embedding(const int32_t* tokens, int64_t rows, const void* table, int32_t dtype, int64_t hidden,
                              float* out, void* stream) {
  return baton_embedding_part(tokens, rows, 0, INT32_MAX, table, dtype, hidden, out, stream);
}
