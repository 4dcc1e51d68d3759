#pragma once

#include "tape/frontiers.hpp"
#include "tape/tape.hpp"

#include <cstdint>
#include <map>
#include <vector>

namespace infinitybatch {

/// Where the tape of a micro-batch is cut so that its graph never exists as a whole (activation
/// checkpointing): it is played again segment by segment, last first. In a model with ops that see
/// the whole batch that is done between one of them and the next: what waits at cuts for memory is
/// made again from what waits at such an op.
class Checkpoints {
 public:
  virtual ~Checkpoints() = default;
  /// Positions of the ops in front of which `tape` is cut, rising; none leaves it whole.
  /// \param tape trimmed, of a light recording
  /// \param ops  positions of those that see the whole batch, rising: it is cut there anyway
  virtual std::vector<uint32_t> choose(const tape::Tape& tape,
                                       const std::vector<uint32_t>& ops = {}) = 0;

  /// Where recordings of so many rows keep what waits at the cuts; empty before the first one.
  std::map<int64_t, tape::FrontierGuide> guides;
  /// Nothing waits at the cuts: each segment's frontier is computed again from the inputs. Device
  /// memory does not grow with the number of segments, time grows with its square.
  bool forget = false;
  /// Of a coupled loss: what waits at a micro-batch's cuts is not kept from its recording, but made
  /// again from its inputs once the loss is known.
  bool again = false;
  /// For `choose`: what the last ops of the tape save is a guess, for their graph was kept. Told
  /// back by it: nothing better is known of this program, so the next recording had better be a
  /// light one from beginning to end.
  bool guessed = false;
  /// Forget the guides where other places are chosen from now on.
  void changed() { guides.clear(); }
};

}  // namespace infinitybatch
