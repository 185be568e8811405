// A program as it runs with adapters beside its layers, and without. Knows nothing of what adapters do or of the device.
//
// Where no row of a step has an adapter, its places are left out and experts run bare, so that neighbours share launches as they
// do in a program that has none. Numbers of ops from outside are the whole program's.
#pragma once
#include <vector>

#include "../moe/adapted.h"
#include "step.h"

namespace baton {

class AdaptedProgram {
 public:
  // Ops up to the head, which is the last.
  explicit AdaptedProgram(const Model& model) : whole_(model) {
    for (const Op* op = model.ops;; op++) {
      numbers_.push_back(int32_t(bare_.size()));
      if (op->kind == OP_LORA) step_ = static_cast<const LoraStep*>(op->table);
      else bare_.push_back(without(*op));
      if (op->kind != OP_LM_HEAD) continue;
      heads_ = static_cast<const LoraStep*>(op->table);
      break;
    }
    numbers_.push_back(int32_t(bare_.size()));
  }

  // Which rows of the next step have which adapter; null where the program has no places for any.
  const LoraStep* adapters() const { return step_; }

  // Which sampled rows of the next step have an adapter beside the head; null where it has no place for any.
  const LoraStep* heads() const { return heads_; }

  Model of(int64_t adapters) const {
    Model found = whole_;
    if (!adapters && step_) found.ops = bare_.data();
    return found;
  }

  int32_t number(int32_t op, int64_t adapters) const { return adapters || !step_ ? op : numbers_[size_t(op)]; }

 private:
  static Op without(Op op) {
    if (op.kind == OP_MOE_ADAPTED) op.kind = OP_MOE, op.table = static_cast<const AdaptedMoe*>(op.table)->moe;
    return op;
  }

  const Model whole_;
  const LoraStep *step_ = nullptr, *heads_ = nullptr;
  std::vector<Op> bare_;
  std::vector<int32_t> numbers_;  // of each op of the whole program, how many of the others lie in front of it
};

}  // namespace baton
