// How ranks write into the memory of ranks on other hosts, by TCP. Knows nothing of models, or of who dials whom.
//
// Every host has memory of the same layout. What a rank has written where ranks of its own host read it, it writes at the same
// place of another host's memory, and then raises the same word there that it raised here: a connection keeps the order, so whoever
// sees the word sees the bytes. Each rank has a connection of its own to each other host, which a thread over there reads. Writes
// wait in a queue until a word is raised.
//
// A connection that breaks is a rank that is lost: its reader says so in the host's page, and who can't write says so in its own.
#pragma once
#include "collective.h"

namespace baton {

constexpr int32_t MOST_HOSTS = 16;

enum LinkRegion : int32_t { LINK_RANKS, LINK_PAGES };

// One rank's connections. `memory`, `pages`: this host's, where places count from.
struct Links {
  const char *memory, *pages;
  const int32_t* host_of;   // per rank
  void* queues;             // what waits to be sent, by host; null at first
  int32_t fds[MOST_HOSTS];  // -1: the own host
  int32_t host, hosts;
};

using Hosts = uint32_t;  // a bit per host

// The hosts of `count` ranks from `first` on, without the own one; none where there are no links.
Hosts hosts_of(const Group& group, int32_t first, int32_t count);
// The hosts of all ranks, without the own one.
inline Hosts other_hosts(const Group& group) { return hosts_of(group, 0, group.count); }

// Has `rows` stretches of `bytes`, `stride` bytes apart from `from` on, written at their places on other hosts.
void write_elsewhere(Group& group, Hosts to, LinkRegion region, const void* from, int64_t rows, int64_t bytes, int64_t stride);
// Has `word` of the ranks' memory, behind which the number of its sleepers lies, come to `value` on other hosts after all that was
// written before.
void raise_elsewhere(Group& group, Hosts to, const std::atomic<uint32_t>& word, uint32_t value);
// Has a word that nobody sleeps on come to `value` on other hosts.
void store_elsewhere(Group& group, Hosts to, const std::atomic<int32_t>& word, int32_t value);
// Adds to a number on other hosts.
void add_elsewhere(Group& group, Hosts to, const std::atomic<int64_t>& number, int64_t value);

}  // namespace baton

// Reads what rank `rank` of another host writes from the connection `fd`, until it ends; that rank is lost then. Returns 0, or 1
// where something came that is no such write.
BATON_API int32_t baton_links_receive(int32_t fd, char* memory, int64_t memory_bytes, char* pages, int64_t page_bytes, int32_t rank);
// Frees what waits to be sent.
BATON_API void baton_links_close(baton::Links* links);
