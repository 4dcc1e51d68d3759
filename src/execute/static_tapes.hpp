#pragma once

#include "execute/recorded.hpp"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace infinitybatch {

/// With `static_graph`: recordings of one kind of batch that later micro-batches and steps reuse,
/// by the number of rows.
struct StaticTapes {
  struct Entry {
    std::shared_ptr<const Recorded> recorded;
    bool confirmed = false;  ///< another micro-batch gave the same program
    int64_t met = 0;         ///< the last step in which user code ran against it
    int64_t begun = 0;       ///< the step that recorded it
    int64_t used = -1;       ///< the last step that took it in place of user code
  };
  std::map<int64_t, Entry> by_rows;
  std::vector<const void*> owned;  ///< parameters and buffers that they were recorded with
  /// Values decide what forward does, or may: each micro-batch is recorded. Copies share it.
  std::shared_ptr<std::atomic<bool>> varies = std::make_shared<std::atomic<bool>>(false);

  /// So are they where another program was found too late. Nothing of it is believed from then on.
  std::shared_ptr<std::atomic<bool>> outdated = std::make_shared<std::atomic<bool>>(false);
  int64_t steps = 0;     ///< that have succeeded
  bool ran = false;      ///< user code, in the step at work
  bool changed = false;  ///< forward has become another program once, and nobody said what decides

  /// Whether there is a confirmed recording of so many rows.
  bool knows(int64_t rows) const;
  /// That, which the step at work uses; null where there is none.
  std::shared_ptr<const Recorded> use(int64_t rows);
  /// Keeps the first recording of so many rows; a second one confirms it. Where forward has become
  /// another program since the step before, the new one is kept in its place until the next step
  /// confirms it: a first call may be another one. A second such change, and nothing is believed.
  /// \throws Unsupported where two of one step are different programs, or forward is another one
  ///         than steps have used that nobody compared
  void meet(int64_t rows, const Recorded& recorded);
  /// Whether the step at work is one of 1, 2, 4, 8, … in which no user code has run yet: then it
  /// runs, and tells whether it is still the same program.
  bool due() const noexcept { return (steps & (steps + 1)) == 0 && !ran; }
  /// That. Forgets what is known where it is not. \throws Unsupported as `meet` does
  void compare(int64_t rows, const tape::Tape& tape);
  void end_step();
  /// Of a step that failed nobody has looked at what it recorded.
  void forget();
  /// Values decide what forward does: nothing recorded so far is used again.
  void distrust();

 private:
  void keep(int64_t rows, const Recorded& recorded);
  /// Whether it is the program that is known of so many rows. \throws Unsupported as `meet` does
  bool is_known(int64_t rows, const tape::Tape& tape);
  void believe(Entry& entry, const tape::Tape& tape);
};

}  // namespace infinitybatch
