#pragma once

#include "core/rng.hpp"
#include "coupled/coupling_watch.hpp"
#include "coupled/random_streams.hpp"
#include "tape/tape.hpp"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// With `Problem::match_native_rng`: the random numbers of the whole batch's own run, those of
/// Python and NumPy included, while micro-batches are recorded. Each forward begins where the whole
/// batch's would; what torch draws is drawn by stand-ins later, from `streams`. Where nobody wants
/// them nothing here does anything.
class NativeNumbers {
 public:
  NativeNumbers(bool wanted, const std::vector<at::Device>& devices);

  /// Where the whole batch's run has its generators; null where nobody wants its numbers.
  const std::shared_ptr<coupled::RandomStreams>& streams() const noexcept { return streams_; }

  /// Puts generators that forward may draw from where the step found them, in front of a forward.
  void rewind() const;
  /// A forward was recorded.
  /// \throws CouplingError where it draws for these rows what it does not draw for others
  void meet(const tape::Tape& tape);
  /// Makes the next forward draw other numbers than the one before.
  void shift() const;

  /// Whether forward has drawn any. \param watch has seen it
  bool drawn(const coupled::CouplingWatch& watch) const;
  /// Whether Python's or NumPy's sources do not stand where the step found them.
  bool foreign_moved() const;
  /// Whether a forward that was met has drawn from these.
  bool foreign_drawn() const { return foreign_after_ && *foreign_after_ != foreign_before_; }

 private:
  std::vector<at::Device> devices_;
  std::shared_ptr<coupled::RandomStreams> streams_;
  std::optional<RngSnapshot> foreign_;  // as the step found them
  std::map<std::string, std::string> foreign_before_;
  std::optional<std::map<std::string, std::string>> foreign_after_;  // one forward
};

}  // namespace infinitybatch
