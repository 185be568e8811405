// What is known of this library's tiles: its emulator's counts, and whether threads gave theirs back.
#include "amx.h"

#if BATON_AMX

// Threads of this process with configured tiles between calls; of real ones the calling thread alone.
BATON_API int32_t baton_amx_users() {
#if defined(BATON_EMULATED_TILES)
  return int32_t(baton::emulated::users.load());
#else
  alignas(64) uint8_t config[64] = {};
  asm volatile("sttilecfg %0" : "=m"(config));
  return config[0] != 0;
#endif
}

#if defined(BATON_EMULATED_TILES)
BATON_API int64_t baton_amx_products() { return baton::emulated::products; }
BATON_API int64_t baton_amx_faults() { return baton::emulated::faults; }
#endif
#endif
