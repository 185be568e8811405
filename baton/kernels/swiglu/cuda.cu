// Elementwise, four neighbours to a thread; a value doesn't depend on its place. Knows nothing of layers.
#include <climits>

#include "../cuda/device.cuh"
#include "../cuda/silu.cuh"

namespace baton {
namespace {

constexpr int THREADS = 256, PER = 2;

__device__ __forceinline__ float product(float gate, float up) { return silu(gate) * up; }
__device__ __forceinline__ float4 product(float4 gate, float4 up) {
  return make_float4(product(gate.x, up.x), product(gate.y, up.y), product(gate.z, up.z), product(gate.w, up.w));
}

// `inner` and `chunk` in units of V: a block has one chunk of one row.
template <class V>
__global__ void __launch_bounds__(THREADS) swiglu(const V* gate_up, unsigned chunks, int64_t inner, V* out) {
  const int64_t row = blockIdx.x / chunks, first = int64_t(blockIdx.x % chunks) * PER * THREADS + threadIdx.x;
  const V* gate = gate_up + 2 * row * inner;
  V* to = out + row * inner;
  V g[PER], u[PER];
  grid_wait();
  grid_launch_next();
#pragma unroll
  for (int k = 0; k < PER; k++)
    if (first + k * THREADS < inner) g[k] = gate[first + k * THREADS], u[k] = gate[inner + first + k * THREADS];
#pragma unroll
  for (int k = 0; k < PER; k++)
    if (first + k * THREADS < inner) to[first + k * THREADS] = product(g[k], u[k]);
}

template <class V>
int launch(const float* gate_up, int64_t rows, int64_t inner, float* out, void* stream) {
  const int64_t units = inner * int64_t(sizeof(float)) / int64_t(sizeof(V)), chunks = (units + PER * THREADS - 1) / (PER * THREADS);
  if (rows * chunks > INT_MAX) return cudaErrorInvalidValue;
  return BATON_LAUNCH_PDL((swiglu<V>), dim3(unsigned(rows * chunks)), dim3(THREADS), 0, stream, reinterpret_cast<const V*>(gate_up),
                          unsigned(chunks), units, reinterpret_cast<V*>(out));
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace
}  // namespace baton

BATON_API int baton_swiglu(const float* gate_up, int64_t rows, int64_t inner, float* out, void* stream) {
  using namespace baton;
  if (!rows || !inner) return 0;
  if (inner % 4 == 0 && aligned(gate_up) && aligned(out)) return launch<float4>(gate_up, rows, inner, out, stream);
  return launch<float>(gate_up, rows, inner, out, stream);
}
