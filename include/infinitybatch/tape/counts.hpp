#pragma once

#include <infinitybatch/tape/tape.hpp>

namespace infinitybatch::tape {

/// Whether an op that reads a buffer is given a number that could be one of samples
/// (`self.seen += len(x)`): another one than 0 and 1, also as a tensor that was made of constants
/// alone. What is put into a buffer's place, which no op of the tape need show, is not seen, nor
/// numbers that meet other values first.
bool may_count(const Tape& tape);

}  // namespace infinitybatch::tape
