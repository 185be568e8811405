// AMX's intrinsics in plain C++, for machines without tiles: the same names, the same numbers, as Intel's manual (Software Developer's
// Manual, volume 2: LDTILECFG, TDPBSSD, TDPBF16PS) writes them out. Knows nothing of ops.
//
// What the hardware would fault on, or what no op of ours does, is counted as a fault and left undone: the tests ask for it
// (amx.cpp).
#pragma once
#include <atomic>

#include "vector.h"

namespace baton {
namespace emulated {

struct Tiles {
  alignas(64) uint8_t bytes[8][16][64];
  int rows[8], width[8];
  bool configured = false;
};
inline thread_local Tiles tiles;
inline std::atomic<int64_t> products{0}, faults{0}, users{0};  // so far, so far, threads whose tiles are configured

inline bool holds(bool fine) {
  if (!fine) faults++;
  return fine;
}

inline bool is_tile(int t) { return holds(tiles.configured && tiles.rows[t] && tiles.width[t]); }

// A use within a use counts as a fault, too: the inner one's end would take the outer one's tiles.
inline void load_config(const void* from) {
  const uint8_t* config = (const uint8_t*)from;
  holds(!tiles.configured);
  if (!holds(config[0] == 1)) return;
  for (int t = 0; t < 8; ++t) {
    std::memcpy(&tiles.width[t], config + 16 + 2 * t, 2), tiles.width[t] &= 0xffff, tiles.rows[t] = config[48 + t];
    if (!holds(tiles.width[t] <= 64 && tiles.rows[t] <= 16)) return;
  }
  std::memset(tiles.bytes, 0, sizeof tiles.bytes);
  if (!tiles.configured) users++;
  tiles.configured = true;
}

inline void release() {
  if (tiles.configured) users--;
  tiles.configured = false;
}

inline void zero(int t) {
  if (is_tile(t)) std::memset(tiles.bytes[t], 0, sizeof tiles.bytes[t]);
}

inline void load(int t, const void* base, int64_t stride) {
  if (!is_tile(t)) return;
  std::memset(tiles.bytes[t], 0, sizeof tiles.bytes[t]);
  for (int r = 0; r < tiles.rows[t]; ++r) std::memcpy(tiles.bytes[t][r], (const char*)base + r * stride, size_t(tiles.width[t]));
}

inline void store(int t, void* base, int64_t stride) {
  if (!is_tile(t)) return;
  for (int r = 0; r < tiles.rows[t]; ++r) std::memcpy((char*)base + r * stride, tiles.bytes[t][r], size_t(tiles.width[t]));
}

// Whether sums may take first x second.
inline bool match(int sums, int first, int second) {
  products++;
  return is_tile(sums) && is_tile(first) && is_tile(second) &&
         holds(sums != first && sums != second && first != second && tiles.rows[sums] == tiles.rows[first] &&
               tiles.width[sums] == tiles.width[second] && tiles.width[first] == 4 * tiles.rows[second]);
}

// Byte i of each word.
template <bool Signed>
BATON_INLINE vi byte_of(vi words, int i) {
  return Signed ? (words << (24 - 8 * i)) >> 24 : (words >> (8 * i)) & splat_word(255);
}

template <bool FirstSigned, bool SecondSigned>
inline void dot_bytes(int sums, int first, int second) {
  if (!match(sums, first, second)) return;
  for (int m = 0; m < tiles.rows[sums]; ++m) {
    const uint8_t* a = tiles.bytes[first][m];
    vi total = load_words(tiles.bytes[sums][m]);
    for (int k = 0; k < tiles.rows[second]; ++k) {
      const vi words = load_words(tiles.bytes[second][k]);
      for (int i = 0; i < 4; ++i)
        total = total + splat_word(FirstSigned ? int8_t(a[4 * k + i]) : a[4 * k + i]) * byte_of<SecondSigned>(words, i);
    }
    std::memcpy(tiles.bytes[sums][m], &total, 64);
  }
}

// Two chains from zero, of the pairs' first numbers and of their second ones, whose sum is added. Subnormal numbers count as
// zeros.
inline void dot_pairs(int sums, int first, int second) {
  if (!match(sums, first, second)) return;
#if BATON_AVX2
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80 | 0x8040);
#endif
  for (int m = 0; m < tiles.rows[sums]; ++m) {
    const uint8_t* a = tiles.bytes[first][m];
    vf chains[2] = {vf{}, vf{}};
    for (int k = 0; k < tiles.rows[second]; ++k) {
      const vi pair = load_words(tiles.bytes[second][k]);
      bf16 x[2];
      std::memcpy(x, a + 4 * k, 4);
      chains[0] = fma(splat(from_bf16(x[0])), from_bits(pair << 16), chains[0]);
      chains[1] = fma(splat(from_bf16(x[1])), from_bits(pair & splat_word(int32_t(0xffff0000))), chains[1]);
    }
    baton::store(tiles.bytes[sums][m], baton::load(tiles.bytes[sums][m]) + (chains[0] + chains[1]));
  }
#if BATON_AVX2
  _mm_setcsr(before);
#endif
}

}  // namespace emulated
}  // namespace baton

// Compilers have some of them as macros.
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) baton::emulated::load_config(from)
#define _tile_release() baton::emulated::release()
#define _tile_zero(tile) baton::emulated::zero(tile)
#define _tile_loadd(tile, base, stride) baton::emulated::load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) baton::emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) baton::emulated::store(tile, base, stride)
#define _tile_dpbssd(sums, first, second) baton::emulated::dot_bytes<true, true>(sums, first, second)
#define _tile_dpbsud(sums, first, second) baton::emulated::dot_bytes<true, false>(sums, first, second)
#define _tile_dpbusd(sums, first, second) baton::emulated::dot_bytes<false, true>(sums, first, second)
#define _tile_dpbuud(sums, first, second) baton::emulated::dot_bytes<false, false>(sums, first, second)
#define _tile_dpbf16ps(sums, first, second) baton::emulated::dot_pairs(sums, first, second)
