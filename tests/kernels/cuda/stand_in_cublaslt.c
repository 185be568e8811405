// What linear/library.cuh asks of cuBLASLt, answered by plain loops: descriptors, layouts and alignments are held to what was said
// of them. There is one algorithm, which products of $STAND_IN_NO_WAY rows lack.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { F32 = 0, BF16 = 14, COMPUTE_F32 = 68, TRANSPOSED = 1, BIASED = 4, REFUSED = 15, MARK = 0x5eed };

typedef struct { int compute, scale, trans_a, epilogue; const float* bias; } Desc;
typedef struct { int type; uint64_t rows, cols; int64_t ld; } Layout;
typedef struct { uint64_t workspace; uint32_t aligned[4]; } Wishes;
typedef struct { uint64_t data[8]; } Algorithm;
typedef struct { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; } Result;

static int64_t products;
int64_t stand_in_products(void) { return products; }

size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtCreate(void** handle) { return !(*handle = malloc(1)); }
int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
  Desc* made = calloc(1, sizeof(Desc));
  *made = (Desc){compute, scale, 0, 1, NULL}, *desc = made;
  return compute != COMPUTE_F32 || scale != F32;
}
int cublasLtMatmulDescSetAttribute(void* desc, int which, const void* value, size_t size) {
  Desc* of = desc;
  if (which == 3 && size == 4) return memcpy(&of->trans_a, value, 4), 0;
  if (which == 7 && size == 4) return memcpy(&of->epilogue, value, 4), 0;
  if (which == 8 && size == 8) return memcpy(&of->bias, value, 8), 0;
  return 7;
}
int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  Layout* made = calloc(1, sizeof(Layout));
  *made = (Layout){type, rows, cols, ld}, *layout = made;
  return ld < (int64_t)rows ? 7 : 0;
}
int cublasLtMatmulPreferenceCreate(void** wishes) {
  Wishes* made = calloc(1, sizeof(Wishes));
  *made = (Wishes){0, {256, 256, 256, 256}}, *wishes = made;
  return 0;
}
int cublasLtMatmulPreferenceSetAttribute(void* wishes, int which, const void* value, size_t size) {
  Wishes* of = wishes;
  if (which == 1 && size == 8) return memcpy(&of->workspace, value, 8), 0;
  if (which >= 5 && which <= 8 && size == 4) return memcpy(&of->aligned[which - 5], value, 4), 0;
  return 7;
}
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c, void* d, void* wishes, int wanted, Result* found,
                                   int* count) {
  const Layout *w = a, *x = b, *out = d;
  const char* refused = getenv("STAND_IN_NO_WAY");
  if (w->rows != x->rows || w->cols != out->rows || x->cols != out->cols || c != d || wanted < 1) return 7;
  *count = !refused || (uint64_t)atoll(refused) != x->cols;
  memset(found, 0, sizeof *found);
  found->algorithm.data[0] = MARK, found->algorithm.data[1] = ((Wishes*)wishes)->aligned[1], found->workspace = 4096;
  return 0;
}

static float wide(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float f;
  return memcpy(&f, &bits, 4), f;
}
static uint16_t narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return f != f ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

int cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
                   const void* beta, const void* c, void* c_layout, void* d, void* d_layout, const Algorithm* algorithm, void* workspace,
                   size_t bytes, void* stream) {
  const Desc* of = desc;
  const Layout *w = a_layout, *x = b_layout, *out = d_layout;
  const uint64_t aligned = algorithm->data[1];
  if (algorithm->data[0] != MARK || of->trans_a != TRANSPOSED || w->type != BF16 || x->type != BF16 || c != d) return REFUSED;
  if (((uintptr_t)a | (uintptr_t)b | (uintptr_t)d) % aligned || *(const float*)alpha != 1 || *(const float*)beta != 0) return REFUSED;
  if (w->ld * 2 % 16 || x->ld * 2 % aligned || out->ld * (out->type == BF16 ? 2 : 4) % aligned || bytes < 4096) return REFUSED;
  if (of->epilogue == BIASED && (out->type != F32 || !of->bias)) return REFUSED;
  memset(workspace, 0xff, 4096);
  for (uint64_t row = 0; row < x->cols; row++)
    for (uint64_t n = 0; n < w->cols; n++) {
      const uint16_t *left = (const uint16_t*)a + n * w->ld, *right = (const uint16_t*)b + row * x->ld;
      double sum = 0;
      for (uint64_t k = 0; k < w->rows; k++) sum += (double)wide(left[k]) * wide(right[k]);
      const float result = (float)sum + (of->epilogue == BIASED ? of->bias[n] : 0);
      if (out->type == BF16)
        ((uint16_t*)d)[row * out->ld + n] = narrow(result);
      else
        ((float*)d)[row * out->ld + n] = result;
    }
  products++;
  return 0;
}
