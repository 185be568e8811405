// What a session keeps to run small steps by the megakernel (../megakernel). Knows nothing of graphs.
#pragma once
#include <vector>

#include "../cuda/runtime.cuh"
#include "../megakernel/branches.cuh"

namespace baton {

class AtOnce {
 public:
  // Layers' descriptions in device memory, once; cudaErrorInvalidValue where the program has no form (engine/cuda_load.py says so).
  int describe(const Model& model, int32_t kv_type, void* stream) {
    if (layers_.at) return 0;
    int32_t op = 0;
    const char* why = nullptr;
    baton_megakernel_fits(&model, kv_type, &op, &why);
    if (op >= 0) return int(cudaErrorInvalidValue);
    int64_t bytes = 0;
    baton_megakernel_layers(&model, nullptr, &bytes);
    std::vector<char> host(static_cast<size_t>(bytes));
    baton_megakernel_layers(&model, host.data(), &bytes);
    bool moved = false;
    if (const int wrong = layers_.reach(host.size(), moved)) return wrong;
    if (const int wrong = copy(layers_.at, host.data(), host.size(), stream)) return wrong;
    return stream_wait(stream);
  }

  // All ops but the head.
  int run(const Model& model, const Step& step, const Branches& branches, void* stream) const {
    return baton_megakernel_branches(&model, &step, &branches, layers_.at, 0, stream);
  }

 private:
  Room layers_;
};

}  // namespace baton
