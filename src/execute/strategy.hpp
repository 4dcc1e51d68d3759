#pragma once

#include <infinitybatch/execute/plan.hpp>

#include <string>

namespace infinitybatch {

/// How a logical batch is computed, beside the sizes that a plan has: one small value. Only the
/// answers of `recovery_table` change it.
struct Strategy {
  /// Where tapes are cut.
  enum class Cuts {
    none,
    whole_batch_ops,  ///< all micro-batches go from one to the next together
    memory,           ///< each micro-batch goes through its tape by itself
    both,
  };
  /// What gives a micro-batch its graph after the loss of all is known, where it was not kept.
  enum class SecondForward {
    replay,
    rerun,                ///< the user's code, as asked for
    rerun_after_mismatch  ///< because a replay gave other outputs
  };
  /// What leaves the device while it is not needed.
  enum class Offloads {
    nothing,
    boundaries,  ///< outputs, and activations at the cuts
    graphs,      ///< and graphs that are kept for a coupled loss
  };

  Cuts cuts = Cuts::none;
  SecondForward second_forward = SecondForward::replay;
  Offloads offload = Offloads::nothing;
  bool reuses_tapes = false;  ///< static_graph, with cuts
  KeptBoundaries kept;  ///< where tapes are cut at whole-batch ops alone; nothing is offloaded

  void cut(bool at_whole_batch_ops, bool for_memory) noexcept {
    cuts = at_whole_batch_ops ? for_memory ? Cuts::both : Cuts::whole_batch_ops
           : for_memory       ? Cuts::memory
                              : Cuts::none;
  }
  /// \param asked for by the user
  /// \param work  no replay has given other outputs
  void use_tapes(bool asked, bool work) noexcept {
    second_forward = !asked ? SecondForward::rerun
                     : work ? SecondForward::replay
                            : SecondForward::rerun_after_mismatch;
  }
  bool is_cut() const noexcept { return cuts != Cuts::none; }
  bool per_micro_batch() const noexcept { return cuts == Cuts::memory; }
  bool checkpoints() const noexcept { return cuts == Cuts::memory || cuts == Cuts::both; }
  bool replays() const noexcept { return second_forward == SecondForward::replay; }
  bool offloads() const noexcept { return offload != Offloads::nothing; }
  bool offloads_graphs() const noexcept { return offload == Offloads::graphs; }

  /// "cut at whole-batch ops, offloads boundary activations"
  std::string text() const;

  friend bool operator==(const Strategy&, const Strategy&) = default;
};

}  // namespace infinitybatch
