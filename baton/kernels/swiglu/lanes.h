// The gated activation by lanes, on a CPU. Knows nothing of rows.
#pragma once
#include "../abi/vector.h"

namespace baton {

// silu(gate) x up, where silu is x / (1 + e^-x), from e^-|x| so that nothing overflows.
BATON_INLINE vf gated_by(vf gate, vf up) {
  const vi negative = gate < vf{};
  const vf small = exponential(select(negative, gate, vf{} - gate));
  return gate * select(negative, small, splat(1.0f)) / (splat(1.0f) + small) * up;
}

}  // namespace baton
