// Where the registers of a step's rows lie, in the step's own memory or in what ranks share. Knows nothing of what ops do.
#pragma once
#include <cstring>
#include <vector>

#include "ranks/ranks.h"

namespace baton {
namespace {

// The registers that ranks fill together: which they are, how many rows they have, and where they begin in the shared memory.
struct SharedRows {
  const int32_t* is_shared;
  int64_t rows, begin;
};

class StepRegisters {
 public:
  // Copies the registers `which` of some rows to those of `to`, whose rows these are.
  void copy(const int32_t* which, int32_t count, const std::vector<int32_t>& rows, const StepRegisters& to) const {
    for (int32_t i = 0; i < count; i++) {
      const int64_t n = width(which[i]);
      for (size_t row = 0; row < rows.size(); row++)
        std::memcpy(to.at(which[i]) + int64_t(row) * n, at(which[i]) + rows[row] * n, size_t(n) * 4);
    }
  }

  // Copies registers of this step's rows from where those of all rows lie; `rows` are their numbers there.
  void take(const CarriedRegisters& c, const int32_t* rows) { carry(c, rows, true); }

  // Copies registers of this step's rows to where those of all rows lie, here and on the hosts `to`.
  void hand_on(const CarriedRegisters& c, const int32_t* rows, Hosts to) {
    carry(c, rows, false);
    const float* shared = carried(c);
    for (int32_t i = 0; i < c.count; shared += all_rows_ * width(c.registers[i++])) show_rows(*r_, to, shared, rows, s_.rows, width(c.registers[i]));
  }

 protected:
  StepRegisters(const Model& model, const Step& step, Ranks* ranks, const SharedRows& of_all)
      : m_(model), s_(step), r_(ranks), is_shared_(of_all.is_shared), all_rows_(of_all.rows) {
    int64_t own = 0, shared = ranks ? of_all.begin + ranks->first_shared * all_rows_ : 0;
    for (int32_t i = 0; i < m_.registers; i++) {
      starts_.push_back(is_shared(i) ? shared : own);
      if (is_shared(i)) shared += all_rows_ * m_.widths[i];
      else own += step.rows * m_.widths[i];
    }
  }

  bool is_shared(int32_t reg) const { return is_shared_ && is_shared_[reg]; }
  float* at(int32_t reg) const { return (is_shared(reg) ? r_->registers : s_.arena) + starts_[size_t(reg)]; }
  int64_t width(int32_t reg) const { return m_.widths[reg]; }
  int64_t rows_of(int32_t reg) const { return is_shared(reg) ? all_rows_ : s_.rows; }

  // Where the rank's own columns of an op's result begin.
  float* part(const Op& o) const { return at(o.out) + (r_ ? o.delta : 0); }

  // Where the rank's own columns of an op's result begin, of an op that has another register in `delta`.
  float* own_columns(const Op& o) const { return at(o.out) + (r_ ? o.layer : 0); }

  // What an op changes in place: its result, with what it reads in it.
  float* copied(const Op& o) const {
    if (o.in != o.out) std::memcpy(at(o.out), at(o.in), size_t(s_.rows * width(o.in)) * 4);
    return at(o.out);
  }

  const Model& m_;
  const Step& s_;
  Ranks* r_;

 private:
  float* carried(const CarriedRegisters& c) const { return r_->registers + (r_->shared_floats + c.first) * all_rows_; }

  void carry(const CarriedRegisters& c, const int32_t* rows, bool inwards) {
    float* shared = carried(c);
    for (int32_t i = 0; i < c.count; i++) {
      const int64_t n = width(c.registers[i]);
      float* own = at(c.registers[i]);
      for (int64_t row = 0; row < s_.rows; row++) {
        float *here = own + row * n, *there = shared + rows[row] * n;
        std::memcpy(inwards ? here : there, inwards ? there : here, size_t(n) * 4);
      }
      shared += all_rows_ * n;
    }
  }

  const int32_t* is_shared_;
  int64_t all_rows_;
  std::vector<int64_t> starts_;
};

}  // namespace
}  // namespace baton
