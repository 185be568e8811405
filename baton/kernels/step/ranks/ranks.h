// A step by several processes that have each a part of the weights. Knows nothing of who starts them.
//
// The ranks share one memory: a page where they meet (../../collective), the plan of the present step, the rotary angles,
// those registers that ranks fill together, and the logits. A rank multiplies by its own rows of every matrix over the whole
// of its inputs, so that a result has the bits that it has on one rank, whatever the kind of weights; it writes what it
// computed where the others read it, and GATHER is a meeting. KV pages are the worker's, with all heads in them: a rank writes
// and reads its own heads' rows. The lead (rank 0) gives out plans and chooses tokens.
//
// That is one way to deal a step (BY_COLUMNS). By rows, each rank has all weights and computes some items' rows; ranks meet where
// the step's keys and values are written. Where experts are dealt beside that, ranks put all rows in front of them where every rank
// reads them (EXCHANGE), each runs its own experts over all rows, and mixes its own rows. By layers, each stage of ranks has some ops and
// runs them over one part of the rows after the other; what the residual stream is between two stages lies in shared memory, and a
// seat per stage tells how many parts it has handed on. A stage is one rank, or several that share its layers by columns.
//
// Ranks of other hosts have such memory, and pages, of their own (../../collective/links.h, elsewhere.h): a rank writes its part there, too,
// before it raises its seat. The lead's pages have all keys and values; another host's have those that its own ranks read.
//
// Between a read of a shared register and its next writing lies a meeting for another register: whoever splits a program
// sees to that (engine/program/ranks.py).
//
// Where a stage's layers read keys and values that earlier stages wrote (`crosses`), every rank of these says that its part is done, to
// all stages behind it, and shows the keys and values to every host before.
//
// The ops behind the last one that stores anything run for the rows alone whose results are read, where the plan says so (`spares`):
// with registers of their own, those that ranks fill together behind all others in the shared memory.
#pragma once
#include "../../abi/heads.h"
#include "../../abi/states.h"
#include "../../collective/links.h"
#include "../../lora/lora.h"
#include "../../moe/own_experts.h"
#include "../step.h"

namespace baton {

// Kinds of Op beside step.h's and forms.h's. In a program of ranks `delta` of LINEAR, SWIGLU, GEGLU and ATTENTION, and `layer` of LATENT, GATE, GATED_DELTA and STATE_SPACE, is the first column of
// the rank's part of `out`; of EMBED it is the first token of its table, which has `layer` rows.
enum RankOpKind : int32_t {
  OP_GATHER = 128,    // meets the others: `in` is whole then; copied to `out` where that is another register. The rank's own part: `layer`
                      // columns from `delta` on, of all rows, or where `window` is 1 of the rows whose tokens are its own
  OP_EXPERTS,         // as MOE, own experts alone, of the RankExperts in `table`: out (chosen x hidden)
  OP_BIASED_EXPERTS,  // the same of BIASED_MOE
  OP_MIX,             // `in` of every expert, by the router's logits in `delta`, to `out`
  OP_EXCHANGE,        // own rows of `in` and of the router's logits in `delta` to all ranks' `out` and `layer`; then meets the others
};

constexpr int32_t MOST_EXPERTS = 512;  // moe.h
constexpr int32_t MOST_EXPERT_LAYERS = 256;

// A layer of experts of which a rank has some.
struct RankExperts {
  BiasedMoe layer;  // its biases are null where it has none
  OwnExperts own;
  int64_t gate_up, down;  // sites of adapters; -1: there are no adapters
};

enum DealKind : int32_t { BY_COLUMNS, BY_ROWS, BY_LAYERS };

// How a step's items are dealt: by rows, `owners` are ranks; by layers, parts of the step, 0 … `parts` - 1. `keeps`: the last
// registers of all rows stay where the lead reads them. `swapped`: states before the step are in the second room. `spares`: the last
// ops leave out rows that nobody reads.
struct Deal {
  const int32_t* owners;    // per item; null by columns
  const int32_t* adapters;  // per item the number of its adapter, -1 for none; null where no item has one
  int32_t parts, keeps, swapped, spares;
  const int32_t* brought;   // of ranks on cards: pages that every card copies from the host before the step
  int64_t brought_count, positions;  // and for how many positions there are rotary angles
};

enum RanksOrder : int32_t { ORDER_STEP, ORDER_LEAVE, ORDER_HEAR };

// What the lead asks for, at the begin of the plan's memory; its arrays lie behind it.
struct PlanPage {
  alignas(64) std::atomic<uint32_t> number;  // of plans so far; those who wait for the next sleep on it
  std::atomic<uint32_t> sleepers;
  alignas(64) int64_t rows;
  int64_t page_bytes, layer_bytes, angles_stride, table_count, brought_count, positions;
  int32_t item_count, sampled_count, kv_type, order, parts, keeps, adapted, swapped, spares, pad;
  Seat handed[MOST_RANKS];   // parts that each stage, by its first rank, has handed to the next, ever; where stages cross, by every rank
  Seat columns[MOST_RANKS];  // where the ranks of one stage meet
  std::atomic<int64_t> rank_rows[MOST_RANKS];  // that each rank's experts computed in all layers, ever
  std::atomic<int64_t> expert_rows[MOST_EXPERT_LAYERS * MOST_EXPERTS];  // that went to each expert of each layer, ever
};

// Registers that a rank hands to another: of all rows, one register behind the other, `first` floats per row into shared memory.
struct CarriedRegisters {
  const int32_t* registers;
  int64_t first;
  int32_t count, pad;
};

// Bytes `at` … `at` + `bytes` - 1 of a sequence's recurrent state.
struct StateSpan {
  int64_t at, bytes;
};

// `count` stretches of `bytes` bytes of a page, `stride` apart from `at` on.
struct PageExtent {
  int64_t at, bytes, stride, count;
};

// Where the recurrent states of a step's items lie in shared memory, `stride` bytes apart; `own` are those parts that the rank reads
// and writes. Where states aren't changed in place there are two rooms, which swap places from step to step (Deal::swapped): what a
// step leaves for an item, the next one finds for the item of the same number.
struct SharedStates {
  char* rooms[2];         // the same one twice where states are changed in place
  int64_t stride, bytes;  // of each
  const StateSpan* own;
  int64_t count;
  SequenceStates* placed;  // where the rank's ops look; null: the model has no states

  char* before(int32_t swapped) const { return rooms[swapped]; }
  char* after(int32_t swapped) const { return rooms[1 - swapped]; }
};

// The rank's ops from `begin` on, which store nothing that later tokens need. `registers` are those of its own that they read before
// they write them; what ranks have filled together is among them, and by `is_shared` each rank's own from here on.
struct LastOps {
  const int32_t *registers, *is_shared;
  int64_t begin;
  int32_t count, pad;
};

// One rank's view.
struct Ranks {
  Group group;
  PlanPage* plan;
  const float* angles;      // shared
  char* pages;
  float *registers, *logits;  // shared
  int64_t plan_bytes, register_floats, logit_floats;
  const int32_t* is_shared;   // per register
  int64_t vocab, first_token;  // of the logits, and of the rank's part
  Heads own;
  int32_t page_heads, deal;   // DealKind
  int64_t carried_floats;     // per row, of all that ranks hand on
  int32_t op_count;
  uint32_t taken, given, seen;  // parts and orders so far; the rank's own
  CarriedRegisters in, out;
  const LoraSite* const* adapters;  // by number: what this rank has of each
  LoraStep* lora;                   // which the ops point at
  LoraStep everyones;               // of all ranks' rows, where ranks exchange these
  int64_t shared_floats, first_shared;  // per row: of all stages' shared registers, and of those before the own stage's
  int32_t columns;            // ranks of a stage; all ranks where there are no stages
  uint32_t met;               // meetings of the stage so far; the rank's own
  int64_t own_tokens;         // of the vocabulary: the logits that the rank computes
  int64_t expert_layers;      // of the whole model, whose experts are divided
  const int32_t* op_tables;   // per op: the page table that it reads or writes; null where items have one
  int64_t page_tables;        // of an item: all have entries for the same blocks, and those of a step lie table by table
  SharedStates states;        // all zeros where there are none
  int64_t crosses;            // whether a stage reads keys and values that an earlier one wrote
  LastOps last;               // begins behind all ops where rows are never left out
};

// Returns when every rank of this one's stage has come as often as this one: 0, or who is lost.
int32_t meet_stage(Ranks& ranks);

constexpr int32_t TOO_LARGE = -1;  // the plan, its registers or its logits don't fit the shared memory
constexpr int32_t HEAR = -2;       // the lead has something to say by another way
constexpr int32_t LEFT = -3;       // the lead has told all to leave

// A plan as a rank on a card finds it; it lies in the ranks' memory until the rank is done with it.
struct TakenPlan {
  Step step;  // without pages, arena and choices
  const int32_t* brought;
  int64_t brought_count, positions;
};

}  // namespace baton

// The lead's step: gives the plan out, runs its own part and chooses tokens. `table`: where the items' block tables lie, one
// behind the other. Returns 0, TOO_LARGE (nothing was begun), or who is lost (collective.h).
BATON_API int32_t baton_rank_lead(const baton::Model* model, const baton::Step* step, const int32_t* table, int64_t table_count,
                                  const baton::Deal* deal, baton::Ranks* ranks);
// Another rank's life: runs its part of one plan after the other. Returns 0 when told to leave, HEAR when told to listen and come
// again, or who is lost.
BATON_API int32_t baton_rank_follow(const baton::Model* model, baton::Ranks* ranks);
// The same of ranks on cards, whose steps run elsewhere: the lead gives a plan out (0 or TOO_LARGE), every other rank takes it (0,
// HEAR, LEFT, or who is lost), and each says when its part is done, which returns when all have: 0, or who is lost. Logits of all
// lie in the ranks' memory then, of which the lead chooses.
BATON_API int32_t baton_rank_give(const baton::Step* step, const int32_t* table, int64_t table_count, const baton::Deal* deal,
                                  baton::Ranks* ranks);
BATON_API int32_t baton_rank_take(baton::Ranks* ranks, baton::TakenPlan* plan);
BATON_API int32_t baton_rank_done(baton::Ranks* ranks);
BATON_API void baton_rank_choose(const baton::Ranks* ranks, const baton::Step* step);
// Tells all ranks who is lost, by the collective's code; returns the first one that was.
BATON_API int32_t baton_rank_declare(baton::Ranks* ranks, int32_t who);
// Tells the others to leave, or to listen. The next order is given once they have answered.
BATON_API void baton_rank_dismiss(baton::Ranks* ranks);
BATON_API void baton_rank_call(baton::Ranks* ranks);
// Copies the first `bytes` of the lead's rotary angles to other hosts, and of `count` of its pages the part that ranks of `host` read to
// that host, as of the next plan.
BATON_API void baton_rank_show_angles(baton::Ranks* ranks, int64_t bytes);
BATON_API void baton_rank_show_pages(baton::Ranks* ranks, int32_t host, const int32_t* pages, int64_t count, int64_t page_bytes,
                                     const baton::PageExtent* part, int64_t extents);
// Copies the recurrent states of `count` of the next step's items to other hosts; `swapped` as that step's.
BATON_API void baton_rank_show_states(baton::Ranks* ranks, const int32_t* items, int64_t count, int32_t swapped);
// rows (layers, experts): those that went to each expert of each layer, on all ranks, ever. by_rank: those that each rank computed.
BATON_API void baton_rank_expert_rows(const baton::Ranks* ranks, int64_t* rows, int32_t experts, int64_t* by_rank);
