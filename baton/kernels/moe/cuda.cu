// Experts behind a router: choice, stable sort by expert, gate and up with SwiGLU, down, and each row's weighted sum in order of
// rank. No atomics: the same bits in every run, and for a row whatever the rows beside it. Counts are read on the device.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "adapters.cuh"

namespace baton {
namespace {

constexpr int64_t MOST_ROWS = 2048;         // at a time, to bound what lies between the layers
constexpr int64_t FEWEST_ROWS = 256;        // of a step that is captured: all at once
// Of what adapters add to gates and ups, at a time, where rows are more than FEWEST_ROWS; little on the shim, so that there are such.
#ifdef BATON_SIMT
constexpr int64_t ADDED_BYTES = 64 << 10;
#else
constexpr int64_t ADDED_BYTES = 128 << 20;
#endif
constexpr int BLOCKS_EACH = 2;

int64_t most_rows(const Moe& m, bool adapted) {
  if (!adapted) return MOST_ROWS;
  const int64_t fit = ADDED_BYTES / (m.chosen * 2 * m.inner * 4);
  return fit < FEWEST_ROWS ? FEWEST_ROWS : fit < MOST_ROWS ? fit : MOST_ROWS;
}

size_t carve(const Moe& m, bool adapted, int64_t rows, char* at, Routed& r) {
  const int64_t n = rows * m.chosen;
  size_t used = 0;
  auto take = [&](auto*& p, int64_t count) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at + used);
    used += (size_t(count) * sizeof *p + 255) / 256 * 256;
  };
  take(r.x, rows * m.hidden), take(r.between, n * m.inner), take(r.y, n * m.hidden), take(r.weights, n);
  take(r.experts, n), take(r.place, n), take(r.order, n), take(r.ends, m.experts);
  if (adapted) take(r.beside_gates, n), take(r.beside_down, n), take(r.sums, n * SUMS), take(r.added, n * 2 * m.inner);
  return used;
}

// What adapters have beside the first layer, whose rows are `r.x`, or beside the second, whose rows are `r.between`.
template <bool second>
int beside(const Moe& m, const Routed& r, int64_t rows, void* stream) {
  const int places = int(rows) * m.chosen;
  const unsigned tiles = unsigned(places + TILE - 1) / TILE;
  const Beside b = second ? Beside{r.between, m.inner, m.hidden, r.beside_down, nullptr, 1, places, r.sums, r.y}
                          : Beside{r.x, m.hidden, 2 * m.inner, r.beside_gates, r.order, m.chosen, places, r.sums, r.added};
  const int wrong = BATON_LAUNCH_PDL(shrink_beside, dim3(tiles, SHRINKERS), dim3(THREADS), 0, stream, b);
  return wrong ? wrong : BATON_LAUNCH_PDL((expand_beside<second>), dim3(tiles, EXPANDERS), dim3(THREADS), 0, stream, b);
}

// `of`: null where no row has an adapter; `first`: the number of row 0 among the step's.
int some_rows(const Moe& m, const ExpertAdapters* of, int64_t first, const Routed& r, const float* x, int64_t x_stride, const float* logits,
              int64_t rows, float* out, int64_t out_stride, void* stream) {
  const unsigned chunks = unsigned((m.hidden + 4 * THREADS - 1) / (4 * THREADS));
  const dim3 by_rows(unsigned(rows + WARPS - 1) / WARPS), grid(unsigned(processors() * BLOCKS_EACH)), threads(THREADS);
  int wrong = BATON_LAUNCH_PDL(route, by_rows, threads, 0, stream, m, x, x_stride, logits, int(rows), r);
  if (!wrong) wrong = BATON_LAUNCH_PDL(sort_by_expert, dim3(unsigned(m.experts)), threads, 0, stream, int(rows) * m.chosen, r);
  if (!wrong && of) wrong = BATON_LAUNCH_PDL(find_beside, by_rows, threads, 0, stream, m, *of, int(rows), first, r);
  if (!wrong && of) wrong = beside<false>(m, r, rows, stream);
  if (!wrong && of) wrong = BATON_LAUNCH_PDL((grouped<true, true>), grid, threads, GROUPED_BYTES, stream, m, r);
  if (!wrong && !of) wrong = BATON_LAUNCH_PDL((grouped<true, false>), grid, threads, GROUPED_BYTES, stream, m, r);
  if (!wrong) wrong = BATON_LAUNCH_PDL((grouped<false, false>), grid, threads, GROUPED_BYTES, stream, m, r);
  if (!wrong && of) wrong = beside<true>(m, r, rows, stream);
  if (!wrong) wrong = BATON_LAUNCH_PDL(add_up, dim3(unsigned(rows) * chunks), threads, 0, stream, m, r, chunks, out, out_stride);
  return wrong;
}

int all_rows(const Moe& m, const ExpertAdapters* of, const float* x, int64_t x_stride, const float* logits, int64_t rows, float* out,
             int64_t out_stride, void* stream) {
  if (m.dtype != BF16 || m.hidden % 8 || m.inner % 8 || m.hidden < 8 || m.inner < 8) return int(cudaErrorInvalidValue);
  if (m.experts < 1 || m.experts > MOST_EXPERTS || m.chosen < 1 || m.chosen > MOST_CHOSEN || m.chosen > m.experts) return int(cudaErrorInvalidValue);
  Routed r{};
  const int64_t fit = most_rows(m, of != nullptr), most = rows < fit ? rows : fit;
  char* memory = rows ? static_cast<char*>(workspace(WORKSPACE_MOE, carve(m, of != nullptr, most, nullptr, r), stream)) : nullptr;
  if (rows && !memory) return int(cudaErrorInvalidValue);
  for (int64_t at = 0; at < rows; at += most) {
    const int64_t some = rows - at < most ? rows - at : most;
    carve(m, of != nullptr, some, memory, r);
    const int wrong = some_rows(m, of, at, r, x + at * x_stride, x_stride, logits + at * m.experts, some, out + at * out_stride, out_stride, stream);
    if (wrong) return wrong;
  }
  return 0;
}

}  // namespace
}  // namespace baton

// cudaErrorInvalidValue where a size isn't one of moe.h's, or there is no memory. Weights are 16-byte aligned.
BATON_API int baton_moe(const baton::Moe* moe, const float* x, int64_t x_stride, const float* logits, int64_t rows, float* out,
                        int64_t out_stride, void* stream) {
  return baton::all_rows(*moe, nullptr, x, x_stride, logits, rows, out, out_stride, stream);
}

// Groups and what they point at lie in device memory; their number is the host's. No form with biases.
BATON_API int baton_adapted_moe(const baton::AdaptedMoe* moe, const baton::ExpertAdapters* of, const float* x, int64_t x_stride,
                                const float* logits, int64_t rows, float* out, int64_t out_stride, void* stream) {
  if (moe->biased) return int(cudaErrorInvalidValue);
  return baton::all_rows(*moe->moe, of->count ? of : nullptr, x, x_stride, logits, rows, out, out_stride, stream);
}
