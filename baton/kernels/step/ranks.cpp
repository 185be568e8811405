// The plan's way from the lead to the others: arrays one behind the other, tables by offset.
#include "ranks.h"

#include <memory>
#include <vector>

#include "run.h"

namespace baton {
namespace {

constexpr int SPINS = 4000;  // some 50 to 150 microseconds: steps follow each other closely

// Hands out 64-byte aligned pieces of memory behind the plan's page.
class Pieces {
 public:
  explicit Pieces(const Ranks& r) : base_((char*)r.plan), at_(sizeof(PlanPage)), end_(r.plan_bytes) {}

  template <class T>
  T* take(int64_t count) {
    at_ = (at_ + 63) & ~int64_t(63);
    T* found = (T*)(base_ + at_);
    at_ += count * int64_t(sizeof(T));
    return found;
  }

  bool fit() const { return at_ <= end_; }

 private:
  char* base_;
  int64_t at_, end_;
};

struct Arrays {
  int32_t *tokens, *sampled, *table;
  AttentionItem* items;
  bool fit;

  Arrays(const Ranks& r, int64_t rows, int64_t sampled_count, int64_t item_count, int64_t table_count) {
    Pieces pieces(r);
    tokens = pieces.take<int32_t>(rows), sampled = pieces.take<int32_t>(sampled_count);
    items = pieces.take<AttentionItem>(item_count), table = pieces.take<int32_t>(table_count);
    fit = pieces.fit();
  }
};

// Floats per row of the registers that are shared, or of those that aren't.
int64_t widths(const Model& m, const Ranks& r, bool shared) {
  int64_t found = 0;
  for (int32_t i = 0; i < m.registers; i++)
    if (bool(r.is_shared[i]) == shared) found += m.widths[i];
  return found;
}

// Whether there is room for the step.
bool fits(const Model& m, const Step& s, const Ranks& r, const Arrays& arrays) {
  return arrays.fit && s.rows * widths(m, r, true) <= r.register_floats && s.sampled_count * r.vocab <= r.logit_floats;
}

void publish(const Step& s, const int32_t* table, int64_t table_count, const Arrays& to, Ranks& r) {
  PlanPage& plan = *r.plan;
  std::memcpy(to.tokens, s.tokens, size_t(s.rows) * 4);
  std::memcpy(to.sampled, s.sampled, size_t(s.sampled_count) * 4);
  std::memcpy(to.table, table, size_t(table_count) * 4);
  for (int32_t i = 0; i < s.item_count; i++) {
    to.items[i] = s.items[i];
    to.items[i].pages = (const int32_t*)((const char*)s.items[i].pages - (const char*)table);  // an offset, in bytes
  }
  plan.rows = s.rows, plan.page_bytes = s.page_bytes, plan.layer_bytes = s.layer_bytes, plan.turns_stride = s.turns_stride;
  plan.table_count = table_count, plan.item_count = s.item_count, plan.sampled_count = s.sampled_count, plan.kv_type = s.kv_type;
}

void announce(PlanPage& plan) {
  plan.number.fetch_add(1, std::memory_order_seq_cst);
  if (plan.sleepers.load(std::memory_order_seq_cst)) wake_all(plan.number);
}

// Returns 0 when there is a plan behind `seen`, or who is lost. An idle worker has no bound.
int32_t await_plan(Ranks& r, uint32_t seen) {
  PlanPage& plan = *r.plan;
  for (int spin = 0; spin < SPINS; spin++) {
    if (plan.number.load(std::memory_order_acquire) != seen) return 0;
    pause_a_little(spin);
  }
  plan.sleepers.fetch_add(1, std::memory_order_seq_cst);
  int32_t lost = 0;
  while (plan.number.load(std::memory_order_seq_cst) == seen && !(lost = int32_t(r.group.meeting->lost.load()))) sleep_on(plan.number, seen);
  plan.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return lost;
}

// What a follower keeps from step to step.
struct Room {
  std::unique_ptr<float[]> arena;
  int64_t floats = 0;
  std::vector<AttentionItem> items;
  std::vector<Choice> choices;

  float* reach(int64_t wanted) {
    if (wanted > floats) arena.reset(new float[size_t(wanted)]), floats = wanted;
    return arena.get();
  }
};

Step step_of(const Model& m, const Ranks& r, Room& room) {
  const PlanPage& plan = *r.plan;
  const Arrays from(r, plan.rows, plan.sampled_count, plan.item_count, plan.table_count);
  room.items.assign(from.items, from.items + plan.item_count);
  for (AttentionItem& item : room.items) item.pages = (const int32_t*)((const char*)from.table + intptr_t(item.pages));
  Step s{};
  s.tokens = from.tokens, s.items = room.items.data(), s.sampled = from.sampled;
  s.turns = r.turns, s.pages = r.pages, s.arena = room.reach(plan.rows * widths(m, r, false));
  s.rows = plan.rows, s.page_bytes = plan.page_bytes, s.layer_bytes = plan.layer_bytes, s.turns_stride = plan.turns_stride;
  s.item_count = plan.item_count, s.sampled_count = plan.sampled_count, s.kv_type = plan.kv_type;
  return s;
}

bool is_head(const Op& op) { return op.kind == OP_LM_HEAD || op.kind == OP_LM_HEAD_CAPPED; }

int32_t run_all(const Model& model, const Step& step, Ranks& ranks) {
  Run run(model, step, &ranks);
  for (const Op* op = model.ops; !is_head(*op); op++) {
    run.op(*op);
    if (run.lost()) return run.lost();
  }
  return 0;
}

const Op& head_of(const Model& model) {
  const Op* op = model.ops;
  while (!is_head(*op)) op++;
  return *op;
}

}  // namespace
}  // namespace baton

using namespace baton;

BATON_API int32_t baton_rank_lead(const Model* model, const Step* step, const int32_t* table, int64_t table_count, Ranks* ranks) {
  const Arrays arrays(*ranks, step->rows, step->sampled_count, step->item_count, table_count);
  if (!fits(*model, *step, *ranks, arrays)) return TOO_LARGE;
  publish(*step, table, table_count, arrays, *ranks);
  announce(*ranks->plan);
  if (const int32_t lost = run_all(*model, *step, *ranks)) return lost;
  Run run(*model, *step, ranks);
  run.own_logits(head_of(*model));
  if (const int32_t lost = meet(ranks->group)) return lost;
  choose_tokens(ranks->logits, ranks->vocab, step->sampled_count, step->choices);
  return 0;
}

BATON_API int32_t baton_rank_follow(const Model* model, Ranks* ranks) {
  Room room;
  for (uint32_t seen = 0;; seen++) {
    if (const int32_t lost = await_plan(*ranks, seen)) return lost;
    if (ranks->plan->is_over) return 0;
    const Step step = step_of(*model, *ranks, room);
    if (const int32_t lost = run_all(*model, step, *ranks)) return lost;
    Run run(*model, step, ranks);
    run.own_logits(head_of(*model));
    if (const int32_t lost = meet(ranks->group)) return lost;
  }
}

BATON_API void baton_rank_dismiss(Ranks* ranks) {
  ranks->plan->is_over = 1;
  announce(*ranks->plan);
}
