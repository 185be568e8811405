// Messages of a head and its bytes. Whoever reads checks every place against the memory's size.
#include "links.h"

#include <errno.h>
#include <sys/socket.h>

#include <algorithm>
#include <vector>

namespace baton {
namespace {

constexpr int64_t MOST_QUEUED = 1 << 20;  // bytes, beyond which they are sent at once
constexpr int64_t READ_AT_ONCE = 1 << 18;

enum LinkKind : int32_t { LINK_WRITE, LINK_RAISE, LINK_STORE, LINK_ADD };

struct LinkHead {
  int32_t kind, region;
  int64_t at;      // bytes from the region's begin
  int64_t rows;    // of a write; else the value
  int64_t bytes, stride;
};

using Queue = std::vector<char>;

Queue* queues(Links& links) {
  if (!links.queues) links.queues = new Queue[MOST_HOSTS];
  return (Queue*)links.queues;
}

void lose_host(Group& g, int32_t host, bool stuck) {
  int32_t rank = 0;
  while (g.links->host_of[rank] != host) rank++;
  declare(*g.meeting, uint32_t(rank + 1) | (stuck ? uint32_t(RANK_STUCK) : 0));
}

// Sends bytes to a host. The socket's own limit of time says when the other side is stuck: a message may then have gone out in part,
// so the connection ends, lest the reader take the next message's bytes for the rest of this one.
void send_now(Group& g, int32_t host, const char* from, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t sent = send(g.links->fds[host], from + at, bytes - at, MSG_NOSIGNAL);
    if (sent > 0) at += size_t(sent);
    else if (errno != EINTR) {
      lose_host(g, host, errno == EAGAIN || errno == EWOULDBLOCK);
      shutdown(g.links->fds[host], SHUT_RDWR);
      break;
    }
  }
}

// Sends what waits for a host.
void send_all(Group& g, int32_t host) {
  Queue& queue = queues(*g.links)[host];
  send_now(g, host, queue.data(), queue.size());
  queue.clear();
}

template <class F>
void for_each_host(Hosts hosts, F&& f) {
  for (int32_t host = 0; host < MOST_HOSTS; host++)
    if (hosts >> host & 1) f(host);
}

void put(Queue& queue, const void* from, size_t bytes) { queue.insert(queue.end(), (const char*)from, (const char*)from + bytes); }

// Passes bytes of a message on: a few with the next ones, many straight from where they lie, so that a queue has MOST_QUEUED bytes.
void pass(Group& g, int32_t host, const char* from, int64_t bytes) {
  Queue& queue = queues(*g.links)[host];
  if (int64_t(queue.size()) + bytes > MOST_QUEUED) send_all(g, host);
  if (bytes > MOST_QUEUED) send_now(g, host, from, size_t(bytes));
  else put(queue, from, size_t(bytes));
}

void put_value(Group& g, Hosts to, LinkKind kind, const void* word, int64_t value) {
  const LinkHead head{kind, LINK_RANKS, (const char*)word - g.links->memory, value, 0, 0};
  for_each_host(to, [&](int32_t host) { put(queues(*g.links)[host], &head, sizeof head); });
}

// A connection's bytes, read ahead.
class Source {
 public:
  explicit Source(int32_t fd) : fd_(fd), ahead_(READ_AT_ONCE) {}

  bool read(void* to, int64_t bytes) {
    for (char* at = (char*)to; bytes;) {
      const int64_t here = std::min(bytes, end_ - begin_);
      std::memcpy(at, ahead_.data() + begin_, size_t(here));
      at += here, begin_ += here, bytes -= here;
      if (bytes && !(bytes >= READ_AT_ONCE ? straight(at, bytes) : refill())) return false;
    }
    return true;
  }

 private:
  bool straight(char*& at, int64_t& bytes) {
    const int64_t got = receive(at, bytes);
    at += got, bytes -= got;
    return got > 0;
  }

  bool refill() {
    begin_ = 0, end_ = receive(ahead_.data(), READ_AT_ONCE);
    return end_ > 0;
  }

  int64_t receive(char* to, int64_t most) {
    for (;;) {
      const ssize_t got = recv(fd_, to, size_t(most), 0);
      if (got >= 0 || errno != EINTR) return got > 0 ? got : 0;
    }
  }

  int32_t fd_;
  int64_t begin_ = 0, end_ = 0;
  std::vector<char> ahead_;
};

struct Reach {
  char* memory;
  int64_t bytes;

  bool holds(int64_t at, int64_t size) const { return at >= 0 && size >= 0 && at <= bytes && size <= bytes - at; }
};

// Whether a write lies within its region; numbers are bounded before they are multiplied.
bool is_sound(const LinkHead& h, const Reach& reach) {
  const auto fits = [&](int64_t value) { return value >= 0 && value <= reach.bytes; };
  if (!fits(h.rows) || !fits(h.bytes) || !fits(h.stride) || h.bytes > h.stride) return false;
  if (h.rows == 0 || h.stride == 0) return true;
  return h.rows - 1 <= reach.bytes / h.stride && reach.holds(h.at, (h.rows - 1) * h.stride + h.bytes);
}

bool take_write(const LinkHead& h, const Reach& reach, Source& source) {
  char* to = reach.memory + h.at;
  if (h.stride == h.bytes) return source.read(to, h.rows * h.bytes);
  for (int64_t row = 0; row < h.rows; row++)
    if (!source.read(to + row * h.stride, h.bytes)) return false;
  return true;
}

// Whether `at` is a place for a number of `size` bytes with room behind it.
bool is_word(const LinkHead& h, const Reach& reach, int64_t size) { return h.at % size == 0 && reach.holds(h.at, 8); }

bool take_value(const LinkHead& h, const Reach& reach) {
  char* at = reach.memory + h.at;
  if (h.kind == LINK_ADD) {
    if (!is_word(h, reach, 8)) return false;
    ((std::atomic<int64_t>*)at)->fetch_add(h.rows, std::memory_order_relaxed);
    return true;
  }
  if (!is_word(h, reach, 4)) return false;
  std::atomic<uint32_t>* word = (std::atomic<uint32_t>*)at;
  word->store(uint32_t(h.rows), std::memory_order_seq_cst);
  if (h.kind == LINK_RAISE && word[1].load(std::memory_order_seq_cst)) wake_all(*word);
  return true;
}

}  // namespace

Hosts hosts_of(const Group& g, int32_t first, int32_t count) {
  Hosts found = 0;
  if (!g.links) return 0;
  for (int32_t rank = first; rank < first + count; rank++) found |= Hosts(1) << g.links->host_of[rank];
  return found & ~(Hosts(1) << g.links->host);
}

void write_elsewhere(Group& g, Hosts to, LinkRegion region, const void* from, int64_t rows, int64_t bytes, int64_t stride) {
  if (!to || rows <= 0 || bytes <= 0) return;
  if (rows == 1) stride = bytes;
  const char* base = region == LINK_PAGES ? g.links->pages : g.links->memory;
  const LinkHead head{LINK_WRITE, region, (const char*)from - base, rows, bytes, stride};
  for_each_host(to, [&](int32_t host) {
    pass(g, host, (const char*)&head, sizeof head);
    if (stride == bytes) pass(g, host, (const char*)from, rows * bytes);
    else
      for (int64_t row = 0; row < rows; row++) pass(g, host, (const char*)from + row * stride, bytes);
  });
}

void raise_elsewhere(Group& g, Hosts to, const std::atomic<uint32_t>& word, uint32_t value) {
  if (!to) return;
  put_value(g, to, LINK_RAISE, &word, value);
  for_each_host(to, [&](int32_t host) { send_all(g, host); });
}

void store_elsewhere(Group& g, Hosts to, const std::atomic<int32_t>& word, int32_t value) {
  if (!to) return;
  put_value(g, to, LINK_STORE, &word, value);
  for_each_host(to, [&](int32_t host) { send_all(g, host); });
}

void add_elsewhere(Group& g, Hosts to, const std::atomic<int64_t>& number, int64_t value) {
  if (to) put_value(g, to, LINK_ADD, &number, value);
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_links_receive(int32_t fd, char* memory, int64_t memory_bytes, char* pages, int64_t page_bytes, int32_t rank) {
  const Reach reaches[] = {{memory, memory_bytes}, {pages, page_bytes}};
  Source source(fd);
  int32_t wrong = 0;
  for (LinkHead head; !wrong && source.read(&head, sizeof head);) {
    const bool known = head.kind >= LINK_WRITE && head.kind <= LINK_ADD && (head.region == LINK_RANKS || head.region == LINK_PAGES);
    const Reach& reach = reaches[known && head.region == LINK_PAGES];
    if (!known || (head.kind == LINK_WRITE ? !is_sound(head, reach) : !take_value(head, reaches[LINK_RANKS]))) wrong = 1;
    else if (head.kind == LINK_WRITE && !take_write(head, reach, source)) break;
  }
  declare(*(Meeting*)memory, uint32_t(rank + 1));
  return wrong;
}

BATON_API void baton_links_close(Links* links) {
  delete[] (Queue*)links->queues;
  links->queues = nullptr;
}
