// An all-gather among ranks on cards, by peer stores: each rank pushes its own part of rows to all others' rooms (exchange.h), raises
// its flags there, waits for theirs, and copies what came. Nothing is summed. Knows nothing of models or of who opened which room.
//
// A part of the rows is a block's: its flag stands for what that block pushed, and its twin on every other card takes the same quads.
// Blocks take parts in the order in which they come. So the first part that isn't done has a block on every card, however few run at
// once, and nobody waits for a block that has no room. Grids depend on the rows alone, the same on every rank.
//
// A launch reads half `epoch` % 2 of the own room. Whoever writes into that half again has seen all flags of the epoch between, which
// a rank raises behind its reading.
//
// No wait is without an end: the host's word for a lost rank, or the bound, ends it, and every later one at once. Results are
// worthless then; `lost` of the own head says so.
#include "../cuda/device.cuh"
#include "exchange.h"
#include "system.cuh"

#ifdef BATON_SIMT
#include "../cuda/simt/rooms.h"
#endif

namespace baton {
namespace {

constexpr int THREADS = 256, QUAD = 4;
constexpr unsigned LOOK_EVERY = 256;  // polls between two looks at the host's word, which lies behind PCIe

// `own` columns, or tokens, from `first` on are this rank's.
struct Call {
  Exchange x;
  const float* in;
  const int32_t* tokens;  // of by_rows alone
  float* out;
  int64_t rows, width, row_quads, first, own;
};

__device__ __forceinline__ RoomHead& head_of(char* room) { return *reinterpret_cast<RoomHead*>(room); }
__device__ __forceinline__ float* half_of(const Call& c, int rank, uint64_t epoch) {
#if defined(BATON_MUTATION_CUDA_MEET_HALF)
  epoch = 0;
#endif
  return reinterpret_cast<float*>(c.x.rooms[rank] + sizeof(RoomHead)) + (epoch & 1) * c.x.half_floats;
}

// Up to four columns of a row: those from `begin` to `end` are the rank's own, of `count` that are there.
template <bool BY_ROWS>
struct Quad {
  int64_t row, column;
  int count, begin, end;
  const float* from;  // where the rank has column 0

  __device__ __forceinline__ Quad(const Call& c, int64_t number) : row(number / c.row_quads), column(number % c.row_quads * QUAD) {
    count = int(min(int64_t(QUAD), c.width - column));
    if constexpr (BY_ROWS) {
      const int64_t token = c.tokens[row] - c.first;
      begin = 0, end = token >= 0 && token < c.own ? count : 0;
      from = c.in + row * c.width;
    } else {
      begin = int(max(int64_t(0), min(int64_t(count), c.first - column)));
      end = int(max(int64_t(begin), min(int64_t(count), c.first + c.own - column)));
#if defined(BATON_MUTATION_CUDA_MEET_OWN)
      if (end - begin < QUAD) end = begin;
#endif
      from = c.in + row * c.own - c.first;
    }
  }
  __device__ __forceinline__ bool whole() const { return begin == 0 && end == QUAD; }
  __device__ __forceinline__ bool others() const { return begin == end && count == QUAD; }
};

__device__ __forceinline__ bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Writes the rank's own numbers of a quad to the others' rooms, and to its own result.
template <bool BY_ROWS>
__device__ __forceinline__ void push(const Call& c, const Quad<BY_ROWS>& q, int64_t number, uint64_t epoch) {
  const float* from = q.from + q.column;
  float* result = c.out + q.row * c.width + q.column;
  const int64_t place = number * QUAD;
  if (q.whole() && aligned(from)) {
    const float4 v = load4(from);
    for (int peer = 0; peer < c.x.count; peer++)
      if (peer != c.x.rank) store4(half_of(c, peer, epoch) + place, v);
    if (aligned(result)) return store4(result, v);
  } else {
    for (int peer = 0; peer < c.x.count; peer++)
      for (int i = q.begin; i < q.end; i++)
        if (peer != c.x.rank) half_of(c, peer, epoch)[place + i] = from[i];
  }
  for (int i = q.begin; i < q.end; i++) result[i] = from[i];
}

// The others' numbers of a quad from the own room to the result.
template <bool BY_ROWS>
__device__ __forceinline__ void take(const Call& c, const Quad<BY_ROWS>& q, int64_t number, uint64_t epoch) {
  const float* from = half_of(c, c.x.rank, epoch) + number * QUAD;
  float* result = c.out + q.row * c.width + q.column;
  if (q.others() && aligned(result)) {
    *reinterpret_cast<uint4*>(result) = load_written(from);
    return;
  }
  for (int i = 0; i < q.count; i++)
    if (i < q.begin || i >= q.end) result[i] = __ldcg(from + i);
}

// Writes who is lost into the own head; the first one stays.
__device__ __forceinline__ void lose(RoomHead& own, uint32_t who) { atomicCAS(&own.lost, 0u, who); }

// Returns when `peer` has pushed what it has of the part for the epoch, or somebody is lost.
__device__ void await(const Call& c, RoomHead& own, int peer, unsigned part, uint64_t epoch) {
#if defined(BATON_MUTATION_CUDA_MEET_WAIT)
  epoch--;
#endif
  const uint64_t* flag = &own.flags[peer][part];
  const uint64_t began = card_ns();
  for (unsigned poll = 1; load_acquire_system(flag) < epoch; poll++) {
    rest_between_polls(poll);
    if (poll % LOOK_EVERY) continue;
    if (*static_cast<volatile uint32_t*>(&own.lost)) return;
    if (const uint32_t said = c.x.lost ? *c.x.lost : 0) return lose(own, said);
    if (c.x.bound_ns && card_ns() - began > uint64_t(c.x.bound_ns)) return lose(own, uint32_t(peer + 1) | CARD_STUCK);
  }
}

// The last block to come counts the meeting.
__device__ __forceinline__ void leave(RoomHead& own, uint64_t epoch) {
  __threadfence();
  if (atomicAdd(&own.done, 1u) != gridDim.x - 1) return;
  __threadfence();
#if !defined(BATON_MUTATION_CUDA_MEET_DONE)
  own.begun = own.done = 0;
#endif
  own.epoch = epoch;
}

template <bool BY_ROWS>
__global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ Call c) {
  BATON_STATIC_SHARED(uint64_t, began, 3);
  grid_wait();
  grid_launch_next();
  RoomHead& own = head_of(c.x.rooms[c.x.rank]);
  if (threadIdx.x == 0) {
    began[0] = *static_cast<volatile uint64_t*>(&own.epoch) + 1;
    began[1] = *static_cast<volatile uint32_t*>(&own.lost);
#if defined(BATON_MUTATION_CUDA_MEET_ORDER)
    began[2] = blockIdx.x;
#else
    began[2] = atomicAdd(&own.begun, 1u);
#endif
  }
  __syncthreads();
  const uint64_t epoch = began[0];
  const unsigned part = unsigned(began[2]);
  const int64_t quads = c.rows * c.row_quads, stride = int64_t(gridDim.x) * THREADS;
  const int64_t first = int64_t(part) * THREADS + threadIdx.x;
  if (!began[1]) {  // the memory of who is gone may be, too
    for (int64_t i = first; i < quads; i += stride)
      if (const Quad<BY_ROWS> q(c, i); q.begin < q.end) push(c, q, i, epoch);
    __syncthreads();
    if (const int peer = int(threadIdx.x); peer < c.x.count && peer != c.x.rank) {
      __threadfence_system();
      store_release_system(&head_of(c.x.rooms[peer]).flags[c.x.rank][part], epoch);
      await(c, own, peer, part, epoch);
    }
    __syncthreads();
    for (int64_t i = first; i < quads; i += stride)
      if (const Quad<BY_ROWS> q(c, i); q.end - q.begin < q.count) take(c, q, i, epoch);
  }
  __syncthreads();
  if (threadIdx.x == 0) leave(own, epoch);
}

// As many rows at a time as a half holds.
template <bool BY_ROWS>
int in_rounds(Call c, int64_t in_stride, void* stream) {
  const int64_t all = c.rows, most = c.x.half_floats / (c.row_quads * QUAD);
  if (!most) return int(cudaErrorInvalidValue);
  for (int64_t at = 0; at < all; at += most) {
    c.rows = all - at < most ? all - at : most;
    const int64_t wanted = (c.rows * c.row_quads + THREADS - 1) / THREADS;
    const dim3 grid = dim3(unsigned(wanted < MOST_MEETING_BLOCKS ? wanted : MOST_MEETING_BLOCKS));
    if (const int wrong = BATON_LAUNCH_PDL((gather<BY_ROWS>), grid, dim3(THREADS), 0, stream, c)) return wrong;
    c.in += c.rows * in_stride, c.out += c.rows * c.width;
    if constexpr (BY_ROWS) c.tokens += c.rows;
  }
  return 0;
}

}  // namespace
}  // namespace baton

// in (rows, own): columns first … first + own - 1 of this rank. out (rows, width): of all ranks, whose parts lie side by side. Every
// rank calls it in the same order with the same rows and width. `x` is the host's struct.
BATON_API int baton_gather_columns(const baton::Exchange* x, const float* in, int64_t own, int64_t first, int64_t rows, int64_t width,
                                   float* out, void* stream) {
  using namespace baton;
  if (!rows || !width) return 0;
  return in_rounds<false>({*x, in, nullptr, out, rows, width, (width + QUAD - 1) / QUAD, first, own}, own, stream);
}

// in (rows, width), of which this rank has the rows whose tokens are first … first + own - 1. out (rows, width): of all ranks.
BATON_API int baton_gather_rows(const baton::Exchange* x, const float* in, const int32_t* tokens, int64_t own, int64_t first, int64_t rows,
                                int64_t width, float* out, void* stream) {
  using namespace baton;
  if (!rows || !width) return 0;
  return in_rounds<true>({*x, in, tokens, out, rows, width, (width + QUAD - 1) / QUAD, first, own}, width, stream);
}

// The card of the calling thread from here on, and how many there are; on the shim all ranks have the same one.
BATON_API int baton_card_use(int32_t index) {
#ifdef BATON_SIMT
  return (void)index, 0;
#else
  return int(cudaSetDevice(index));
#endif
}
BATON_API int baton_card_count(int32_t* count) {
#ifdef BATON_SIMT
  return *count = baton::MOST_CARDS, 0;
#else
  int found = 0;
  const cudaError_t wrong = cudaGetDeviceCount(&found);
  return *count = found, int(wrong);
#endif
}
// Whether launches on the card of the calling thread may write into the memory of card `other`.
BATON_API int baton_card_reaches(int32_t other, int32_t* yes) {
#ifdef BATON_SIMT
  return *yes = 1, (void)other, 0;
#else
  int own = 0, found = 1;
  cudaError_t wrong = cudaGetDevice(&own);
  if (wrong == cudaSuccess && own != other) wrong = cudaDeviceCanAccessPeer(&found, own, other);
  return *yes = found, int(wrong);
#endif
}

// A room of zeros whose halves hold so many floats each, and the 64 bytes by which another process opens it.
BATON_API int baton_room_make(int64_t half_floats, char** room, char* handle) {
  const size_t bytes = size_t(baton::room_bytes(half_floats));
#ifdef BATON_SIMT
  return baton::simt::room_make(bytes, room, handle);
#else
  void* found = nullptr;
  cudaError_t wrong = cudaMalloc(&found, bytes);
  if (wrong == cudaSuccess) wrong = cudaMemset(found, 0, bytes);
  if (wrong == cudaSuccess) wrong = cudaDeviceSynchronize();
  if (wrong == cudaSuccess) wrong = cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t*>(handle), found);
  return *room = static_cast<char*>(found), int(wrong);
#endif
}
BATON_API int baton_room_open(const char* handle, int64_t half_floats, char** room) {
#ifdef BATON_SIMT
  return baton::simt::room_open(handle, size_t(baton::room_bytes(half_floats)), room);
#else
  (void)half_floats;
  cudaIpcMemHandle_t theirs;
  std::memcpy(&theirs, handle, sizeof theirs);
  return int(cudaIpcOpenMemHandle(reinterpret_cast<void**>(room), theirs, cudaIpcMemLazyEnablePeerAccess));
#endif
}
// `ours`: whether this process made it. Other processes must have closed it then.
BATON_API int baton_room_close(char* room, int64_t half_floats, int32_t ours) {
#ifdef BATON_SIMT
  return (void)ours, baton::simt::room_close(room, size_t(baton::room_bytes(half_floats)));
#else
  (void)half_floats;
  return int(ours ? cudaFree(room) : cudaIpcCloseMemHandle(room));
#endif
}
// Who is lost, by the meetings so far: a rank's number + 1, or that and CARD_STUCK; 0: nobody. `room` is the own one.
BATON_API int baton_room_lost(const char* room, uint32_t* who) {
  const void* from = &reinterpret_cast<const baton::RoomHead*>(room)->lost;
#ifdef BATON_SIMT
  return std::memcpy(who, from, 4), 0;
#else
  return int(cudaMemcpy(who, from, 4, cudaMemcpyDeviceToHost));
#endif
}
