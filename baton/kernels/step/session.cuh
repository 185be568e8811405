// A model's steps on a device: pages, plan and registers in its memory, a captured graph per batch bucket. Knows nothing of
// sequences, and which pages hold what only as it is told (engine/cuda_runner.py).
//
//   ahead    the step that comes next is uploaded while the one before it may run, and some rows take the tokens that this one
//            chooses. Two steps at most are under way: from an upload to the fetch of its results
//   branches what branches of drafts begin with in the step that comes next; not asked of a step without any
//   upload   a step of the host's addresses -> the device's plan, in one copy; without rows that have an adapter, the step is
//            the program without places for any
//   run      its launches one by one, or as a graph: a bucket runs plainly first (workspaces grow then), is captured the
//            second time, and replayed from then on
//            AT_ONCE: one launch does all ops of up to 8 rows but the head
//   fetch    tokens and asked-for logits back to the host; waits. In two halves, begin_fetch and end_fetch, which waits for
//            that step alone, the oldest whose fetch was begun
//
// The host's pages stay what everybody else reads and writes: `admit` brings pages to the device, and a step's last
// launch writes the rows that it appended back (`publish`). Those of a prompt's chunk go back layer by layer, on a stream of their
// own, while the layers behind are computed. One of several ranks (card_rank.h) has its own heads alone on the device.
// A session `on_demand` writes nothing back: `fetch_pages` copies what the caller names, and the host's memory isn't pinned.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "adapted.cuh"
#include "at_once.cuh"
#include "card_rank.h"
#include "feed.cuh"
#include "own_heads.cuh"
#include "staging.cuh"

namespace baton {

enum How : int32_t { PLAIN = 0, BY_GRAPH = 1, AT_ONCE = 2 };
constexpr int32_t MOST_GRAPH_ROWS = 256;
constexpr size_t MOST_GRAPHS = 256, WORD_BYTES = 4096;
constexpr uint32_t MOST_UNDER_WAY = 2;

struct Counts {
  int64_t plain, captured, replayed, admitted, at_once;
};

class Session {
 public:
  Session(const Model& model, int64_t vocab) : program_(model), vocab_(vocab) {
    for (int32_t i = 0; i < model.registers; i++) row_floats_ += model.widths[i];
    model_ = program_.of(0);
  }

  ~Session() {
    settle();
    forget();
    unpin();
    if (word_) host_unregister(word_);
    event_release(appended_), event_release(published_);
    for (Fetched& each : fetched_) event_release(each.done);
    if (side_) side_stream_release(side_);
    if (stream_) stream_release(stream_);
  }

  int open() {
    if (const int wrong = stream_create(&stream_)) return wrong;
    if (const int wrong = event_create(&appended_)) return wrong;
    if (const int wrong = event_create(&published_)) return wrong;
    for (Fetched& each : fetched_)
      if (const int wrong = event_create(&each.done)) return wrong;
    return side_stream_create(&side_);
  }

  // One of several ranks, from here on and before `bind`. `lost`: the host's word for who is lost, on a page of its own.
  int join(const CardRank& rank, uint32_t* lost) {
    void* seen = nullptr;
    if (const int wrong = host_register(lost, WORD_BYTES, &seen)) return wrong;
    word_ = lost, rank_ = rank, ranked_ = true;
    return rank_.exchange.lost = static_cast<const volatile uint32_t*>(seen), 0;
  }

  // From the next `bind` on. Not of one of several ranks.
  int on_demand() { return demand_ = true, 0; }

  // The host's pages; as many on the device, at `shared` where the caller has device memory for them.
  int bind(char* host, int64_t pages, int64_t page_bytes, char* shared) {
    unpin();
    forget();
    void* seen = nullptr;
    if (const int wrong = demand_ ? 0 : host_register(host, size_t(pages * page_bytes), &seen)) return wrong;
    host_ = host, seen_ = static_cast<char*>(seen), page_bytes_ = page_bytes;
    if (const int wrong = shared ? 0 : take_pages(size_t(pages * own(page_bytes)))) return wrong;
    return device_ = shared ? shared : static_cast<char*>(pages_.at), 0;
  }

  int admit(const int32_t* pages, int64_t count) {
    if (ranked_) return admit_heads(pages, count);
    counts.admitted += count;
    return copy_pages(device_, host_, pages, count);
  }

  // The device's pages -> the host's; waits.
  int fetch_pages(const int32_t* pages, int64_t count) {
    const int wrong = copy_pages(host_, device_, pages, count), bad = stream_wait(stream_);
    return wrong ? wrong : bad;
  }

  // cos and sin by position; the old table may be in use until the stream has got there.
  int angles(const float* host, int64_t bytes) {
    if (const int wrong = stream_wait(stream_)) return wrong;
    if (const int wrong = reach(angles_, size_t(bytes))) return wrong;
    return copy(angles_.at, host, size_t(bytes), stream_);
  }

  // From here on, sequences that begin with the same `least` tokens or more read their pages once; 0: each for itself.
  int share(int32_t least) { return least_ = least, 0; }

  // Of the next step that is uploaded, and of no other.
  int branches(const SlotCopy* copies, int32_t count) { return copies_.assign(copies, copies + count), 0; }

  // Of the next step that is uploaded, and of no other: row i takes the token of choice from[i] of the step before, or its own
  // where that is negative.
  int ahead(const int32_t* from, int32_t rows) { return ahead_ = true, fed_.assign(from, from + rows), 0; }

  int upload(const Step& given, int32_t how) {
#if defined(BATON_MUTATION_CUDA_STEP_BRANCH_KEPT)
    const std::vector<SlotCopy> copies = copies_;
#else
    std::vector<SlotCopy> copies;
    copies.swap(copies_);
#endif
    std::vector<int32_t> fed;
    fed.swap(fed_);
    // A step that failed may still read the plan; one that runs does until its fetch has ended.
    if (const int wrong = std::exchange(ahead_, false) ? 0 : settle()) return wrong;
    if (const int wrong = fed.empty() ? 0 : set_aside()) return wrong;
    Step host = given;
    group(host);
    const bool small = how != PLAIN && host.rows <= MOST_GRAPH_ROWS;
    sizes_.rows = small ? bucket(int32_t(host.rows)) : int32_t(host.rows);
    sizes_.items = small ? bucket(host.item_count) : host.item_count;
    sizes_.sampled = small ? bucket(host.sampled_count) : host.sampled_count;
    sizes_.groups = small ? bucket(host.group_count) : host.group_count;
    const LoraStep* adapters = program_.adapters();
    const LoraStep* heads = program_.heads();
    const int32_t beside = adapters ? int32_t(adapters->count) : 0, at_head = heads ? int32_t(heads->count) : 0;
    sizes_.adapters = small ? bucket(beside) : beside;
    sizes_.heads = small ? bucket(at_head) : at_head;
    sizes_.copies = copies_bucket(int32_t(copies.size()));
    model_ = program_.of(beside);
    graphed_ = small;
    if (how != how_) forget();
    how_ = how, at_once_ = how == AT_ONCE && sizes_.rows <= MEGA_ROWS && sizes_.items <= MEGA_ROWS && !sizes_.groups && !sizes_.adapters;
    if (const int wrong = at_once_ ? all_.describe(model_, host.kv_type, stream_) : 0) return wrong;
    int64_t loud = 0;
    for (int32_t i = 0; i < host.sampled_count; i++) loud += host.choices[i].logits != nullptr;
    bool anywhere = false;
    if (const int wrong = grow(logits_, size_t(loud * vocab_) * 4, anywhere)) return wrong;
    if (const int wrong = reach(arena_, size_t(sizes_.rows * row_floats_) * 4)) return wrong;
    const int64_t tiles = beside ? lora_tiles(sizes_.adapters, sizes_.rows) : 0;
    const int64_t head_tiles = at_head ? lora_tiles(sizes_.heads, sizes_.sampled) : 0;
    if (const int wrong = reach(sums_, size_t((tiles > head_tiles ? tiles : head_tiles) * LORA_TILE * LORA_SUMS) * 4)) return wrong;
    if (const int wrong = reach(beside_, size_t(at_head ? sizes_.sampled * vocab_ : 0) * 4)) return wrong;
    step_ = host;
    sizes_.divided = sizes_.rows > MOST_GRAPH_ROWS && has_prompt_form(host.kv_type, model_.head_dim) && has_long(host);
    bool moved = false;
    float* logits = static_cast<float*>(logits_.at);
    if (const int wrong = staging_.lacks(host, sizes_, vocab_, fed.size()) ? settle() : 0) return wrong;
    if (const int wrong = staging_.upload(host, copies, fed, adapters, heads, sizes_, vocab_, logits, stream_, step_, moved)) return wrong;
    if (moved) forget();
    step_.page_bytes = own(host.page_bytes), step_.layer_bytes = own(host.layer_bytes);
    step_.angles = static_cast<const float*>(angles_.at);
    step_.pages = device_, step_.arena = static_cast<float*>(arena_.at);
    return fed.empty() ? 0 : feed_rows(int32_t(fed.size()));
  }

  // Ops are numbered as the caller's program has them, the adapters' among them.
  int run(int32_t from, int32_t to, bool last) {
    from = program_.number(from, sizes_.adapters), to = program_.number(to, sizes_.adapters);
    counts.at_once += is_whole(from, to);
    if (!graphed_ || from || !last) return counts.plain++, launches(from, to, last);
    if (buckets_.size() >= MOST_GRAPHS && !buckets_.count(sizes_)) forget();
    Bucket& mine = buckets_[sizes_];
    if (!mine.seen) return mine.seen = true, counts.plain++, launches(from, to, last);
    if (!mine.graph) {
      if (const int wrong = capture_begin(stream_)) return wrong;
      const int bad = launches(from, to, last);
      if (const int wrong = capture_end(stream_, bad, &mine.graph)) return wrong;
      counts.captured++;
    }
    counts.replayed++;
    return graph_launch(mine.graph, stream_);
  }

  int begin_fetch(const Choice* choices, int32_t count) {
    if (begun_ - ended_ >= MOST_UNDER_WAY) return int(cudaErrorInvalidValue);
    Fetched& mine = fetched_[begun_ % MOST_UNDER_WAY];
    const size_t tokens = size_t(count) * sizeof(Choice), rows = logits_of(choices, count);
    if (const int wrong = mine.room.reach(tokens + rows)) return wrong;
    if (count)
      if (const int wrong = copy(mine.room.at, step_.choices, tokens, stream_)) return wrong;
    if (rows)
      if (const int wrong = copy(mine.room.at + tokens, logits_.at, rows, stream_)) return wrong;
    if (const int wrong = event_record(mine.done, stream_)) return wrong;
    return begun_++, 0;
  }

  // Of the oldest that was begun, with the choices that it was begun with.
  int end_fetch(Choice* choices, int32_t count) {
    if (begun_ == ended_) return int(cudaErrorInvalidValue);
    const Fetched& mine = fetched_[ended_++ % MOST_UNDER_WAY];
    if (const int wrong = event_wait(mine.done)) return wrong;
    const char* logits = mine.room.at + size_t(count) * sizeof(Choice);
    const size_t row = size_t(vocab_) * 4;
    for (int32_t i = 0; i < count; i++) {
      choices[i].token = reinterpret_cast<const Choice*>(mine.room.at)[i].token;
      if (choices[i].logits) std::memcpy(choices[i].logits, logits, row), logits += row;
    }
    return 0;
  }

  int fetch(Choice* choices, int32_t count) {
    const int wrong = begin_fetch(choices, count);
    return wrong ? wrong : end_fetch(choices, count);
  }

  int wait() { return stream_wait(stream_); }

  // Rows first … first + count - 1 of a register of the last step.
  int read(int32_t reg, int64_t first, int64_t count, float* to) {
    int64_t before = 0;
    for (int32_t i = 0; i < reg; i++) before += model_.widths[i];
    const float* from = step_.arena + before * step_.rows + first * model_.widths[reg];
    if (const int wrong = copy(to, from, size_t(count * model_.widths[reg]) * 4, stream_)) return wrong;
    return stream_wait(stream_);
  }

  Counts counts{};

 private:
  struct Bucket {
    bool seen = false;
    Graph graph = {};
  };

  struct Fetched {
    Pinned room;  // choices, behind them logits
    Event done{};
  };

  size_t logits_of(const Choice* choices, int32_t count) const {
    size_t bytes = 0;
    for (int32_t i = 0; i < count; i++) bytes += choices[i].logits ? size_t(vocab_) * 4 : 0;
    return bytes;
  }

  // What the step before chose, out of the way of the next plan.
  int set_aside() {
    const size_t bytes = size_t(step_.sampled_count) * sizeof(Choice);
    bool moved = false;  // no graph has them
    if (const int wrong = grow(before_, bytes, moved)) return wrong;
    return copy(before_.at, step_.choices, bytes, stream_);
  }

  int feed_rows(int32_t rows) {
    const dim3 grid = dim3(unsigned((rows + FEED_THREADS - 1) / FEED_THREADS));
    return BATON_LAUNCH(feed, grid, dim3(FEED_THREADS), 0, stream_, static_cast<const Choice*>(before_.at), staging_.fed(), rows,
                        const_cast<int32_t*>(step_.tokens));
  }

  // What cascade attention has no form for is attended flat.
  void group(Step& host) {
    groups_.clear();
    const bool known = host.kv_type != KV_F32 && model_.head_dim % 16 == 0 && model_.head_dim <= 256;
    if (least_ > 0 && known && host.rows <= MOST_SHARING && host.item_count <= MOST_SHARING)
      find_groups(host.items, host.item_count, least_, groups_);
    host.groups = groups_.data(), host.group_count = int32_t(groups_.size());
  }

  // Pages in a row go in one copy.
  int copy_pages(char* to, const char* from, const int32_t* pages, int64_t count) const {
    for (int64_t i = 0, run = 1; i < count; i += run, run = 1) {
#if defined(BATON_MUTATION_CUDA_STEP_PAGE_RUNS)
      while (i + run < count && pages[i + run] > pages[i]) run++;
#else
      while (i + run < count && pages[i + run] == pages[i] + run) run++;
#endif
      const int64_t at = pages[i] * page_bytes_;
      if (const int wrong = copy(to + at, from + at, size_t(run * page_bytes_), stream_)) return wrong;
    }
    return 0;
  }

  void unpin() {
    if (seen_) host_unregister(host_);
    host_ = seen_ = nullptr;
  }

  static bool has_long(const Step& host) {
    for (int32_t i = 0; i < host.item_count; i++)
      if (host.items[i].queries >= PROMPT_QUERIES) return true;
    return false;
  }

  // As many bytes and no more: the caller has given them all that the card has to spare, and they don't grow.
  int take_pages(size_t bytes) {
    if (bytes <= pages_.bytes) return 0;
    device_release(pages_.at);
    pages_.at = nullptr, pages_.bytes = 0;
    const int wrong = device_allocate(&pages_.at, bytes);
    if (!wrong) pages_.bytes = bytes;
    return wrong;
  }

  // A step that runs may still use what lies there now.
  int grow(Room& room, size_t bytes, bool& moved) {
    if (const int wrong = bytes > room.bytes ? settle() : 0) return wrong;
    return room.reach(bytes, moved);
  }

  int reach(Room& room, size_t bytes) {
    bool moved = false;
    const int wrong = grow(room, bytes, moved);
    if (moved) forget();
    return wrong;
  }

  // Captured launches hold addresses: after a move they are captured anew. None may still run.
  void forget() {
    if (!buckets_.empty()) settle();
    for (auto& [sizes, bucket] : buckets_)
      if (bucket.graph) graph_release(bucket.graph);
    buckets_.clear();
  }

  int settle() {
    const int wrong = stream_wait(stream_);
    const int bad = side_ ? side_stream_wait(side_) : 0;
    return wrong ? wrong : bad;
  }

  bool is_whole(int32_t from, int32_t to) const { return at_once_ && !from && model_.ops[to - 1].kind == OP_LM_HEAD; }

  int launches(int32_t from, int32_t to, bool last) {
    if (is_whole(from, to)) {
      if (const int wrong = all_.run(model_, step_, branched(), stream_)) return wrong;
      from = to - 1;
    }
    if (last && seen_ && !from && sizes_.rows > MOST_GRAPH_ROWS) return layer_by_layer(to);
    if (const int wrong = run_ops(model_, step_, adapters(), branched(), staging_.few(), rank(), from, to, stream_, [](int32_t) { return 0; })) return wrong;
    return last && seen_ ? write_back(0, int32_t(step_.page_bytes / step_.layer_bytes), stream_) : 0;
  }

  int layer_by_layer(int32_t to) {
    const int wrong = run_ops(model_, step_, adapters(), branched(), staging_.few(), rank(), 0, to, stream_, [&](int32_t layer) {
      if (const int bad = event_record(appended_, stream_)) return bad;
#if !defined(BATON_MUTATION_CUDA_STEP_FORK)
      if (const int bad = stream_wait_event(side_, appended_)) return bad;
#endif
      return write_back(layer, 1, side_);
    });
    if (wrong) return wrong;
    if (const int bad = event_record(published_, side_)) return bad;
#if defined(BATON_MUTATION_CUDA_STEP_JOIN)
    return 0;
#else
    return stream_wait_event(stream_, published_);
#endif
  }

  Adapters adapters() const {
    return {staging_.adapters(), sizes_.adapters, static_cast<float*>(sums_.at),
            staging_.heads(),    sizes_.heads,    static_cast<float*>(beside_.at)};
  }

  Branches branched() const { return {staging_.copies(), sizes_.copies}; }

  const CardRank* rank() const { return ranked_ ? &rank_ : nullptr; }

  // Of a page's bytes those of the rank's heads: all that is in a page, scales too, is by heads.
  int64_t own(int64_t bytes) const { return ranked_ ? bytes * model_.kv_heads / rank_.kv_heads : bytes; }

  static int32_t element_of(int32_t kv_type) { return kv_type == KV_F32 ? 4 : kv_type == KV_BF16 ? 2 : 1; }

  // The rank's heads of `heads` that lie in pages at `at`, from layer `layer` on.
  HeadRows heads_in(char* at, int64_t page_bytes, int32_t layer, int32_t heads, int32_t first) const {
    const int64_t layer_bytes = page_bytes / rank_.layers;
    const int32_t element = element_of(rank_.kv_type), head = model_.head_dim * element, scale = element == 1 ? 4 : 0;
#if defined(BATON_MUTATION_CUDA_STEP_FIRST_HEAD)
    first = 0;
#endif
    return {at + layer * layer_bytes, page_bytes, layer_bytes / 2, heads * head, first * head, heads * scale, first * scale};
  }
  HeadRows on_host(int32_t layer) const { return heads_in(seen_, page_bytes_, layer, rank_.kv_heads, rank_.first_kv); }
  HeadRows on_device(int32_t layer) const { return heads_in(device_, own(page_bytes_), layer, model_.kv_heads, 0); }

  int move_heads(const HeadRows& to, const HeadRows& from, int32_t layers, const int32_t* slots, int64_t rows, void* stream) const {
    const dim3 grid = dim3(unsigned(HEADS_PER_DEVICE * processors())), block = dim3(HEADS_THREADS);
    const int32_t element = element_of(rank_.kv_type), bytes = model_.kv_heads * model_.head_dim * element;
    const int32_t scales = element == 1 ? model_.kv_heads * 4 : 0, planes = 2 * layers, count = int32_t(rows);
    if (stream == side_) return BATON_LAUNCH(copy_heads, grid, block, 0, stream, to, from, planes, bytes, scales, slots, count);
    return BATON_LAUNCH_PDL(copy_heads, grid, block, 0, stream, to, from, planes, bytes, scales, slots, count);
  }

  int admit_heads(const int32_t* pages, int64_t count) {
    admitted_.clear();
    for (int64_t i = 0; i < count * PAGE; i++) admitted_.push_back(pages[i / PAGE] * PAGE + int32_t(i % PAGE));
    if (const int wrong = stream_wait(stream_)) return wrong;  // a launch that failed may still read the last ones
    bool moved = false;  // no graph has them
    if (const int wrong = slots_.reach(admitted_.size() * 4, moved)) return wrong;
    if (const int wrong = copy(slots_.at, admitted_.data(), admitted_.size() * 4, stream_)) return wrong;
    counts.admitted += count;
    return move_heads(on_device(0), on_host(0), rank_.layers, static_cast<const int32_t*>(slots_.at), count * PAGE, stream_);
  }

  // What `count` layers from `layer` on have appended, and what their branches begin with.
  int write_back(int32_t layer, int32_t count, void* stream) const {
    const int32_t rows = sizes_.rows + sizes_.copies;
    if (ranked_) return move_heads(on_host(layer), on_device(layer), count, staging_.slots(), rows, stream);
    const int32_t element = element_of(step_.kv_type);
    const int64_t at = layer * step_.layer_bytes;
    Mirror m{step_.pages + at, seen_ + at, step_.page_bytes, step_.layer_bytes / 2, 2 * count, 0, 0};
    m.row_bytes = model_.kv_heads * model_.head_dim * element, m.scale_bytes = element == 1 ? model_.kv_heads * 4 : 0;
    const dim3 grid = dim3(unsigned(PUBLISH_PER_DEVICE * processors()));
    if (stream == side_) return BATON_LAUNCH(publish, grid, dim3(PUBLISH_THREADS), 0, stream, m, staging_.slots(), rows);
    return BATON_LAUNCH_PDL(publish, grid, dim3(PUBLISH_THREADS), 0, stream, m, staging_.slots(), rows);
  }

  const AdaptedProgram program_;
  Model model_;  // as the present step runs it
  const int64_t vocab_;
  int64_t row_floats_ = 0, page_bytes_ = 0;
  char *host_ = nullptr, *seen_ = nullptr, *device_ = nullptr;
  void *stream_ = nullptr, *side_ = nullptr;
  Event appended_{}, published_{};
  Room pages_, arena_, angles_, logits_, sums_, beside_, slots_, before_;
  Staging staging_;
  Step step_{};
  Sizes sizes_;
  AtOnce all_;
  int32_t how_ = PLAIN;
  bool graphed_ = false, at_once_ = false, ranked_ = false, demand_ = false;
  CardRank rank_{};
  uint32_t* word_ = nullptr;  // the host's, registered
  std::vector<int32_t> admitted_;
  int32_t least_ = 0;
  std::vector<PrefixGroup> groups_;
  std::vector<SlotCopy> copies_;
  bool ahead_ = false;
  std::vector<int32_t> fed_;
  std::map<Sizes, Bucket> buckets_;
  Fetched fetched_[MOST_UNDER_WAY];
  uint32_t begun_ = 0, ended_ = 0;  // fetches
};

}  // namespace baton

// Each returns 0 or what baton_device_error puts into words. One thread at a time.
BATON_API int baton_session_open(const baton::Model* model, int64_t vocab, void** session) {
  auto* made = new baton::Session(*model, vocab);
  if (const int wrong = made->open()) return delete made, wrong;
  return *session = made, 0;
}
BATON_API int baton_session_close(void* session) { return delete static_cast<baton::Session*>(session), 0; }
BATON_API int baton_session_join(void* session, const baton::CardRank* rank, uint32_t* lost) {
  return static_cast<baton::Session*>(session)->join(*rank, lost);
}
BATON_API int baton_session_on_demand(void* session) { return static_cast<baton::Session*>(session)->on_demand(); }
BATON_API int baton_session_bind(void* session, char* host, int64_t pages, int64_t page_bytes, char* shared) {
  return static_cast<baton::Session*>(session)->bind(host, pages, page_bytes, shared);
}
BATON_API int baton_session_admit(void* session, const int32_t* pages, int64_t count) {
  return static_cast<baton::Session*>(session)->admit(pages, count);
}
BATON_API int baton_session_fetch_pages(void* session, const int32_t* pages, int64_t count) {
  return static_cast<baton::Session*>(session)->fetch_pages(pages, count);
}
BATON_API int baton_session_angles(void* session, const float* host, int64_t bytes) {
  return static_cast<baton::Session*>(session)->angles(host, bytes);
}
BATON_API int baton_session_share(void* session, int32_t least) { return static_cast<baton::Session*>(session)->share(least); }
BATON_API int baton_session_branches(void* session, const baton::SlotCopy* copies, int32_t count) {
  return static_cast<baton::Session*>(session)->branches(copies, count);
}
BATON_API int baton_session_ahead(void* session, const int32_t* from, int32_t rows) {
  return static_cast<baton::Session*>(session)->ahead(from, rows);
}
BATON_API int baton_session_upload(void* session, const baton::Step* step, int32_t how) {
  return static_cast<baton::Session*>(session)->upload(*step, how);
}
BATON_API int baton_session_run(void* session, int32_t from, int32_t to, int32_t last) {
  return static_cast<baton::Session*>(session)->run(from, to, last);
}
BATON_API int baton_session_fetch(void* session, baton::Choice* choices, int32_t count) {
  return static_cast<baton::Session*>(session)->fetch(choices, count);
}
BATON_API int baton_session_begin_fetch(void* session, const baton::Choice* choices, int32_t count) {
  return static_cast<baton::Session*>(session)->begin_fetch(choices, count);
}
BATON_API int baton_session_end_fetch(void* session, baton::Choice* choices, int32_t count) {
  return static_cast<baton::Session*>(session)->end_fetch(choices, count);
}
BATON_API int baton_session_read(void* session, int32_t reg, int64_t first, int64_t count, float* to) {
  return static_cast<baton::Session*>(session)->read(reg, first, count, to);
}
BATON_API int baton_session_wait(void* session) { return static_cast<baton::Session*>(session)->wait(); }
BATON_API int baton_session_counts(void* session, baton::Counts* counts) {
  return *counts = static_cast<baton::Session*>(session)->counts, 0;
}

// Device memory for what the host keeps there: weights.
BATON_API int baton_device_allocate(int64_t bytes, void** at) { return baton::device_allocate(at, size_t(bytes)); }
BATON_API int baton_device_release(void* at) { return baton::device_release(at); }
BATON_API int baton_device_copy(void* to, const void* from, int64_t bytes) {
  const int wrong = baton::copy(to, from, size_t(bytes), nullptr);
  return wrong ? wrong : baton::stream_wait(nullptr);
}
BATON_API int baton_device_wait(void* stream) { return baton::stream_wait(stream); }
// Of launches from here on: graphs that are captured keep what they have.
BATON_API int baton_device_programmatic(int on) { return baton::programmatic_launches = on, 0; }
BATON_API int baton_device_pageable(int* yes) { return baton::pageable(yes); }
BATON_API int baton_device_register(void* at, int64_t bytes) {
  void* seen = nullptr;
  return baton::host_register(at, size_t(bytes), &seen);
}
BATON_API int baton_device_unregister(void* at) { return baton::host_unregister(at); }
BATON_API const char* baton_device_error(int status) { return baton::error_text(status); }
