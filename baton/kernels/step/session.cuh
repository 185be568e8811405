// A model's steps on a device: pages, plan and registers in its memory, a captured graph per batch bucket. Knows nothing of
// sequences, and which pages hold what only as it is told (engine/cuda_runner.py).
//
//   upload   a step of the host's addresses -> the device's plan, in one copy
//   run      its launches one by one, or as a graph: a bucket runs plainly first (workspaces grow then), is captured the
//            second time, and replayed from then on
//   fetch    tokens and asked-for logits back to the host; waits
//
// The host's pages stay what everybody else reads and writes: `admit` brings pages to the device, and a step's last
// launch writes the rows that it appended back (`publish`).
#pragma once
#include <map>
#include <vector>

#include "staging.cuh"

namespace baton {

enum How : int32_t { PLAIN = 0, BY_GRAPH = 1 };
constexpr int32_t MOST_GRAPH_ROWS = 256;
constexpr size_t MOST_GRAPHS = 256;

struct Counts {
  int64_t plain, captured, replayed, admitted;
};

class Session {
 public:
  Session(const Model& model, int64_t vocab) : model_(model), vocab_(vocab) {
    for (int32_t i = 0; i < model.registers; i++) row_floats_ += model.widths[i];
  }

  ~Session() {
    stream_wait(stream_);
    forget();
    if (host_) host_unregister(host_);
    if (stream_) stream_release(stream_);
  }

  int open() { return stream_create(&stream_); }

  // The host's pages; as many on the device.
  int bind(char* host, int64_t pages, int64_t page_bytes) {
    if (host_) host_unregister(host_), host_ = nullptr;
    forget();
    void* seen = nullptr;
    if (const int wrong = host_register(host, size_t(pages * page_bytes), &seen)) return wrong;
    host_ = host, seen_ = static_cast<char*>(seen), page_bytes_ = page_bytes;
    bool moved = false;
    return pages_.reach(size_t(pages * page_bytes), moved);
  }

  int admit(const int32_t* pages, int64_t count) {
    char* to = static_cast<char*>(pages_.at);
    for (int64_t i = 0, run = 1; i < count; i += run, run = 1) {
      while (i + run < count && pages[i + run] == pages[i] + run) run++;
      const int64_t at = pages[i] * page_bytes_;
      if (const int wrong = copy(to + at, host_ + at, size_t(run * page_bytes_), stream_)) return wrong;
      counts.admitted += run;
    }
    return 0;
  }

  // cos and sin by position; the old table may be in use until the stream has got there.
  int turns(const float* host, int64_t bytes) {
    if (const int wrong = stream_wait(stream_)) return wrong;
    if (const int wrong = reach(turns_, size_t(bytes))) return wrong;
    return copy(turns_.at, host, size_t(bytes), stream_);
  }

  int upload(const Step& host, int32_t how) {
    if (const int wrong = stream_wait(stream_)) return wrong;  // a step that failed may still read the plan
    const bool small = how == BY_GRAPH && host.rows <= MOST_GRAPH_ROWS;
    sizes_.rows = small ? bucket(int32_t(host.rows)) : int32_t(host.rows);
    sizes_.items = small ? bucket(host.item_count) : host.item_count;
    sizes_.sampled = small ? bucket(host.sampled_count) : host.sampled_count;
    graphed_ = small;
    int64_t loud = 0;
    for (int32_t i = 0; i < host.sampled_count; i++) loud += host.choices[i].logits != nullptr;
    bool anywhere = false;
    if (const int wrong = logits_.reach(size_t(loud * vocab_) * 4, anywhere)) return wrong;
    if (const int wrong = reach(arena_, size_t(sizes_.rows * row_floats_) * 4)) return wrong;
    step_ = host;
    bool moved = false;
    if (const int wrong = staging_.upload(host, sizes_, vocab_, static_cast<float*>(logits_.at), stream_, step_, moved)) return wrong;
    if (moved) forget();
    step_.turns = static_cast<const float*>(turns_.at);
    step_.pages = static_cast<char*>(pages_.at), step_.arena = static_cast<float*>(arena_.at);
    return 0;
  }

  int run(int32_t from, int32_t to, bool last) {
    if (!graphed_ || from || !last) return counts.plain++, launches(from, to, last);
    if (buckets_.size() >= MOST_GRAPHS && !buckets_.count(sizes_)) forget();
    Bucket& mine = buckets_[sizes_];
    if (!mine.seen) return mine.seen = true, counts.plain++, launches(from, to, last);
    if (!mine.graph) {
      if (const int wrong = capture_begin(stream_)) return wrong;
      const int bad = launches(from, to, last), wrong = capture_end(stream_, &mine.graph);
      if (bad || wrong) return bad ? bad : wrong;
      counts.captured++;
    }
    counts.replayed++;
    return graph_launch(mine.graph, stream_);
  }

  int fetch(Choice* choices, int32_t count) {
    const float* row = static_cast<const float*>(logits_.at);
    fetched_.resize(size_t(count));
    if (count)
      if (const int wrong = copy(fetched_.data(), step_.choices, size_t(count) * sizeof(Choice), stream_)) return wrong;
    for (int32_t i = 0; i < count; i++) {
      if (!choices[i].logits) continue;
      if (const int wrong = copy(choices[i].logits, row, size_t(vocab_) * 4, stream_)) return wrong;
      row += vocab_;
    }
    if (const int wrong = stream_wait(stream_)) return wrong;
    for (int32_t i = 0; i < count; i++) choices[i].token = fetched_[size_t(i)].token;
    return 0;
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

  int reach(Room& room, size_t bytes) {
    bool moved = false;
    const int wrong = room.reach(bytes, moved);
    if (moved) forget();
    return wrong;
  }

  // Captured launches hold addresses: after a move they are captured anew.
  void forget() {
    for (auto& [sizes, bucket] : buckets_)
      if (bucket.graph) graph_release(bucket.graph);
    buckets_.clear();
  }

  int launches(int32_t from, int32_t to, bool last) const {
    if (const int wrong = baton_step(&model_, &step_, from, to, stream_)) return wrong;
    return last ? write_back() : 0;
  }

  int write_back() const {
    const int32_t element = step_.kv_type == KV_F32 ? 4 : step_.kv_type == KV_BF16 ? 2 : 1;
    Mirror m{step_.pages, seen_, step_.page_bytes, step_.layer_bytes / 2, int32_t(2 * (step_.page_bytes / step_.layer_bytes)), 0, 0};
    m.row_bytes = model_.kv_heads * model_.head_dim * element, m.scale_bytes = element == 1 ? model_.kv_heads * 4 : 0;
    const dim3 grid = dim3(unsigned(PUBLISH_PER_DEVICE * processors()));
    return BATON_LAUNCH_PDL(publish, grid, dim3(PUBLISH_THREADS), 0, stream_, m, staging_.slots(), sizes_.rows);
  }

  const Model model_;
  const int64_t vocab_;
  int64_t row_floats_ = 0, page_bytes_ = 0;
  char *host_ = nullptr, *seen_ = nullptr;
  void* stream_ = nullptr;
  Room pages_, arena_, turns_, logits_;
  Staging staging_;
  Step step_{};
  Sizes sizes_;
  bool graphed_ = false;
  std::map<Sizes, Bucket> buckets_;
  std::vector<Choice> fetched_;
};

}  // namespace baton

// Each returns 0 or what baton_device_error puts into words. One thread at a time.
BATON_API int baton_session_open(const baton::Model* model, int64_t vocab, void** session) {
  auto* made = new baton::Session(*model, vocab);
  *session = made;
  return made->open();
}
BATON_API int baton_session_close(void* session) { return delete static_cast<baton::Session*>(session), 0; }
BATON_API int baton_session_bind(void* session, char* host, int64_t pages, int64_t page_bytes) {
  return static_cast<baton::Session*>(session)->bind(host, pages, page_bytes);
}
BATON_API int baton_session_admit(void* session, const int32_t* pages, int64_t count) {
  return static_cast<baton::Session*>(session)->admit(pages, count);
}
BATON_API int baton_session_turns(void* session, const float* host, int64_t bytes) {
  return static_cast<baton::Session*>(session)->turns(host, bytes);
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
BATON_API int baton_device_pageable(int* yes) { return baton::pageable(yes); }
BATON_API int baton_device_register(void* at, int64_t bytes) {
  void* seen = nullptr;
  return baton::host_register(at, size_t(bytes), &seen);
}
BATON_API int baton_device_unregister(void* at) { return baton::host_unregister(at); }
BATON_API const char* baton_device_error(int status) { return baton::error_text(status); }
