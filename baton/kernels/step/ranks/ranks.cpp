// The plan's way from the lead to the others: arrays one behind the other, tables by offset.
#include "ranks.h"

#include <memory>
#include <vector>

#include "elsewhere.h"
#include "part.h"
#include "../run.h"

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
  int64_t taken() const { return at_ - int64_t(sizeof(PlanPage)); }

 private:
  char* base_;
  int64_t at_, end_;
};

struct Arrays {
  int32_t *tokens, *sampled, *table, *owners, *adapters, *brought;
  AttentionItem* items;
  int64_t bytes;  // of all
  bool fit;

  Arrays(const Ranks& r, int64_t rows, int64_t sampled_count, int64_t item_count, int64_t table_count, int64_t brought_count = 0) {
    Pieces pieces(r);
    tokens = pieces.take<int32_t>(rows), sampled = pieces.take<int32_t>(sampled_count);
    items = pieces.take<AttentionItem>(item_count), table = pieces.take<int32_t>(table_count);
    owners = pieces.take<int32_t>(item_count), adapters = pieces.take<int32_t>(item_count);
    brought = pieces.take<int32_t>(brought_count);
    fit = pieces.fit(), bytes = pieces.taken();
  }
};

// Floats per row of the registers that are the rank's alone.
int64_t own_floats(const Model& m, const int32_t* is_shared) {
  int64_t found = 0;
  for (int32_t i = 0; i < m.registers; i++)
    if (!is_shared[i]) found += m.widths[i];
  return found;
}

// Whether there is room for the step.
bool fits(const Step& s, const Ranks& r, const Arrays& arrays) {
  return arrays.fit && s.rows * (r.shared_floats + r.carried_floats) <= r.register_floats && s.sampled_count * r.vocab <= r.logit_floats;
}

void publish(const Step& s, const int32_t* table, int64_t table_count, const Deal& deal, const Arrays& to, Ranks& r) {
  PlanPage& plan = *r.plan;
  std::memcpy(to.tokens, s.tokens, size_t(s.rows) * 4);
  std::memcpy(to.sampled, s.sampled, size_t(s.sampled_count) * 4);
  std::memcpy(to.table, table, size_t(table_count) * 4);
  for (int32_t i = 0; i < s.item_count; i++) {
    to.items[i] = s.items[i];
    to.items[i].pages = (const int32_t*)((const char*)s.items[i].pages - (const char*)table);  // an offset, in bytes
  }
  plan.rows = s.rows, plan.page_bytes = s.page_bytes, plan.layer_bytes = s.layer_bytes, plan.angles_stride = s.angles_stride;
  if (deal.owners) std::memcpy(to.owners, deal.owners, size_t(s.item_count) * 4);
  if (deal.adapters) std::memcpy(to.adapters, deal.adapters, size_t(s.item_count) * 4);
  if (deal.brought_count) std::memcpy(to.brought, deal.brought, size_t(deal.brought_count) * 4);
  plan.brought_count = deal.brought_count, plan.positions = deal.positions;
  plan.order = ORDER_STEP, plan.parts = deal.parts, plan.keeps = deal.keeps, plan.adapted = deal.adapters != nullptr;
  plan.swapped = deal.swapped, plan.spares = deal.spares;
  plan.table_count = table_count, plan.item_count = s.item_count, plan.sampled_count = s.sampled_count, plan.kv_type = s.kv_type;
}

// `bytes`: of the plan's arrays.
void announce(Ranks& r, int64_t bytes = 0) {
  PlanPage& plan = *r.plan;
  const uint32_t number = plan.number.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (plan.sleepers.load(std::memory_order_seq_cst)) wake_all(plan.number);
  show_plan(r, bytes);
  raise_elsewhere(r.group, other_hosts(r.group), plan.number, number);
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

  float* reach(int64_t wanted) {
    if (wanted > floats) arena.reset(new float[size_t(wanted)]), floats = wanted;
    return arena.get();
  }
};

Arrays arrays_of(const Ranks& r) {
  const PlanPage& plan = *r.plan;
  return {r, plan.rows, plan.sampled_count, plan.item_count, plan.table_count, plan.brought_count};
}

// Without an arena.
Step plan_of(const Ranks& r, Room& room) {
  const PlanPage& plan = *r.plan;
  const Arrays from = arrays_of(r);
  room.items.assign(from.items, from.items + plan.item_count);
  for (AttentionItem& item : room.items) item.pages = (const int32_t*)((const char*)from.table + intptr_t(item.pages));
  Step s{};
  s.tokens = from.tokens, s.items = room.items.data(), s.sampled = from.sampled;
  s.angles = r.angles, s.pages = r.pages;
  s.rows = plan.rows, s.page_bytes = plan.page_bytes, s.layer_bytes = plan.layer_bytes, s.angles_stride = plan.angles_stride;
  s.item_count = plan.item_count, s.sampled_count = plan.sampled_count, s.kv_type = plan.kv_type;
  return s;
}

Step step_of(const Model& m, const Ranks& r, Room& room) {
  Step s = plan_of(r, room);
  s.arena = room.reach(r.plan->rows * own_floats(m, r.is_shared));
  return s;
}

bool is_head(const Op& op) { return op.kind == OP_LM_HEAD || op.kind == OP_LM_HEAD_CAPPED || op.kind == OP_LM_HEAD_ADAPTED; }

// Ops that a rank without rows has a part in: meetings, and experts, which run over all ranks' rows.
bool is_everybodys(const Op& op) { return op.kind >= OP_GATHER && op.kind != OP_MIX; }

// A step whose items have several page tables, as one op after the other sees it: each with its own table.
class Tabled {
 public:
  Tabled(const Step& whole, const Ranks& r) : step_(whole), tables_(r.op_tables), stride_(r.plan->table_count / r.page_tables) {
    if (!tables_) return;
    items_.assign(whole.items, whole.items + whole.item_count);
    step_.items = items_.data();
  }
  Tabled(const Tabled&) = delete;

  const Step& step() const { return step_; }

  void turn_to(int64_t op) {
    if (!tables_ || tables_[op] == at_) return;
    for (AttentionItem& item : items_) item.pages += (tables_[op] - at_) * stride_;
    at_ = tables_[op];
  }

 private:
  Step step_;
  const int32_t* tables_;
  int64_t stride_;
  int32_t at_ = 0;
  std::vector<AttentionItem> items_;
};

// Runs the rank's ops `from` … `to` - 1 over `tabled`, whose logits go to `wanted` places.
int32_t run_range(const Model& model, Tabled& tabled, Run& run, const int32_t* wanted, int64_t from, int64_t to) {
  const Step& step = tabled.step();
  for (const Op* op = model.ops + from; op < model.ops + to; op++) {
    tabled.turn_to(op - model.ops);
    if (is_head(*op)) run.own_logits(*op, wanted);
    else if (step.rows || is_everybodys(*op)) run.op(*op);
    if (run.lost()) return run.lost();
  }
  return 0;
}

// Runs the last ops for the rows of `step` alone whose results are read, behind `whole`, which has run the others for all rows. Of
// ranks that share rows, `all` is the step of all of them, and `numbers` are those of `step`'s rows in it.
int32_t run_last(const Model& model, const Step& step, const Run& whole, Ranks& r, const int32_t* wanted, const Step* all,
                 const int32_t* numbers) {
  static thread_local Room room;
  const LastRows last(step);
  const std::vector<int32_t> everyones = all ? read_rows(all->sampled, all->sampled_count) : last.rows;
  if (everyones.empty()) return 0;
  std::vector<int32_t> among;
  for (size_t i = 0; i < last.rows.size() && all; i++) among.push_back(place_among(everyones, numbers[last.rows[i]]));
  float* arena = room.reach(int64_t(last.rows.size()) * own_floats(model, r.last.is_shared));
  Tabled tabled(last.step(step, arena), r);
  const SharedRows shared{r.last.is_shared, int64_t(everyones.size()), r.plan->rows * (r.shared_floats + r.carried_floats)};
  Run run(model, tabled.step(), &r, all ? among.data() : nullptr, shared);
  whole.copy(r.last.registers, r.last.count, last.rows, run);
  return run_range(model, tabled, run, wanted, r.last.begin, r.op_count);
}

// Runs the rank's ops over `tabled`, which is `step`, as `run`; what else there is: `run_last`.
int32_t run_ops(const Model& model, const Step& step, Tabled& tabled, Run& run, Ranks& r, const int32_t* wanted,
                const Step* all = nullptr, const int32_t* numbers = nullptr) {
  const bool spares = r.plan->spares && r.last.begin < r.op_count;
  if (const int32_t lost = run_range(model, tabled, run, wanted, 0, spares ? r.last.begin : r.op_count)) return lost;
  return spares ? run_last(model, step, run, r, wanted, all, numbers) : 0;
}

// The adapters of `count` items in `to`, where ops read them while this lives.
class Adapted {
 public:
  Adapted(LoraStep& to, const Ranks& r, const AttentionItem* items, const int32_t* adapters, int32_t count) : lora_(&to) {
    for (int32_t i = 0; i < count; i++)
      if (adapters[i] >= 0) add(r.adapters[adapters[i]], items[i]);
    for (size_t g = 0; g < groups_.size(); g++) groups_[g].rows = rows_[g].data(), groups_[g].count = int64_t(rows_[g].size());
    *lora_ = {groups_.data(), int64_t(groups_.size())};
  }
  explicit Adapted(LoraStep& to) : lora_(&to) {}
  Adapted(const Adapted&) = delete;
  ~Adapted() { *lora_ = {nullptr, 0}; }

 private:
  void add(const LoraSite* sites, const AttentionItem& item) {
    size_t at = 0;
    while (at < groups_.size() && groups_[at].sites != sites) at++;
    if (at == groups_.size()) groups_.push_back({sites, nullptr, 0}), rows_.emplace_back();
    for (int32_t i = 0; i < item.queries; i++) rows_[at].push_back(int32_t(item.first) + i);
  }

  LoraStep* lora_;
  std::vector<LoraGroup> groups_;
  std::vector<std::vector<int32_t>> rows_;
};

// Returns when the stage before the one of rank `first`, or where stages cross every rank of all before it, has handed on one more
// part: 0, or who is lost.
int32_t await_earlier(Ranks& r, int32_t first) {
  ++r.taken;
  for (int32_t rank = r.crosses ? 0 : first - r.columns; rank < first; rank += r.crosses ? 1 : r.columns)
    if (const int32_t lost = await(r.group, r.plan->handed[rank], r.taken, rank)) return lost;
  return 0;
}

// One part of a step, from the stage before this one to the one behind it. Of a stage's ranks the first one tells the next stage.
int32_t run_part(const Model& model, const Step& whole, const Part& part, Ranks& r) {
  const bool staged = r.deal == BY_LAYERS, speaks = !staged || r.group.rank % r.columns == 0;
  const int32_t first = r.group.rank / r.columns * r.columns, next = first + r.columns;
  if (staged && first)
    if (const int32_t lost = await_earlier(r, first)) return lost;
  const Step own = part.step(whole);
  Tabled tabled(own, r);
  Run run(model, tabled.step(), &r, staged ? nullptr : part.rows.data());
  run.take(r.in, part.rows.data());
  const Adapted adapted = part.adapters.empty() ? Adapted(*r.lora) : Adapted(*r.lora, r, own.items, part.adapters.data(), own.item_count);
  if (const int32_t lost = run_ops(model, own, tabled, run, r, part.wanted.data(), staged ? nullptr : &whole, part.rows.data())) return lost;
  const bool hands_on = staged && next < r.group.count;
  if (speaks && (hands_on || r.plan->keeps)) run.hand_on(r.out, part.rows.data(), hands_on ? next_hosts(r) : lead_host(r));
  if (hands_on && (speaks || r.crosses)) {
    Seat& handed = r.plan->handed[r.group.rank];
    arrive(handed, ++r.given);
    raise_elsewhere(r.group, r.crosses ? hosts_of(r.group, next, r.group.count - next) : next_hosts(r), handed.arrived, r.given);
  }
  return staged ? meet_stage(r) : 0;  // the next part goes where this one's registers are read
}

// Tells the lead what isn't a register's; returns when all ranks have done their part.
int32_t leave_step(Ranks& r, int64_t items) {
  show_own_states(r, items);
  show_expert_rows(r);
  return meet(r.group);
}

// Has the rank's ops find this step's states. Those of sequences that begin are zeros, which other hosts write themselves.
void place_states(const Step& step, Ranks& r) {
  const SharedStates& states = r.states;
  if (!states.placed) return;
  char* before = states.before(r.plan->swapped);
  states.placed->at = before;
  if (states.placed->to) states.placed->to = states.after(r.plan->swapped);
  for (int32_t i = 0; i < step.item_count && lead_host(r); i++)
    for (const StateSpan* span = states.own; !step.items[i].start && span < states.own + states.count; span++)
      std::memset(before + i * states.stride + span->at, 0, size_t(span->bytes));
}

// What the rank has of a step; returns when all have theirs.
int32_t run_own(const Model& model, const Step& step, Ranks& r) {
  place_states(step, r);
  const Arrays plan = arrays_of(r);
  const int32_t* adapters = r.plan->adapted ? plan.adapters : nullptr;
  if (r.deal == BY_COLUMNS) {
    const Adapted adapted = adapters ? Adapted(*r.lora, r, step.items, adapters, step.item_count) : Adapted(*r.lora);
    Tabled tabled(step, r);
    Run run(model, tabled.step(), &r);
    if (const int32_t lost = run_ops(model, step, tabled, run, r, nullptr)) return lost;
    return leave_step(r, step.item_count);
  }
  const int32_t rank = r.group.rank, staged = r.deal == BY_LAYERS;
  const bool exchanges = adapters && r.expert_layers && !staged;
  const Adapted everyones = exchanges ? Adapted(r.everyones, r, step.items, adapters, step.item_count) : Adapted(r.everyones);
  for (int32_t at = staged ? 0 : rank; at < (staged ? r.plan->parts : rank + 1); at++)
    if (const int32_t lost = run_part(model, step, Part(step, plan.owners, adapters, at), r)) return lost;
  return leave_step(r, step.item_count);
}

}  // namespace

int32_t meet_stage(Ranks& r) {
  if (r.columns == r.group.count) return meet(r.group);
  if (r.columns == 1) return 0;
  const int32_t first = r.group.rank / r.columns * r.columns;
  Seat* seats = r.plan->columns;
  arrive(seats[r.group.rank], ++r.met);
  raise_elsewhere(r.group, stage_hosts(r), seats[r.group.rank].arrived, r.met);
  for (int32_t rank = first; rank < first + r.columns; rank++)
    if (rank != r.group.rank)
      if (const int32_t lost = await(r.group, seats[rank], r.met, rank)) return lost;
  return 0;
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_rank_give(const Step* step, const int32_t* table, int64_t table_count, const Deal* deal, Ranks* ranks) {
  const Arrays arrays(*ranks, step->rows, step->sampled_count, step->item_count, table_count, deal->brought_count);
  if (!fits(*step, *ranks, arrays)) return TOO_LARGE;
  publish(*step, table, table_count, *deal, arrays, *ranks);
  announce(*ranks, arrays.bytes);
  return 0;
}

BATON_API int32_t baton_rank_lead(const Model* model, const Step* step, const int32_t* table, int64_t table_count, const Deal* deal, Ranks* ranks) {
  if (const int32_t wrong = baton_rank_give(step, table, table_count, deal, ranks)) return wrong;
  if (const int32_t lost = run_own(*model, *step, *ranks)) return lost;
  baton_rank_choose(ranks, step);
  return 0;
}

BATON_API void baton_rank_choose(const Ranks* ranks, const Step* step) {
  choose_tokens(ranks->logits, ranks->vocab, step->sampled_count, step->choices);
}

BATON_API int32_t baton_rank_take(Ranks* ranks, TakenPlan* plan) {
  static thread_local Room room;
  if (const int32_t lost = await_plan(*ranks, ranks->seen)) return lost;
  ranks->seen++;
  if (ranks->plan->order != ORDER_STEP) return ranks->plan->order == ORDER_HEAR ? HEAR : LEFT;
  *plan = {plan_of(*ranks, room), arrays_of(*ranks).brought, ranks->plan->brought_count, ranks->plan->positions};
  return 0;
}

BATON_API int32_t baton_rank_done(Ranks* ranks) { return meet(ranks->group); }

BATON_API int32_t baton_rank_declare(Ranks* ranks, int32_t who) { return declare(*ranks->group.meeting, uint32_t(who)); }

BATON_API int32_t baton_rank_follow(const Model* model, Ranks* ranks) {
  Room room;
  for (;;) {
    if (const int32_t lost = await_plan(*ranks, ranks->seen)) return lost;
    ranks->seen++;
    if (ranks->plan->order != ORDER_STEP) return ranks->plan->order == ORDER_HEAR ? HEAR : 0;
    if (const int32_t lost = run_own(*model, step_of(*model, *ranks, room), *ranks)) return lost;
  }
}

BATON_API void baton_rank_dismiss(Ranks* ranks) {
  ranks->plan->order = ORDER_LEAVE;
  announce(*ranks);
}

BATON_API void baton_rank_call(Ranks* ranks) {
  ranks->plan->order = ORDER_HEAR;
  announce(*ranks);
}

BATON_API void baton_rank_expert_rows(const Ranks* ranks, int64_t* rows, int32_t experts, int64_t* by_rank) {
  const PlanPage& plan = *ranks->plan;
  for (int64_t layer = 0; layer < ranks->expert_layers; layer++)
    for (int32_t e = 0; e < experts; e++)
      rows[layer * experts + e] = plan.expert_rows[layer * MOST_EXPERTS + e].load(std::memory_order_relaxed);
  for (int32_t rank = 0; rank < ranks->group.count; rank++) by_rank[rank] = plan.rank_rows[rank].load(std::memory_order_relaxed);
}
