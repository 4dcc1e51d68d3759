#pragma once

#include "plan/learned.hpp"
#include "plan/request.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::plan {

/// Kinds of samples, and whose knowledge a step is planned with.
///
/// Longer samples need more of everything. So a kind that is shorter than one that is known follows
/// its plan, without probes: the prediction is a bound then. What is longer, or has come back often
/// and could be faster in larger micro-batches, is planned with the same knowledge as all others
/// that differ from it in one length: bytes are known as a function of that. Where they differ
/// otherwise it gets a plan of its own. Where samples of one logical batch are of unequal length,
/// all batches that are alike but for lengths are planned together.
class Kinds {
 public:
  /// Whose knowledge `request` is planned with, from now on; of kinds that differ in one length it
  /// is told that.
  void choose(Request& request);
  /// Null before the first choice.
  Learned* learned() const noexcept { return learned_; }
  /// Whether it is that of longer samples; and elements of their samples ÷ of these.
  bool borrowed() const noexcept { return borrowed_; }
  double work_ratio() const noexcept { return work_ratio_; }

  /// From now on this kind has knowledge of its own.
  void stop_borrowing(Request& request);
  /// A step followed the plan of longer samples.
  void followed(const Request& request) { ++borrowings_[own(request)]; }
  /// Notes how long the samples of micro-batches of at most `size` were. Returns whether what was
  /// planned is not so any more: lengths differ for the first time, or samples are longer than any
  /// before.
  bool notice(const Request& request, int64_t size, const std::vector<Dims>& dims);

 private:
  /// Kinds that differ in one length: all dimensions that differ from the first one's do so by as
  /// much.
  struct Family {
    Dims first;
    std::vector<std::vector<bool>> follows;  // that length
  };
  /// Of samples of a family: how long they are. Nothing where they are none of its.
  static std::optional<int64_t> length_in(const Family& family, const Dims& dims);
  /// Plans `request` with what the family knows, where it belongs to one.
  bool follow_family(Request& request);
  /// Makes a family of `request` and a kind that is known.
  bool found_family(Request& request);

  using Kind = std::pair<std::string, Dims>;
  static Kind own(const Request& request) { return {request.signature, request.dims}; }
  /// The shortest of the longer kinds that are known well enough to plan with; null where none is.
  std::pair<const Kind, Learned>* longer(const Request& request);
  void take(Learned& learned) {
    learned_ = &learned;
    borrowed_ = false;
    work_ratio_ = 1.0;
  }

  std::map<Kind, Learned> by_kind_;
  std::map<std::string, std::vector<Family>> families_;  // by signature
  std::map<std::string, Learned> ragged_;  // by signature: lengths differ all the time
  std::map<Kind, int> borrowings_;         // steps of a kind under the plan of a longer one
  Learned* learned_ = nullptr;
  bool borrowed_ = false;
  double work_ratio_ = 1.0;
};

}  // namespace infinitybatch::plan
