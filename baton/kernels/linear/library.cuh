// Products of bf16 by cuBLASLt, loaded by path at run time: torch's wheels bring it, and its interface is plain C. Knows nothing of
// panels, nor when it is the faster one: `choose` is told, as a trial on the card found it (engine/backends/cuda/products.py).
//
// All memory that it takes is there from `open` on, so that a stream's capture holds its launches. `open` and `multiply` return 0 or
// a cudaError_t.
#pragma once
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "prepare.cuh"

namespace baton {
namespace {

// Of cublasLt.h and cublas_api.h, CUDA 12 and 13.
constexpr int LT_F32 = 0, LT_BF16 = 14, LT_COMPUTE_F32 = 68, LT_TRANSPOSED = 1, LT_WITH_BIAS = 4;
constexpr int LT_DESC_TRANS_A = 3, LT_DESC_EPILOGUE = 7, LT_DESC_BIAS = 8;
constexpr int LT_PREFER_WORKSPACE = 1, LT_PREFER_ALIGNED_A = 5, LT_PREFER_ALIGNED_D = 8;  // 6 and 7: of B and C

constexpr int NO_LIBRARY = 302, LIBRARY_FAILED = 999;  // cudaErrorSharedObjectSymbolNotFound, cudaErrorUnknown
constexpr size_t LIBRARY_WORKSPACE = size_t(32) << 20;  // what cuBLAS takes on Hopper
constexpr uint32_t LIBRARY_ALIGNED = 16;               // bytes: rows may begin anywhere that is a multiple

struct LtAlgorithm {
  uint64_t data[8];
};
struct LtResult {
  LtAlgorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

// out (m, n) = x (m, k) · wᵀ + bias, rows of bf16, each by its stride in elements. cuBLASLt sees columns where rows lie.
struct Product {
  const void *w, *x;
  const float* bias;  // or null; out is float then
  void* out;
  int64_t n, k, m, w_stride, x_stride, out_stride;
  int out_type;  // LT_F32 or LT_BF16

  auto key() const { return std::tuple(n, k, m, w_stride, x_stride, out_stride, out_type, bias != nullptr); }
};

class Library {
 public:
  int open(const char* path, int64_t* version) {
    if (!handle_) {
      void* const file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
      if (!file) return NO_LIBRARY;
      const bool whole = find(file, "Create", create_) && find(file, "GetVersion", version_) && find(file, "MatmulDescCreate", desc_) &&
                         find(file, "MatmulDescSetAttribute", set_desc_) && find(file, "MatrixLayoutCreate", layout_) &&
                         find(file, "MatmulPreferenceCreate", preference_) &&
                         find(file, "MatmulPreferenceSetAttribute", set_preference_) &&
                         find(file, "MatmulAlgoGetHeuristic", heuristic_) && find(file, "Matmul", matmul_);
      if (!whole) return NO_LIBRARY;
      if (const int wrong = take_workspace()) return wrong;
      if (create_(&handle_)) return handle_ = nullptr, LIBRARY_FAILED;
    }
    return *version = int64_t(version_()), 0;
  }

  // From here on, products of m rows by an (n, k) matrix (`gated`: of a gate over what it is for) go as `ways` has it for the least
  // of `sizes` from m on, beyond all of them as for the last: 1 by this library, 0 by our own kernel. Sizes grow.
  void choose(int64_t n, int64_t k, bool gated, std::vector<int64_t> sizes, std::vector<int32_t> ways) {
    chosen_[{n, k, gated}] = {std::move(sizes), std::move(ways)};
  }

  bool takes(int64_t n, int64_t k, bool gated, int64_t m) const {
    const auto found = chosen_.find({n, k, gated});
    if (!handle_ || found == chosen_.end() || found->second.first.empty()) return false;
    const auto& [sizes, ways] = found->second;
    size_t i = 0;
    while (i + 1 < sizes.size() && sizes[i] < m) i++;
    return ways[i] != 0;
  }

  // Whether it has a way; asked for a size's first product, and remembered.
  bool has(const Product& p) { return plan(p).found; }

  int multiply(const Product& p, void* stream) {
    const auto run = [this, p, stream] { return launch(p, stream); };
#ifdef BATON_SIMT
    if (simt::recording) return simt::recording->push_back(run), 0;
    int status = 0;
    if (simt::later(stream, run, status)) return status;
#endif
    return run();
  }

 private:
  struct Plan {
    bool found = false;
    void *desc = nullptr, *w = nullptr, *x = nullptr, *out = nullptr;
    LtAlgorithm algorithm{};
  };

  template <class F>
  static bool find(void* file, const char* name, F& function) {
    return (function = reinterpret_cast<F>(dlsym(file, (std::string("cublasLt") + name).c_str()))) != nullptr;
  }

  int take_workspace() {
#ifdef BATON_SIMT
    return (workspace_ = std::calloc(LIBRARY_WORKSPACE, 1)) ? 0 : 2;
#else
    return workspace_ ? 0 : int(cudaMalloc(&workspace_, LIBRARY_WORKSPACE));
#endif
  }

  const Plan& plan(const Product& p) {
    const auto [at, added] = plans_.try_emplace(p.key());
    if (added) at->second.found = make(at->second, p);
    return at->second;
  }

  bool make(Plan& plan, const Product& p) {
    void* wishes = nullptr;
    const int transposed = LT_TRANSPOSED, epilogue = LT_WITH_BIAS;
    bool fine = !desc_(&plan.desc, LT_COMPUTE_F32, LT_F32) && !set_desc_(plan.desc, LT_DESC_TRANS_A, &transposed, sizeof transposed) &&
                !layout_(&plan.w, LT_BF16, uint64_t(p.k), uint64_t(p.n), p.w_stride) &&
                !layout_(&plan.x, LT_BF16, uint64_t(p.k), uint64_t(p.m), p.x_stride) &&
                !layout_(&plan.out, p.out_type, uint64_t(p.n), uint64_t(p.m), p.out_stride) && !preference_(&wishes) &&
                !set_preference_(wishes, LT_PREFER_WORKSPACE, &LIBRARY_WORKSPACE, sizeof LIBRARY_WORKSPACE);
    for (int of = LT_PREFER_ALIGNED_A; fine && of <= LT_PREFER_ALIGNED_D; of++)
      fine = !set_preference_(wishes, of, &LIBRARY_ALIGNED, sizeof LIBRARY_ALIGNED);
    if (fine && p.bias)
      fine = !set_desc_(plan.desc, LT_DESC_EPILOGUE, &epilogue, sizeof epilogue) &&
             !set_desc_(plan.desc, LT_DESC_BIAS, &p.bias, sizeof p.bias);
    LtResult best{};
    int count = 0;
    fine = fine && !heuristic_(handle_, plan.desc, plan.w, plan.x, plan.out, plan.out, wishes, 1, &best, &count);
    plan.algorithm = best.algorithm;
    return fine && count > 0 && !best.state && best.workspace <= LIBRARY_WORKSPACE;
  }

  int launch(const Product& p, void* stream) {
    const Plan& of = plan(p);
    if (!of.found || (p.bias && set_desc_(of.desc, LT_DESC_BIAS, &p.bias, sizeof p.bias))) return LIBRARY_FAILED;
    const float one = 1, zero = 0;
#ifdef BATON_SIMT
    const simt::Touchable now;
#endif
    const int wrong = matmul_(handle_, of.desc, &one, p.w, of.w, p.x, of.x, &zero, p.out, of.out, p.out, of.out, &of.algorithm, workspace_,
                              LIBRARY_WORKSPACE, stream);
    return wrong ? LIBRARY_FAILED : 0;
  }

  void *handle_ = nullptr, *workspace_ = nullptr;
  std::map<decltype(Product{}.key()), Plan> plans_;
  std::map<std::tuple<int64_t, int64_t, bool>, std::pair<std::vector<int64_t>, std::vector<int32_t>>> chosen_;

  int (*create_)(void**) = nullptr;
  size_t (*version_)() = nullptr;
  int (*desc_)(void**, int, int) = nullptr;
  int (*set_desc_)(void*, int, const void*, size_t) = nullptr;
  int (*layout_)(void**, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*preference_)(void**) = nullptr;
  int (*set_preference_)(void*, int, const void*, size_t) = nullptr;
  int (*heuristic_)(void*, void*, void*, void*, void*, void*, void*, int, LtResult*, int*) = nullptr;
  int (*matmul_)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*,
                 const LtAlgorithm*, void*, size_t, void*) = nullptr;
};

inline Library& library() {
  static Library only;
  return only;
}

}  // namespace
}  // namespace baton
