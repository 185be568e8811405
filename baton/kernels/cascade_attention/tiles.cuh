// Shared keys and values on their way from pages to shared memory, 32 keys a tile and two tiles deep, as 16-bit numbers: bf16
// by cp.async, int8 and e4m3 through registers where they become f16, exactly. Knows nothing of scores.
#pragma once
#include "../paged_attention/split.cuh"

namespace baton {
namespace {

using namespace attention;

constexpr int KEYS = 32, TILE_ROWS = 64;  // keys of a tile; rows of queries x group that a block takes

// 16 bytes of 8-bit elements as 16 f16, in their order.
template <int T>
__device__ __forceinline__ void widen(const uint4& from, uint4 (&to)[2]) {
  uint32_t found[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t w = word_of(from, i);
    if constexpr (T == KV_INT8) {
      const uint32_t high = w ^ 0x80808080u;
      found[2 * i] = half2_minus(__byte_perm(high, 0x64646464u, 0x4140), 0x64806480u);  // 1024 + (x + 128) - 1152
      found[2 * i + 1] = half2_minus(__byte_perm(high, 0x64646464u, 0x4342), 0x64806480u);
    } else {
      found[2 * i] = e4m3x2_to_half2(uint16_t(w)), found[2 * i + 1] = e4m3x2_to_half2(uint16_t(w >> 16));
    }
  }
  to[0] = make_uint4(found[0], found[1], found[2], found[3]), to[1] = make_uint4(found[4], found[5], found[6], found[7]);
}

// Where a block of prefix work has what. Rows of q lie where the tiles do, as they are in registers before the first tile comes;
// beyond head_dim 128 registers don't do, and they stay.
template <int D>
struct Tiles {
  static constexpr int STRIDE = D + 8;  // elements from row to row: eight rows of ldmatrix meet 32 different banks
  static constexpr bool IN_REGISTERS = D <= 128;
  static constexpr int TILE = KEYS * STRIDE, Q = 2 * TILE_ROWS * STRIDE;
  static constexpr size_t BYTES = size_t(4 * TILE + (IN_REGISTERS ? (Q > 4 * TILE ? Q - 4 * TILE : 0) : Q)) * 2 + (4 * KEYS + TILE_ROWS) * 4;

  uint16_t *tiles, *q;
  float *scales, *power;

  __device__ explicit Tiles(char* at) {
    tiles = reinterpret_cast<uint16_t*>(at), q = IN_REGISTERS ? tiles : tiles + 4 * TILE;
    scales = reinterpret_cast<float*>(at + BYTES) - (4 * KEYS + TILE_ROWS), power = scales + 4 * KEYS;
  }
  __device__ uint16_t* keys(int stage) const { return tiles + 2 * stage * TILE; }
  __device__ uint16_t* values(int stage) const { return tiles + (2 * stage + 1) * TILE; }
  __device__ float* key_scales(int stage) const { return scales + 2 * stage * KEYS; }
  __device__ float* value_scales(int stage) const { return scales + (2 * stage + 1) * KEYS; }
};

// A tile is asked for by `begin` and there for this thread after `end`; others see it behind a barrier.
template <int T, int D>
struct Loader {
  static constexpr int EACH = (KEYS * (D / chunk_elements<T>()) + THREADS - 1) / THREADS;

  const PagedKv& kv;
  const Tiles<D>& tiles;
  const int32_t* pages;
  int head, end_key;
  int ahead[KEYS / PAGE];  // the next tile's pages
  uint4 held[scaled<T>() ? 2 * EACH : 1];
  float scale;

  __device__ Loader(const PagedKv& kv_, const Tiles<D>& tiles_, const int32_t* pages_, int head_, int key, int end_key_)
      : kv(kv_), tiles(tiles_), pages(pages_), head(head_), end_key(end_key_), scale(0) {
    look_up(key);
  }

  __device__ __forceinline__ void look_up(int key) {
#ifdef BATON_MUTATION_CUDA_CASCADE_PAGE
    for (int i = 0; i < KEYS / PAGE; i++) ahead[i] = key + i * PAGE < end_key ? pages[key / PAGE] : 0;
#else
#pragma unroll
    for (int i = 0; i < KEYS / PAGE; i++) ahead[i] = key + i * PAGE < end_key ? pages[key / PAGE + i] : 0;
#endif
  }

  __device__ __forceinline__ int page_of(int token) const { return token < PAGE ? ahead[0] : ahead[1]; }

  __device__ void begin(int key, int stage) {
    const int chunks = kv.head_dim / chunk_elements<T>();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = i * THREADS + int(threadIdx.x), token = at / chunks, chunk = at % chunks;
      if (token >= KEYS) continue;
      const bool has = key + token < end_key;
      const Plane<T> k(kv, page_of(token), false), v(kv, page_of(token), true);
      if constexpr (T == KV_BF16) {
        const int64_t place = (int64_t(token % PAGE) * kv.kv_heads + head) * kv.head_dim * 2 + chunk * 16;
        const int to = token * Tiles<D>::STRIDE + chunk * 8;
        cp_async_16(tiles.keys(stage) + to, has ? k.at + place : kv.pages, has);
        cp_async_16(tiles.values(stage) + to, has ? v.at + place : kv.pages, has);
      } else {
        held[2 * i] = has ? k.chunk(token % PAGE, head, chunk) : make_uint4(0, 0, 0, 0);
        held[2 * i + 1] = has ? v.chunk(token % PAGE, head, chunk) : make_uint4(0, 0, 0, 0);
      }
    }
    if constexpr (T == KV_BF16)
      cp_async_commit();
    else if (threadIdx.x < 2 * KEYS) {
      const int token = int(threadIdx.x) % KEYS;
      const Plane<T> plane(kv, page_of(token), threadIdx.x >= KEYS);
#ifdef BATON_MUTATION_CUDA_CASCADE_SCALE
      scale = key + token < end_key ? plane.scale((token + 1) % PAGE, head) : 0;
#else
      scale = key + token < end_key ? plane.scale(token % PAGE, head) : 0;
#endif
    }
    look_up(key + KEYS);
  }

  __device__ void end(int stage) {
    if constexpr (T == KV_BF16) {
      cp_async_wait<0>();
    } else {
      const int chunks = kv.head_dim / chunk_elements<T>();
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int at = i * THREADS + int(threadIdx.x), token = at / chunks, to = token * Tiles<D>::STRIDE + at % chunks * 16;
        if (token >= KEYS) continue;
        uint4 wide[2];
        widen<T>(held[2 * i], wide);
        reinterpret_cast<uint4*>(tiles.keys(stage) + to)[0] = wide[0], reinterpret_cast<uint4*>(tiles.keys(stage) + to)[1] = wide[1];
        widen<T>(held[2 * i + 1], wide);
        reinterpret_cast<uint4*>(tiles.values(stage) + to)[0] = wide[0], reinterpret_cast<uint4*>(tiles.values(stage) + to)[1] = wide[1];
      }
      if (threadIdx.x < 2 * KEYS) tiles.key_scales(stage)[threadIdx.x] = scale;
    }
  }
};

}  // namespace
}  // namespace baton
