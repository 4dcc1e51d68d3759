#pragma once

#include "tape/tape.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

namespace infinitybatch::tape {

/// A tape was played on other rows than those of its recording, and forward could have taken
/// another way there: user code saw another number or another size. The step begins again and
/// records each micro-batch; where it cannot, this is what the user sees.
class OtherValues : public Unsupported {
 public:
  using Unsupported::Unsupported;
};

/// Whether user code may see values through what an op returns: a number, a size that follows
/// values, or memory that Python reads (`tolist()`, NumPy).
bool shows_values(const OpFacts& facts, c10::ArrayRef<c10::IValue> arguments);

/// What the op showed while it was recorded.
Witness witness_of(const OpFacts& facts, c10::ArrayRef<c10::IValue> results);

/// \throws OtherValues where `results` of the same op on other rows show something else
void check(const Witness& witness, const OpFacts& facts, c10::ArrayRef<c10::IValue> results);

/// Whether two recordings of one program showed the same.
bool same_witnesses(const Tape& a, const Tape& b);

}  // namespace infinitybatch::tape
