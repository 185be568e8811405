// What a rank's step writes to other hosts: the plan, its part of registers that ranks fill together, keys and values, logits. Knows
// nothing of connections (../../collective/links.h). On one host all of it is nothing.
#pragma once
#include "../../latent_attention/latent.h"
#include "ranks.h"

namespace baton {

// The hosts of the other ranks of this one's stage, and of those of the next stage.
Hosts stage_hosts(const Ranks& ranks);
Hosts next_hosts(const Ranks& ranks);
// The lead's host, where this isn't it.
Hosts lead_host(const Ranks& ranks);

// The plan's numbers and `bytes` of its arrays, to all hosts.
void show_plan(Ranks& ranks, int64_t bytes);
// What the rank's own heads of these items' rows have in a layer: to the lead, and by rows or where stages cross to all hosts.
void show_kv(Ranks& ranks, const PagedKv& kv, const AttentionItem* items, int32_t count);
// The latents of these items' rows in a layer, which every rank of a stage keeps: to the lead.
void show_latents(Ranks& ranks, const LatentAttention& op, const char* pages, int64_t page_bytes, const AttentionItem* items, int32_t count);
// `count` rows of `width` floats from `base` on, by their numbers, which rise.
template <class Number>  // int32_t or int64_t
void show_rows(Ranks& ranks, Hosts to, const float* base, const Number* rows, int64_t count, int64_t width);
// The rank's part of a sampled row's logits, to the lead.
void show_logits(Ranks& ranks, int64_t place);
// What the rank wrote of the items' recurrent states, to the lead.
void show_own_states(Ranks& ranks, int64_t items);
// What went to experts on this host since the last time, to the lead.
void show_expert_rows(Ranks& ranks);

}  // namespace baton
