// Samples of other lengths: kinds that differ in nothing else share plans, and logical batches
// whose samples differ among themselves are planned by the longest.
#include "plan/planner.hpp"

#include <algorithm>
#include <cmath>

namespace infinitybatch {
namespace {

// A kind has come back often when this many steps have followed the plan of longer samples.
constexpr int kOften = 3;
// Samples that are hardly shorter would hardly gain.
constexpr double kMuchShorter = 0.75;

/// Elements of a sample: what its length means for time and memory, about.
double elements(const Dims& dims) {
  double total = 0;
  for (const std::vector<int64_t>& leaf : dims) {
    double product = 1;
    for (const int64_t size : leaf) product *= static_cast<double>(size);
    total += product;
  }
  return std::max(total, 1.0);
}

bool dominates(const Dims& longer, const Dims& dims) {
  if (longer.size() != dims.size()) return false;
  for (size_t leaf = 0; leaf < dims.size(); ++leaf) {
    if (longer[leaf].size() != dims[leaf].size()) return false;
    for (size_t i = 0; i < dims[leaf].size(); ++i) {
      if (longer[leaf][i] < dims[leaf][i]) return false;
    }
  }
  return true;
}

}  // namespace

void Planner::choose_knowledge() {
  borrowed_ = false;
  work_ratio_ = 1.0;
  if (const auto found = ragged_.find(request_.signature); found != ragged_.end()) {
    known_ = &found->second;
    return;
  }
  const Kind own{request_.signature, request_.dims};
  if (const auto found = knowledge_.find(own); found != knowledge_.end()) {
    known_ = &found->second;
    return;
  }
  if (auto* longer = longer_kind()) {
    known_ = &longer->second;
    if (borrowings_[own] < kOften || !could_gain(longer->first.second)) {
      borrowed_ = true;
      work_ratio_ = elements(longer->first.second) / elements(request_.dims);
      return;
    }
  }
  known_ = &knowledge_[own];
}

std::pair<const Planner::Kind, Planner::Knowledge>* Planner::longer_kind() {
  std::pair<const Kind, Knowledge>* best = nullptr;
  for (auto& entry : knowledge_) {
    const auto& [signature, dims] = entry.first;
    if (signature != request_.signature || !dominates(dims, request_.dims)) continue;
    known_ = &entry.second;
    const bool measured = known_->profile || !known_->peaks.empty();
    const bool needs_loss = request_.two_pass && request_.whole_loss;
    if (!measured || probe_size() || (needs_loss && !whole_loss(/*micro_batches=*/1))) continue;
    if (best == nullptr || elements(dims) < elements(best->first.second)) best = &entry;
  }
  return best;
}

/// Whether a plan of its own could be faster: more of the shorter samples fit at once.
bool Planner::could_gain(const Dims& longer) const {
  if (request_.whole_batch_only || request_.fails_on > 0) return false;
  const bool much_shorter = elements(request_.dims) <= kMuchShorter * elements(longer);
  return much_shorter && size_under(fastest()) < request_.batch_size;
}

void Planner::stop_borrowing() {
  borrowed_ = false;
  work_ratio_ = 1.0;
  known_ = &knowledge_[Kind{request_.signature, request_.dims}];
  forget_settled_plan();
}

void Planner::observe_borrowed(const Piece& piece, const Measurement& measured) {
  // A rehearsal is no step.
  const bool whole_step = row_ == request_.batch_size && piece.plan.strategy != "rehearsal";
  if (whole_step) ++borrowings_[Kind{request_.signature, request_.dims}];
  if (piece.settled) return;
  if (piece.timed_cap > 0) learn_times(piece, measured);
  last_cap_ = piece.timed_cap;
}

/// Notes how long samples are. Where that differs within a logical batch, all batches of the
/// signature are planned together from now on.
void Planner::notice_lengths(const Piece& piece, const Measurement& measured) {
  if (measured.dims.empty()) return;
  double longest = 0;
  bool differ = false;
  const Dims& first = known_->lengths ? *known_->lengths : measured.dims.front();
  for (const Dims& dims : measured.dims) {
    longest = std::max(longest, elements(dims));
    differ = differ || dims != first;
  }
  if (!borrowed_ && !known_->lengths) known_->lengths = measured.dims.front();
  if (differ && !known_->ragged) {
    Knowledge ragged;
    ragged.ragged = ragged.irregular = true;
    if (!borrowed_) {
      ragged.peaks = known_->peaks;
      ragged.timings = known_->timings;
      ragged.largest = known_->largest;
      ragged.whole_loss = known_->whole_loss;
      const double before = known_->lengths ? elements(*known_->lengths) : longest;
      for (const auto& [size, peak] : ragged.peaks) ragged.works[size] = before;
      ragged.longest = before;
    }
    borrowed_ = false;
    work_ratio_ = 1.0;
    known_ = &(ragged_[request_.signature] = std::move(ragged));
    forget_settled_plan();
  }
  if (!known_->ragged) return;
  double& work = known_->works[piece.plan.micro_batch_size()];
  work = std::max(work, longest);
  if (longest > known_->longest) {
    known_->longest = longest;
    forget_settled_plan();
  }
}

/// Above the baseline: the largest measured peak, scaled to so many of the longest samples.
double Planner::ragged_peak(int64_t size) const {
  if (known_->peaks.empty()) return 0;
  const auto scaled = [&](int64_t measured, int64_t peak) {
    const auto work = known_->works.find(measured);
    const double there = work != known_->works.end() ? work->second : known_->longest;
    const double rows = static_cast<double>(size) / static_cast<double>(measured);
    return static_cast<double>(peak) * std::max(1.0, rows * known_->longest / there);
  };
  const auto exact = known_->peaks.find(size);
  const auto& [measured, peak] = exact != known_->peaks.end() ? *exact : *known_->peaks.rbegin();
  return scaled(measured, peak);
}

}  // namespace infinitybatch
