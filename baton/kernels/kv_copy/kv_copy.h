// Scattered blocks copied and checksummed in one pass, and the checksum alone. Knows nothing of pages, frames or leases.
//
// The checksum is XXH3-64 with seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), the value that every frame carries.
// Each byte is loaded once: what was stored is what was hashed, even while somebody writes to the source. Stores go
// past the cache; they are visible to every thread when the call returns.
#pragma once
#include "../abi/common.h"

namespace baton {
constexpr int64_t KV_COPY_LEAST = 241;  // shorter inputs have another algorithm, which isn't here
}

// sums[i] = XXH3-64 of the `bytes` >= KV_COPY_LEAST bytes at src[i], which are copied to dst[i] unless dst is null.
// Without `sums` it is the copy alone (what benchmarks compare with), of at least 64 bytes each.
BATON_API void baton_kv_copy(const uint64_t* dst, const uint64_t* src, int64_t count, int64_t bytes, uint64_t* sums);
