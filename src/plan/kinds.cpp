#include "plan/kinds.hpp"

#include "plan/candidates.hpp"
#include "plan/prediction.hpp"
#include "plan/probes.hpp"

#include <algorithm>
#include <cstddef>

namespace infinitybatch::plan {
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

/// Stands in the signature of kinds that are known as functions of a length.
constexpr const char* kByLength = "|by length";

/// Whether sizes are chosen freely, of samples that are alike: of cut tapes what there is once is
/// not told apart by length.
bool may_be_of_family(const Request& request) {
  return request.lengths.empty() && !request.whole_batch_only && request.fails_on == 0 &&
         request.segments == 0;
}

bool is_known(const Request& request, const Learned& learned) {
  const bool measured = learned.profile || !learned.peaks.empty();
  if (!measured || probe_size(request, learned)) return false;
  const bool needs_loss = request.two_pass && request.whole_loss;
  return !needs_loss || Prediction(request, learned).whole_loss(/*micro_batches=*/1);
}

/// Whether a plan of its own could be faster: more of the shorter samples fit at once.
bool could_gain(const Request& request, const Dims& longer, const Learned& learned) {
  if (request.whole_batch_only || request.fails_on > 0) return false;
  if (elements(request.dims) > kMuchShorter * elements(longer)) return false;
  return request.size_under(Candidates(request, learned).fastest()) < request.batch_size;
}

/// Where lengths differ: what is known goes on from what was, of samples that were alike.
Learned ragged_after(const Learned& before, double elements_before) {
  Learned ragged;
  ragged.peaks = before.peaks;
  ragged.timings = before.timings;
  ragged.shortages = Shortages(before.shortages.largest());
  ragged.whole_loss = before.whole_loss;
  for (const auto& [size, peak] : ragged.peaks) ragged.lengths.works[size] = elements_before;
  ragged.lengths.longest = elements_before;
  return ragged;
}

}  // namespace

std::optional<int64_t> Kinds::length_in(const Family& family, const Dims& dims) {
  if (dims.size() != family.first.size()) return std::nullopt;
  std::optional<int64_t> length;
  std::optional<int64_t> more;
  for (size_t leaf = 0; leaf < dims.size(); ++leaf) {
    if (dims[leaf].size() != family.first[leaf].size()) return std::nullopt;
    for (size_t i = 0; i < dims[leaf].size(); ++i) {
      const int64_t differs = dims[leaf][i] - family.first[leaf][i];
      if (family.follows[leaf][i] ? differs != more.value_or(differs) : differs != 0) {
        return std::nullopt;
      }
      if (!family.follows[leaf][i]) continue;
      more = differs;
      length = length.value_or(dims[leaf][i]);
    }
  }
  return length;
}

bool Kinds::follow_family(Request& request) {
  for (const Family& family : families_[request.signature]) {
    const std::optional<int64_t> length = length_in(family, request.dims);
    if (!length || *length < 1) continue;
    request.signature += kByLength;
    request.dims = family.first;
    request.lengths.assign(static_cast<size_t>(request.batch_size), *length);
    request.length = *length;
    take(by_kind_[own(request)]);
    learned_->lengths.first.reset();  // of this batch
    return true;
  }
  return false;
}

bool Kinds::found_family(Request& request) {
  for (auto entry = by_kind_.begin(); entry != by_kind_.end(); ++entry) {
    const auto& [kind, learned] = *entry;
    const auto& [signature, dims] = kind;
    if (signature != request.signature || !is_known(request, learned) || !learned.profile) continue;
    Family family{dims, {}};
    if (dims.size() != request.dims.size()) continue;
    for (size_t leaf = 0; leaf < dims.size(); ++leaf) {
      std::vector<bool>& follows = family.follows.emplace_back();
      for (size_t i = 0; i < dims[leaf].size() && i < request.dims[leaf].size(); ++i) {
        follows.push_back(dims[leaf][i] != request.dims[leaf][i]);
      }
      follows.resize(dims[leaf].size());
    }
    const std::optional<int64_t> length = length_in(family, dims);
    if (!length || *length < 1 || !length_in(family, request.dims)) continue;
    Learned known = std::move(entry->second);
    known.tell_length(*length);
    by_kind_[{signature + kByLength, dims}] = std::move(known);
    families_[request.signature].push_back(std::move(family));
    by_kind_.erase(entry);
    return follow_family(request);
  }
  return false;
}

void Kinds::choose(Request& request) {
  const auto ragged = ragged_.find(request.signature);
  if (ragged != ragged_.end()) return take(ragged->second);
  if (may_be_of_family(request) && follow_family(request)) return;
  const auto known = by_kind_.find(own(request));
  if (known != by_kind_.end()) return take(known->second);
  if (!request.lengths.empty()) return stop_borrowing(request);  // whatever they are
  auto* const other = longer(request);
  if (other == nullptr) return stop_borrowing(request);
  const auto& [kind, learned] = *other;
  if (borrowings_[own(request)] >= kOften && could_gain(request, kind.second, learned)) {
    return stop_borrowing(request);
  }
  learned_ = &other->second;
  borrowed_ = true;
  work_ratio_ = elements(kind.second) / elements(request.dims);
}

std::pair<const Kinds::Kind, Learned>* Kinds::longer(const Request& request) {
  std::pair<const Kind, Learned>* best = nullptr;
  for (auto& entry : by_kind_) {
    const auto& [signature, dims] = entry.first;
    if (signature != request.signature || !dominates(dims, request.dims)) continue;
    if (!is_known(request, entry.second)) continue;
    if (best == nullptr || elements(dims) < elements(best->first.second)) best = &entry;
  }
  return best;
}

void Kinds::stop_borrowing(Request& request) {
  if (may_be_of_family(request) && found_family(request)) return;
  take(by_kind_[own(request)]);
}

bool Kinds::notice(const Request& request, int64_t size, const std::vector<Dims>& dims) {
  if (dims.empty()) return false;
  Lengths& before = learned_->lengths;
  const Dims& first = before.first ? *before.first : dims.front();
  double longest = 0;
  bool differ = false;
  for (const Dims& each : dims) {
    longest = std::max(longest, elements(each));
    differ = differ || each != first;
  }
  if (!borrowed_ && !before.first) before.first = dims.front();
  bool changed = false;
  if (differ && !learned_->ragged) {
    const bool by_length = learned_->profile && learned_->profile->length() > 0;
    Learned ragged =
        borrowed_ || by_length ? Learned() : ragged_after(*learned_, elements(*before.first));
    ragged.ragged = ragged.irregular = true;
    take(ragged_[request.signature] = std::move(ragged));
    changed = true;
  }
  if (!learned_->ragged) return changed;
  Lengths& lengths = learned_->lengths;
  double& work = lengths.works[size];
  work = std::max(work, longest);
  if (longest <= lengths.longest) return changed;
  lengths.longest = longest;
  return true;
}

}  // namespace infinitybatch::plan
