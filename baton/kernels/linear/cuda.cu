// linear on a GPU: one small kernel rounds the rows, one multiplies them by the CPU's panels on tensor cores. Knows nothing of
// models. Up to 64 rows, a row's bits don't depend on its batch: K is summed in eight slices, by its length alone, in all kernels. Of
// more rows, a product that is split into two or four parts adds floats in another order; so does cuBLASLt, which bf16 weights
// that lie row by row may go to.
#include <algorithm>

#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "by_row.cuh"
#include "library.cuh"
#include "many/prefill.cuh"
#include "many/wide.cuh"
#include "prepare.cuh"
#include "round.cuh"

namespace baton {
namespace {

// A row of k numbers to `width` rounded ones, zeros behind; of integers and fp8, by the row's largest magnitude. Rows lie one behind
// the other, or as an image has them.
template <class X, int R>
__global__ void __launch_bounds__(ROUNDERS) round_rows(const X* x, int64_t stride, int k, int width, bool aligned, char* out,
                                                       float* scales, const Image image) {
  BATON_STATIC_SHARED(uint32_t, scratch, ROUNDERS / 32);
  grid_wait();
  grid_launch_next();
  const size_t row = blockIdx.x;
  constexpr int size = R == TO_INT8 || R == TO_E4M3 ? 1 : 2;
  const int span = image.stages * (LINE_BYTES / size);
  round_row<R>(x + row * stride, k, width, aligned, scales + row, scratch, [&](int at, int& i) {
    if (image.stages) i = at % span < image.slice ? at / span * image.slice + at % span : k;
    return out + (image.stages ? place_of(image, int64_t(row), at, size) : (int64_t(row) * width + at) * size);
  });
}

struct Input {
  const void* x;
  int32_t dtype;
  int64_t stride;
};

template <int R>
int round_to(Call& c, const Input& in, void* stream, const Image& image = {}) {
  constexpr bool narrow = R == TO_INT8 || R == TO_E4M3;
  const int k = int(c.w.k), size = in.dtype == BF16 ? 2 : 4;
  const int width = image.stages ? image.stages_of_all() * LINE_BYTES / (narrow ? 1 : 2) : up(k, 16);
  c.x_bytes = c.valid = width * (narrow ? 1 : 2);
  const size_t rows = image.stages ? size_t(up(c.m, PREFILL_ROWS)) : size_t(c.m);
  char* memory = (char*)workspace(WORKSPACE_ROWS, rows * (c.x_bytes + 4), stream);
  if (!memory) return 2;  // cudaErrorMemoryAllocation
  float* scales = (float*)(memory + rows * c.x_bytes);
  c.x = memory, c.x_scales = narrow ? scales : nullptr;
  const bool aligned = (uintptr_t(in.x) | size_t(in.stride) * size) % 16 == 0;
  const dim3 grid(unsigned(c.m)), block(ROUNDERS);
  if (in.dtype == BF16)
    return BATON_LAUNCH_PDL((round_rows<bf16, R>), grid, block, 0, stream, (const bf16*)in.x, in.stride, k, width, aligned, memory, scales, image);
  return BATON_LAUNCH_PDL((round_rows<float, R>), grid, block, 0, stream, (const float*)in.x, in.stride, k, width, aligned, memory, scales, image);
}

template <int F, int MODE, int NT>
int run_skinny(const Call& c, int columns, void* stream) {
  const dim3 grid(unsigned(columns), unsigned(parts(c.m, NT * 8)));
  return BATON_LAUNCH_PDL((skinny<F, MODE, NT>), grid, dim3(THREADS), (Ring<F, MODE, NT>::BYTES), stream, c);
}

// Parts of sums to outputs.
int run_add(const Call& c, const Parts& p, void* stream) {
  const dim3 grid(unsigned(c.m), unsigned(parts(c.inner ? c.inner : c.w.n, FINISHERS * 4)));
  if (p.count == 2) return BATON_LAUNCH_PDL(add_parts<2>, grid, dim3(FINISHERS), 0, stream, c, p);
  if (p.count == 4) return BATON_LAUNCH_PDL(add_parts<4>, grid, dim3(FINISHERS), 0, stream, c, p);
  return BATON_LAUNCH_PDL(add_parts<8>, grid, dim3(FINISHERS), 0, stream, c, p);
}

template <int F, int MODE>
int run_wide(const Call& c, int high, int across, int count, void* stream) {
  using S = Stages<F, MODE>;
  Parts p{};
  if (count > 1) p = parts_of(c, count, slices_of(c) / count * c.slice / S::INPUTS, !S::TOTALS, Tile<F, MODE, 1>::UNIT, stream);
  if (count > 1 && !p.at) return 2;  // cudaErrorMemoryAllocation
  const dim3 grid{unsigned(high), unsigned(across), unsigned(count)};
  const int wrong = BATON_LAUNCH_PDL((wide<F, MODE>), grid, dim3(THREADS), S::BYTES, stream, c, p);
  return wrong || count == 1 ? wrong : run_add(c, p, stream);
}

// The wide kernel from where it fills half the device, or splits to do so.
template <int F, int MODE>
int run(const Call& c, void* stream) {
  const int columns = parts(c.inner ? c.inner : c.w.n, c.inner ? PLACES / 2 : PLACES);
  const int high = parts(c.m, WIDE_ROWS), across = parts(columns, WIDE_GROUPS);
  const int64_t tiles = int64_t(high) * across;
  if (c.m > 64 && tiles * 2 >= processors()) return run_wide<F, MODE>(c, high, across, 1, stream);
  const int count = c.m > 64 ? splits(c, tiles, Stages<F, MODE>::INPUTS) : 1;
  if (count > 1) return run_wide<F, MODE>(c, high, across, count, stream);
  if (c.m <= 8) return run_skinny<F, MODE, 1>(c, columns, stream);
  if (c.m <= 16) return run_skinny<F, MODE, 2>(c, columns, stream);
  if (c.m <= 32) return run_skinny<F, MODE, 4>(c, columns, stream);
  return run_skinny<F, MODE, 8>(c, columns, stream);
}

bool lie_as_bf16(const Call& c, const Input& in) {
  return in.dtype == BF16 && c.w.k % 8 == 0 && (uintptr_t(in.x) | size_t(in.stride) * 2) % 16 == 0;
}

// Rows of bf16 as they are, or rounded ones.
int take_bf16(Call& c, const Input& in, void* stream) {
  if (!lie_as_bf16(c, in)) return round_to<TO_BF16>(c, in, stream);
  c.x = (const char*)in.x, c.x_bytes = in.stride * 2, c.valid = int(c.w.k) * 2;
  return 0;
}

#if defined(BATON_MUTATION_CUDA_LINEAR_SMALL) || defined(BATON_MUTATION_CUDA_LINEAR_MANY)
int multiply_by_row(Call&, const Input&, void*) { return int(cudaErrorInvalidValue); }
#else
// A product goes through memory of ours, in bf16, where more than a float's bias is to be done to it, or where its place is at an
// odd address. False: the library has no way.
bool by_library(Call& c, const Input& in, void* stream, int& wrong) {
  const bool finishes = c.inner || c.w.row_scale || (c.bias && c.out_dtype == BF16) || !c.aligned;
  const int64_t stride = finishes ? up(int(c.w.n), 8) : c.out_stride;
  const size_t rounded = (size_t(c.m) * (up(int(c.w.k), 16) * 2 + 4) + 255) / 256 * 256;
  const size_t rows = lie_as_bf16(c, in) ? 0 : rounded, results = finishes ? size_t(c.m) * stride * 2 : 0;
  char* memory = (char*)workspace(WORKSPACE_ROWS, rows + results, stream);
  if (rows + results && !memory) return wrong = 2, true;  // cudaErrorMemoryAllocation
  Product p{c.w.data, nullptr, finishes ? nullptr : c.bias, finishes ? memory + rows : c.out, c.w.n, c.w.k, c.m, c.padded, 0, stride,
            finishes || c.out_dtype == BF16 ? LT_BF16 : LT_F32};
  p.x_stride = rows ? up(int(c.w.k), 16) : in.stride;
  if (!library().has(p)) return false;
  if ((wrong = take_bf16(c, in, stream))) return true;
  p.x = c.x;
  if ((wrong = library().multiply(p, stream)) || !finishes) return true;
  const dim3 grid(unsigned(c.m), unsigned(parts(c.inner ? c.inner : c.w.n, FINISHERS * 4)));
  wrong = BATON_LAUNCH_PDL(finish_rows, grid, dim3(FINISHERS), 0, stream, c, (const bf16*)p.out, stride);
  return true;
}

constexpr int LIBRARY_ROWS = 2048;  // at once, so that the memory between a product and its gate has a bound

bool in_pieces(const Call& c, const Input& in, void* stream, int& wrong) {
  for (int64_t first = 0; first < c.m && !wrong; first += LIBRARY_ROWS) {
    Call piece = c;
    piece.m = int(c.m - first < LIBRARY_ROWS ? c.m - first : LIBRARY_ROWS);
    piece.out = static_cast<char*>(c.out) + first * c.out_stride * (c.out_dtype == BF16 ? 2 : 4);
    const char* x = static_cast<const char*>(in.x) + first * in.stride * (in.dtype == BF16 ? 2 : 4);
    if (!by_library(piece, {x, in.dtype, in.stride}, stream, wrong)) return false;
  }
  return true;
}

int multiply_by_row(Call& c, const Input& in, void* stream) {
  int wrong = 0;
  if (c.m > 64 && library().takes(c.w.n, c.w.k, c.inner != 0, c.m) && in_pieces(c, in, stream, wrong)) return wrong;
  if ((wrong = take_bf16(c, in, stream))) return wrong;
  if (c.m <= 8) return run_by_row<1>(c, stream);
  if (c.m <= 16) return run_by_row<2>(c, stream);
  return c.m <= 32 ? run_by_row<4>(c, stream) : run_by_row<8>(c, stream);
}
#endif

template <int F, int R>
int many(Call& c, const Input& in, int count, void* stream) {
  constexpr bool totals = Consumer<F>::TOTALS;
  const Image image = image_of(c, count);
  int wrong = round_to<R>(c, in, stream, image);
  if (wrong) return wrong;
  Parts p{};
  p.stages = image.stages_of_all() / count;
  if (count > 1) p = parts_of(c, count, p.stages, !totals, 1, stream);
  if (count > 1 && !p.at) return 2;  // cudaErrorMemoryAllocation
  const dim3 grid = prefill_grid(c, count);
  wrong = BATON_LAUNCH_PDL((prefill<F>), grid, dim3(PREFILL_THREADS), Rings::bytes(totals), stream, Prefill{c, image, p, F == FORM_W8 ? 0x80808080u : 0});
  return wrong || count == 1 ? wrong : run_add(c, p, stream);
}

template <int F>
int by_mode(const Call& c, void* stream) {
  if (!c.w.group) return run<F, PLAIN>(c, stream);
  if (c.w.group % 32 == 0 && !c.w.mins) return run<F, GROUPS>(c, stream);
  return run<F, ANY>(c, stream);
}

#ifdef BATON_MUTATION_CUDA_LINEAR_SMALL
// A build for planted bugs has int4 in groups of whole blocks alone: it compiles in a fifth of the time.
int multiply(Call& c, const Input& in, bool, void* stream) {
  if (c.w.kind != LINEAR_W4 || !c.w.group || c.w.group % 32 || c.w.mins) return int(cudaErrorInvalidValue);
  const int wrong = round_to<TO_INT8>(c, in, stream);
  return wrong ? wrong : run<FORM_W4, GROUPS>(c, stream);
}

int multiply_rounded(const Call&, void*) { return int(cudaErrorInvalidValue); }
#elif defined(BATON_MUTATION_CUDA_LINEAR_MANY)
// A build for planted bugs has bf16 and many rows alone.
int multiply(Call& c, const Input& in, bool, void* stream) {
  if (c.w.kind != LINEAR_BF16) return int(cudaErrorInvalidValue);
  return many<FORM_BF16, TO_BF16>(c, in, std::max(prefill_parts(c), 1), stream);
}

int multiply_rounded(const Call&, void*) { return int(cudaErrorInvalidValue); }
#elif defined(BATON_MUTATION_CUDA_LINEAR_ROWS)
// A build for planted bugs has weights row by row alone.
int multiply(Call&, const Input&, bool, void*) { return int(cudaErrorInvalidValue); }
int multiply_rounded(const Call&, void*) { return int(cudaErrorInvalidValue); }
#else
int multiply_rounded(const Call& c, void* stream) {
  if (c.w.kind == LINEAR_E4M3) return run<FORM_FP8, PLAIN>(c, stream);
  return c.w.kind == LINEAR_W8 ? by_mode<FORM_W8>(c, stream) : by_mode<FORM_W4>(c, stream);
}

int multiply(Call& c, const Input& in, bool wide_rows, void* stream) {
  int wrong = 0;
  if (const int count = wide_rows ? 0 : prefill_parts(c)) {
    if (c.w.kind == LINEAR_BF16) return many<FORM_BF16, TO_BF16>(c, in, count, stream);
    return c.w.kind == LINEAR_W8 ? many<FORM_W8, TO_INT8>(c, in, count, stream) : many<FORM_FP8, TO_E4M3>(c, in, count, stream);
  }
  if (c.w.kind == LINEAR_BF16) {
    wrong = take_bf16(c, in, stream);
    return wrong ? wrong : run<FORM_BF16, PLAIN>(c, stream);
  }
  if (wide_rows) {
    wrong = round_to<TO_BF16_FOR_INT4>(c, in, stream);
    return wrong ? wrong : by_mode<FORM_W4A16>(c, stream);
  }
  wrong = c.w.kind == LINEAR_E4M3 ? round_to<TO_E4M3>(c, in, stream) : round_to<TO_INT8>(c, in, stream);
  return wrong ? wrong : multiply_rounded(c, stream);
}
#endif

// As `prepare` has it, or of weights row by row.
bool prepare_any(Call& c, const PackedLinear& w, int64_t m, const float* bias, const Output& out, bool gated) {
  PackedLinear plain = w;
  if (w.kind == LINEAR_BF16 && w.group == BY_ROW) plain.group = 0;
  return prepare(c, plain, m, bias, out, gated);
}

int multiply_any(const PackedLinear& w, Call& c, const Input& in, void* stream) {
  return w.group == BY_ROW ? multiply_by_row(c, in, stream) : multiply(c, in, false, stream);
}

}  // namespace
}  // namespace baton

BATON_API int baton_linear(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                           const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  Call c;
  if (!prepare_any(c, *w, m, bias, {out, out_dtype, out_stride}, false)) return int(cudaErrorInvalidValue);
  return multiply_any(*w, c, {x, x_dtype, x_stride}, stream);
}

// int4 weights by rows of bf16 (W4A16).
BATON_API int baton_linear_a16(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                               const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  Call c;
  if (w->kind != LINEAR_W4 || !prepare(c, *w, m, bias, {out, out_dtype, out_stride}, false)) return int(cudaErrorInvalidValue);
  return multiply(c, {x, x_dtype, x_stride}, true, stream);
}

// w is a gate over what it is for, n / 2 rows each (a multiple of 16): out (m, n / 2) = silu(gate) x up.
BATON_API int baton_linear_swiglu(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                                  const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  Call c;
  if (!prepare_any(c, *w, m, bias, {out, out_dtype, out_stride}, true)) return int(cudaErrorInvalidValue);
  return multiply_any(*w, c, {x, x_dtype, x_stride}, stream);
}

namespace {

int rounded(const baton::PackedLinear& w, const void* q, const float* scales, int64_t m, const float* bias,
            const baton::Output& out, bool gated, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  Call c;
  if (w.kind == LINEAR_BF16 || w.k % 16 || uintptr_t(q) % 16) return int(cudaErrorInvalidValue);
  if (!prepare(c, w, m, bias, out, gated)) return int(cudaErrorInvalidValue);
  c.x = (const char*)q, c.x_bytes = c.valid = int(w.k), c.x_scales = scales;
  return multiply_rounded(c, stream);
}

}  // namespace

// q (m, k) int8 (e4m3 for e4m3 weights) and a scale per row, as baton_rms_norm_quantized writes them; k a multiple of 16, q at
// an address that is one.
BATON_API int baton_linear_rounded(const baton::PackedLinear* w, const void* q, const float* scales, int64_t m, const float* bias,
                                   void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  return rounded(*w, q, scales, m, bias, {out, out_dtype, out_stride}, false, stream);
}

// The same with the gate of baton_linear_swiglu.
BATON_API int baton_linear_rounded_swiglu(const baton::PackedLinear* w, const void* q, const float* scales, int64_t m,
                                          const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream) {
  return rounded(*w, q, scales, m, bias, {out, out_dtype, out_stride}, true, stream);
}

// cuBLASLt at `path`, for the current card, and its version.
BATON_API int baton_linear_library(const char* path, int64_t* version) { return baton::library().open(path, version); }

// By what products of each number of rows go, of bf16 weights (n, k) that lie row by row (Library::choose); `count` sizes.
BATON_API int baton_linear_ways(int64_t n, int64_t k, int32_t gated, const int64_t* sizes, const int32_t* ways, int64_t count) {
  baton::library().choose(n, k, gated != 0, {sizes, sizes + count}, {ways, ways + count});
  return 0;
}
