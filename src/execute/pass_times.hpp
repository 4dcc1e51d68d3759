#pragma once

#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
#include <map>
#include <tuple>

namespace infinitybatch {

/// What the instructions of a offloaded plan took while it ran: compute without the waiting for
/// copies, and the bytes that each moved. Wall clock time of the calling thread, so that it says
/// nothing of accelerators, which compute behind it.
class PassTimes {
 public:
  /// \param samples of the micro-batch, or of all where the instruction is for all
  /// \param bytes   whose copies it began
  void add(const Instruction& instruction, int64_t samples, double seconds, int64_t bytes);
  /// What other times of the same instructions tell as well.
  void add(const PassTimes& others);
  /// Whose copies an instruction began, by sample.
  double bytes_per_sample(Operation operation) const;
  /// How fast copies were, in both directions.
  void set_link(int64_t bytes_out, double seconds_out, int64_t bytes_back, double seconds_back);

 private:
  friend class CopyClock;

  struct Taken {
    double seconds = 0;
    int64_t bytes = 0;
    int64_t samples = 0;
  };
  using Key = std::tuple<Operation, int64_t, bool>;  // segment, and whether it goes back

  std::map<Key, Taken> taken_;
  double seconds_per_byte_out_ = 0;
  double seconds_per_byte_back_ = 0;
};

/// Tells the time story of a offloaded plan: one thread computes and another copies, first come
/// first served; where the first needs what the second has not finished it waits. Reads the
/// instructions that the executor runs, as the memory simulator does.
CopySeconds simulate_copies(const Plan& plan, const PassTimes& times);

/// When the step ends in that story, in seconds: computing, and waiting for copies.
double simulate_seconds(const Plan& plan, const PassTimes& times);

}  // namespace infinitybatch
