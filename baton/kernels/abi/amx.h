// AMX tiles: eight registers of up to 16 rows by 64 bytes. Knows nothing of ops.
//
// Every op's tiles have one arrangement, so that code may name them:
//   0 1 2 3   sums, [row][16] int32 or float
//   4 5       rows of a first matrix, [row][64 bytes]
//   6 7       a second matrix by words of 4 bytes, [word of the first one's rows][16 columns]
#pragma once
#include "common.h"

// AMX comes beside the vectors' instructions; BATON_EMULATED_TILES (a flag of build.py) has its tiles without the CPU's.
#if defined(BATON_EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__))
#define BATON_AMX 1
#else
#define BATON_AMX 0
#endif

#if BATON_AMX
#if defined(BATON_EMULATED_TILES)
#include "amx_emulator.h"
#endif

namespace baton {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

// Compilers know not what tiles read and write (g++ 12's intrinsics have no memory clobber): memory is as the source says where
// this stands.
BATON_INLINE void tile_fence() { asm volatile("" ::: "memory"); }

// The calling thread's use of tiles, with `rows` rows of the first matrix: configured while this lives, released behind it,
// since a thread that keeps tiles pays for them in every switch. Uses don't nest.
class TileUse {
 public:
  explicit TileUse(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.bytes[tile] = TILE_BYTES, shapes.rows[tile] = uint8_t(tile < 6 ? rows : TILE_ROWS);
    asm volatile("" ::"r"(&shapes) : "memory");  // all of it is read, which the intrinsic doesn't say
    _tile_loadconfig(&shapes);
    tile_fence();
  }
  ~TileUse() {
    tile_fence();
#ifndef BATON_MUTATION_AMX_RELEASE
    _tile_release();
#endif
  }
  TileUse(const TileUse&) = delete;  // a use is its thread's
  TileUse& operator=(const TileUse&) = delete;
};

// sums += first x second by words: signed bytes by unsigned ones, signed by signed, unsigned by signed, or pairs of bf16.
enum TileProduct { TILE_S8_U8, TILE_S8_S8, TILE_U8_S8, TILE_BF16 };
#define BATON_TILE_PRODUCT(P, sums, first, second)                 \
  do {                                                             \
    if constexpr (P == TILE_S8_U8) _tile_dpbsud(sums, first, second);  \
    if constexpr (P == TILE_S8_S8) _tile_dpbssd(sums, first, second);  \
    if constexpr (P == TILE_U8_S8) _tile_dpbusd(sums, first, second);  \
    if constexpr (P == TILE_BF16) _tile_dpbf16ps(sums, first, second); \
  } while (0)

}  // namespace baton
#endif
