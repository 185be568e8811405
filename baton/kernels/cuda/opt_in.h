// Shared memory beyond 48 KiB of a block, static and dynamic together, is refused unless a launch opts in. Knows nothing of kernels.
#pragma once
#include <cstddef>

namespace baton {

constexpr size_t WITHOUT_OPT_IN = 48 * 1024;
// Launches with more dynamic memory than this opt in; static memory beside less of it fits into what is left.
#ifdef BATON_MUTATION_CUDA_OPT_IN
constexpr size_t OPT_IN_FROM = WITHOUT_OPT_IN;
#else
constexpr size_t OPT_IN_FROM = 16 * 1024;
#endif

}  // namespace baton
