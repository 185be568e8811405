// Places count from the begin of a host's memory, which has one layout on all hosts.
#include "elsewhere.h"

#include <algorithm>

#include "../../abi/kv.h"

namespace baton {
namespace {

int64_t element_bytes(int32_t type) { return type == KV_F32 ? 4 : type == KV_BF16 || type == KV_F16 ? 2 : 1; }

// f(page, first token in it, token behind the last) for each page that the items' rows are in.
template <class F>
void for_each_page(const AttentionItem* items, int32_t count, F&& f) {
  for (const AttentionItem* item = items; item < items + count; item++)
    for (int64_t at = item->start, end = at + item->queries, next; at < end; at = next) {
      next = std::min(end, (at / PAGE + 1) * PAGE);
      f(item->pages[at / PAGE], at % PAGE, next - at / PAGE * PAGE);
    }
}

// `tokens` rows of one plane's elements or scales, `head` bytes per KV head: the own heads' alone.
void show_heads(Ranks& r, Hosts to, const char* first, int64_t tokens, int64_t head, int32_t kv_heads) {
  const int64_t row = head * kv_heads, own = head * r.own.count;
  if (own == row) write_elsewhere(r.group, to, LINK_PAGES, first, 1, tokens * row, tokens * row);
  else write_elsewhere(r.group, to, LINK_PAGES, first + head * r.own.first, tokens, own, row);
}

// Tokens `begin` … `end` - 1 of a page.
void show_page(Ranks& r, Hosts to, const PagedKv& kv, int32_t page, int64_t begin, int64_t end) {
  const int64_t head = kv.head_dim * element_bytes(kv.type), scale = kv.type == KV_INT8 || kv.type == KV_FP8 ? 4 : 0;
  const int64_t elements = PAGE * kv.kv_heads * head, plane = elements + PAGE * kv.kv_heads * scale;
  const char* keys = kv.pages + int64_t(page) * kv.page_bytes + kv.layer_offset;
  for (const char* of : {keys, keys + plane}) {
    show_heads(r, to, of + begin * kv.kv_heads * head, end - begin, head, kv.kv_heads);
    if (scale) show_heads(r, to, of + elements + begin * kv.kv_heads * scale, end - begin, scale, kv.kv_heads);
  }
}

}  // namespace

Hosts stage_hosts(const Ranks& r) { return hosts_of(r.group, r.group.rank / r.columns * r.columns, r.columns); }

Hosts next_hosts(const Ranks& r) { return hosts_of(r.group, (r.group.rank / r.columns + 1) * r.columns, r.columns); }

Hosts lead_host(const Ranks& r) { return hosts_of(r.group, 0, 1); }

void show_plan(Ranks& r, int64_t bytes) {
  const PlanPage& plan = *r.plan;
  const int64_t numbers = (const char*)plan.handed - (const char*)&plan.rows;
  write_elsewhere(r.group, other_hosts(r.group), LINK_RANKS, &plan.rows, 1, numbers, numbers);
  write_elsewhere(r.group, other_hosts(r.group), LINK_RANKS, &plan + 1, 1, bytes, bytes);
}

void show_kv(Ranks& r, const PagedKv& kv, const AttentionItem* items, int32_t count) {
  const Hosts to = r.deal == BY_ROWS || r.crosses ? other_hosts(r.group) : lead_host(r);
  if (!to) return;
  for_each_page(items, count, [&](int32_t page, int64_t begin, int64_t end) { show_page(r, to, kv, page, begin, end); });
}

void show_latents(Ranks& r, const LatentAttention& op, const char* pages, int64_t page_bytes, const AttentionItem* items, int32_t count) {
  const Hosts to = lead_host(r);
  const int64_t token = (op.rank + op.rotary) * element_bytes(op.kv_type);
  if (!to) return;
  for_each_page(items, count, [&](int32_t page, int64_t begin, int64_t end) {
    const char* first = pages + page * page_bytes + op.place + begin * token;
    write_elsewhere(r.group, to, LINK_PAGES, first, 1, (end - begin) * token, (end - begin) * token);
  });
}

template <class Number>
void show_rows(Ranks& r, Hosts to, const float* base, const Number* rows, int64_t count, int64_t width) {
  if (!to) return;
  for (int64_t at = 0, end; at < count; at = end) {
    for (end = at + 1; end < count && rows[end] == rows[at] + (end - at);) end++;
    const int64_t bytes = (end - at) * width * 4;
    write_elsewhere(r.group, to, LINK_RANKS, base + rows[at] * width, 1, bytes, bytes);
  }
}

template void show_rows(Ranks&, Hosts, const float*, const int32_t*, int64_t, int64_t);
template void show_rows(Ranks&, Hosts, const float*, const int64_t*, int64_t, int64_t);

void show_logits(Ranks& r, int64_t place) {
  const int64_t bytes = r.own_tokens * 4;
  write_elsewhere(r.group, lead_host(r), LINK_RANKS, r.logits + place * r.vocab + r.first_token, 1, bytes, bytes);
}

void show_own_states(Ranks& r, int64_t items) {
  const SharedStates& states = r.states;
  for (const StateSpan* span = states.own; span < states.own + states.count; span++)
    write_elsewhere(r.group, lead_host(r), LINK_RANKS, states.after(r.plan->swapped) + span->at, items, span->bytes, states.stride);
}

void show_expert_rows(Ranks& r) {
  const Hosts to = lead_host(r);
  if (!to) return;
  const auto tell = [&](std::atomic<int64_t>& rows) {
    if (rows.load(std::memory_order_relaxed))
      if (const int64_t since = rows.exchange(0, std::memory_order_relaxed)) add_elsewhere(r.group, to, rows, since);
  };
  for (int64_t at = 0; at < r.expert_layers * MOST_EXPERTS; at++) tell(r.plan->expert_rows[at]);
  for (std::atomic<int64_t>& rows : r.plan->rank_rows) tell(rows);
}

}  // namespace baton

using namespace baton;

BATON_API void baton_rank_show_angles(Ranks* ranks, int64_t bytes) {
  write_elsewhere(ranks->group, other_hosts(ranks->group), LINK_RANKS, ranks->angles, 1, bytes, bytes);
}

BATON_API void baton_rank_show_states(Ranks* ranks, const int32_t* items, int64_t count, int32_t swapped) {
  const SharedStates& states = ranks->states;
  for (int64_t i = 0; i < count; i++)
    write_elsewhere(ranks->group, other_hosts(ranks->group), LINK_RANKS, states.before(swapped) + items[i] * states.stride, 1, states.bytes, states.bytes);
}

BATON_API void baton_rank_show_pages(Ranks* ranks, int32_t host, const int32_t* pages, int64_t count, int64_t page_bytes, const PageExtent* part,
                                     int64_t extents) {
  for (int64_t i = 0; i < count; i++)
    for (const PageExtent* of = part; of < part + extents; of++)
      write_elsewhere(ranks->group, Hosts(1) << host, LINK_PAGES, ranks->pages + pages[i] * page_bytes + of->at, of->count, of->bytes, of->stride);
}
