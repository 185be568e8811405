// Experts behind a router: choice, stable sort by expert, gate and up with SwiGLU, down, and each row's weighted sum in order of
// rank. No atomics: the same bits in every run, and for a row whatever the rows beside it. Counts are read on the device.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "grouped.cuh"

namespace baton {
namespace {

constexpr int64_t MOST_ROWS = 2048;  // at a time, to bound what lies between the layers
constexpr int BLOCKS_EACH = 2;

size_t carve(const Moe& m, int64_t rows, char* at, Routed& r) {
  const int64_t n = rows * m.chosen;
  size_t used = 0;
  auto take = [&](auto*& p, int64_t count) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at + used);
    used += (size_t(count) * sizeof *p + 255) / 256 * 256;
  };
  take(r.x, rows * m.hidden), take(r.between, n * m.inner), take(r.y, n * m.hidden), take(r.weights, n);
  take(r.experts, n), take(r.place, n), take(r.order, n), take(r.ends, m.experts);
  return used;
}

int some_rows(const Moe& m, const Routed& r, const float* x, int64_t x_stride, const float* logits, int64_t rows, float* out,
              int64_t out_stride, void* stream) {
  const unsigned chunks = unsigned((m.hidden + 4 * THREADS - 1) / (4 * THREADS));
  int wrong = BATON_LAUNCH_PDL(route, dim3(unsigned(rows + WARPS - 1) / WARPS), dim3(THREADS), 0, stream, m, x, x_stride, logits, int(rows), r);
  if (!wrong) wrong = BATON_LAUNCH_PDL(sort_by_expert, dim3(unsigned(m.experts)), dim3(THREADS), 0, stream, int(rows) * m.chosen, r);
  const dim3 grid(unsigned(processors() * BLOCKS_EACH));
  if (!wrong) wrong = BATON_LAUNCH_PDL((grouped<true>), grid, dim3(THREADS), GROUPED_BYTES, stream, m, r);
  if (!wrong) wrong = BATON_LAUNCH_PDL((grouped<false>), grid, dim3(THREADS), GROUPED_BYTES, stream, m, r);
  if (!wrong) wrong = BATON_LAUNCH_PDL(add_up, dim3(unsigned(rows) * chunks), dim3(THREADS), 0, stream, m, r, chunks, out, out_stride);
  return wrong;
}

}  // namespace
}  // namespace baton

// cudaErrorInvalidValue where a size isn't one of moe.h's, or there is no memory. Weights are 16-byte aligned.
BATON_API int baton_moe(const baton::Moe* moe, const float* x, int64_t x_stride, const float* logits, int64_t rows, float* out,
                        int64_t out_stride, void* stream) {
  using namespace baton;
  const Moe m = *moe;
  if (m.dtype != BF16 || m.hidden % 8 || m.inner % 8 || m.hidden < 8 || m.inner < 8) return int(cudaErrorInvalidValue);
  if (m.experts < 1 || m.experts > MOST_EXPERTS || m.chosen < 1 || m.chosen > MOST_CHOSEN || m.chosen > m.experts) return int(cudaErrorInvalidValue);
  Routed r{};
  const int64_t most = rows < MOST_ROWS ? rows : MOST_ROWS;
  char* memory = rows ? static_cast<char*>(workspace(WORKSPACE_MOE, carve(m, most, nullptr, r), stream)) : nullptr;
  if (rows && !memory) return int(cudaErrorInvalidValue);
  for (int64_t at = 0; at < rows; at += MOST_ROWS) {
    const int64_t some = rows - at < MOST_ROWS ? rows - at : MOST_ROWS;
    carve(m, some, memory, r);
    const int wrong = some_rows(m, r, x + at * x_stride, x_stride, logits + at * m.experts, some, out + at * out_stride, out_stride, stream);
    if (wrong) return wrong;
  }
  return 0;
}
