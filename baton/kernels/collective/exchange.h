// What ranks on cards write to one another: a room of device memory on each card, seen by all ranks' launches. Knows nothing of
// models, nor of who opened which room.
//
//   head   of the owner: how many meetings there were, who is lost; a flag for each rank and part, raised by that rank
//   half 0, half 1   what others pushed here, by turns: nobody writes where somebody may still read
#pragma once
#include <cstdint>

namespace baton {

constexpr int32_t MOST_CARDS = 64;        // collective.h: MOST_RANKS
constexpr int32_t MOST_MEETING_BLOCKS = 32;
constexpr uint32_t CARD_STUCK = 1 << 16;  // collective.h: RANK_STUCK

// Zeros at first. Epochs count meetings and never turn over.
struct alignas(128) RoomHead {
  uint64_t epoch;         // of the owner's last meeting
  uint32_t begun, done;   // blocks that have come to the present one, and that are through with it
  uint32_t lost;          // a lost rank's number + 1, or that and CARD_STUCK
  alignas(128) uint64_t flags[MOST_CARDS][MOST_MEETING_BLOCKS];  // by rank and part: the newest epoch that it has pushed
};

// One rank's view.
struct Exchange {
  char* rooms[MOST_CARDS];        // by rank, at addresses of this process
  const volatile uint32_t* lost;  // the host's word for who is lost (collective.h: Meeting), seen by launches; or null
  int64_t half_floats;            // of each half of a room
  int64_t bound_ns;               // of one wait; 0: none
  int32_t rank, count;
};

inline int64_t room_bytes(int64_t half_floats) { return int64_t(sizeof(RoomHead)) + 2 * half_floats * 4; }

}  // namespace baton
