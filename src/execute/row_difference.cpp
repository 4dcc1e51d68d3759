#include "execute/row_difference.hpp"

#include "core/bits.hpp"
#include "core/sample_rows.hpp"
#include "execute/relative_distance.hpp"
#include "execute/rows_seen.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace infinitybatch {
namespace {

constexpr double kApart = std::numeric_limits<double>::infinity();

bool comparable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         tensor.dim() > 0;
}

bool is_number(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.dim() == 0;
}

/// A number has no rows; it may be the same for any of them, as a temperature is.
bool is_same_number(const at::Tensor& whole, const at::Tensor& part) {
  return is_number(whole) && is_number(part) && same_form(whole, part) &&
         !any_bit_differs(whole, part).item<bool>();
}

/// How far rows are apart, and where they are.
struct Apart {
  double most = kApart;
  int64_t dim = -1;       ///< of both; -1: rows have no place
  at::Tensor there = {};  ///< these rows of the whole
};

/// One leaf of both.
class Leaves {
 public:
  Leaves(const at::Tensor& whole, const at::Tensor& part, Rows rows, int64_t all)
      : whole_(whole.resolve_conj().resolve_neg()),
        part_(part.resolve_conj().resolve_neg()),
        rows_(rows),
        all_(all) {}

  /// Along the dimension that suits them best; nothing where rows have no places.
  /// \param known see `RowsSeen::dims`
  std::optional<Apart> apart(int64_t known) const {
    if (whole_.dim() != part_.dim()) return std::nullopt;
    std::optional<Apart> least;
    for (int64_t d = 0; d < whole_.dim(); ++d) {
      if (whole_.size(d) != all_ || part_.size(d) != rows_.size() || !else_alike(d)) continue;
      at::Tensor there = whole_.narrow(d, rows_.begin, rows_.size());
      const double most = relative_distance(part_, there);
      if (!least || most < least->most) least = Apart{most, d, std::move(there)};
    }
    if (least) return least;
    if (compares()) return Apart{};
    if (known == 0 || known == kInterleaved) {
      if (auto there = there_flattened(known == kInterleaved); there.defined()) {
        const double most = relative_distance(part_, there);
        return Apart{most, 0, std::move(there)};
      }
    }
    if (part_.size(0) != rows_.size() || whole_.size(0) == all_) return std::nullopt;
    // A row for each sample of the part, but not of the whole.
    if (!else_alike(0) || whole_.size(0) % all_ == 0) return std::nullopt;
    return all_found() ? std::nullopt : std::optional(Apart{});
  }

  /// That one, where there is one; else -1.
  int64_t dim() const {
    if (whole_.dim() != part_.dim()) return -1;
    if (same_form(whole_, part_) && !any_bit_differs(whole_, part_).item<bool>()) return kOnce;
    int64_t found = -1;
    double least = kApart;
    for (int64_t d = 0; d < whole_.dim(); ++d) {
      if (whole_.size(d) != all_ || part_.size(d) != rows_.size() || !else_alike(d)) continue;
      const double here = relative_distance(part_, whole_.narrow(d, rows_.begin, rows_.size()));
      if (here < least) {
        least = here;
        found = d;
      }
    }
    if (found >= 0 || compares()) return found;
    switch (order()) {
      case Flattened::together:
        return 0;
      case Flattened::interleaved:
        return kInterleaved;
      default:
        return -1;
    }
  }

  /// Of several places for each sample along the first dimension.
  Flattened order() const {
    const auto together = apart_flattened(false);
    const auto by_turns = apart_flattened(true);
    if (!together || !by_turns) return Flattened::no;
    // Rows that are nearly alike would pass for one another.
    constexpr double kClearly = 8;
    const double near = std::min(*together, *by_turns);
    const double far = std::max(*together, *by_turns);
    if (!(near <= rounding_of(part_)) || !(far > kClearly * near)) return Flattened::unknown;
    return *together < *by_turns ? Flattened::together : Flattened::interleaved;
  }

  const at::Tensor& part() const noexcept { return part_; }

  /// Along several dimensions, as where samples are compared with each other.
  bool compares() const {
    int64_t following = 0;
    for (int64_t d = 0; d < whole_.dim(); ++d) {
      const bool follows = whole_.size(d) == all_ && part_.size(d) == rows_.size();
      if (!follows && whole_.size(d) != part_.size(d)) return false;
      following += follows ? 1 : 0;
    }
    return following > 1;
  }

 private:
  /// How far several places of each sample along the first dimension are apart, in one order;
  /// nothing where there are not several.
  std::optional<double> apart_flattened(bool interleaved) const {
    const at::Tensor there = there_flattened(interleaved);
    return there.defined() ? std::optional(relative_distance(part_, there)) : std::nullopt;
  }

  /// Those rows of the whole; undefined where there are not several places of each sample.
  at::Tensor there_flattened(bool interleaved) const {
    if (whole_.dim() != part_.dim() || part_.dim() == 0 || !else_alike(0)) return {};
    Leaf like;
    like.places = part_.size(0) / rows_.size();
    like.interleaved = interleaved;
    if (like.places < 2 || part_.size(0) != like.places * rows_.size()) return {};
    if (whole_.size(0) != like.places * all_) return {};
    return rows_of(whole_, like, rows_);
  }

  bool else_alike(int64_t dim) const {
    for (int64_t d = 0; d < whole_.dim(); ++d) {
      if (d != dim && whole_.size(d) != part_.size(d)) return false;
    }
    return true;
  }

  /// Whether each row of the part is one of the whole (samples that forward selects by value).
  bool all_found() const {
    constexpr int64_t kMost = 1 << 14;
    if (whole_.size(0) * part_.size(0) > kMost) return true;  // nobody knows
    for (int64_t i = 0; i < part_.size(0); ++i) {
      bool found = false;
      for (int64_t k = 0; k < whole_.size(0) && !found; ++k) {
        found = relative_distance(part_[i], whole_[k]) <= rounding_of(part_);
      }
      if (!found) return false;
    }
    return true;
  }

  at::Tensor whole_;
  at::Tensor part_;
  Rows rows_;
  int64_t all_;
};

std::string tell(const Batch& outputs, size_t leaf, const Leaves& leaves, double apart, Rows rows,
                 int64_t all) {
  std::ostringstream text;
  const std::string name = outputs.structure()->leaf_name(leaf);  // "[1]", where there are several
  text << "outputs" << name;
  if (leaves.compares()) {
    text << (name.empty() ? " have" : " has") << " shape " << outputs.leaves()[leaf].tensor.sizes()
         << " for " << all << " samples, one dimension more for them than a micro-batch can fill";
    return text.str();
  }
  text << " of " << (rows.size() == 1 ? "sample " : "samples ") << rows.begin;
  if (rows.size() > 1) text << " to " << rows.end - 1;
  text << (name.empty() ? " differ" : " differs") << " between a batch of " << all << " and one of "
       << rows.size();
  if (std::isfinite(apart)) text << " (by " << apart << " relative)";
  return text.str();
}

}  // namespace

Flattened flattened(const at::Tensor& whole, int64_t all, const at::Tensor& part, Rows rows) {
  const at::NoGradGuard no_grad;
  if (!comparable(whole) || !comparable(part)) return Flattened::no;
  return Leaves(whole, part, rows, all).order();
}

std::vector<int64_t> dims_of_rows(const RowsOfOutputs& whole, const RowsOfOutputs& part) {
  const at::NoGradGuard no_grad;
  const auto& here = part.outputs.leaves();
  const auto& there = whole.outputs.leaves();
  std::vector<int64_t> dims(here.size(), -1);
  for (size_t i = 0; i < here.size() && here.size() == there.size(); ++i) {
    if (is_same_number(there[i].tensor, here[i].tensor)) dims[i] = kOnce;
    if (!comparable(here[i].tensor) || !comparable(there[i].tensor)) continue;
    dims[i] = Leaves(there[i].tensor, here[i].tensor, part.rows, whole.rows.size()).dim();
  }
  return dims;
}

std::optional<std::string> values_per_sample(const RowsOfOutputs& whole,
                                             const RowsOfOutputs& part) {
  const auto here = std::ssize(part.outputs.leaves());
  const auto there = std::ssize(whole.outputs.leaves());
  const int64_t samples = whole.rows.size() - part.rows.size();
  if (samples <= 0 || there <= here || (there - here) % samples != 0) return std::nullopt;
  return "outputs hold " + std::to_string(there) + " values for " +
         std::to_string(whole.rows.size()) + " samples and " + std::to_string(here) + " for " +
         std::to_string(part.rows.size()) + ": a list with an entry for each sample";
}

std::optional<RowDifference> several_places(const RowsOfOutputs& whole, const RowsOfOutputs& part,
                                            const std::vector<bool>& compared) {
  const auto& here = part.outputs.leaves();
  const auto& there = whole.outputs.leaves();
  for (size_t i = 0; i < here.size() && here.size() == there.size(); ++i) {
    if (i < compared.size() && !compared[i]) continue;
    if (!comparable(here[i].tensor) || !comparable(there[i].tensor)) continue;
    const Leaves leaves(there[i].tensor, here[i].tensor, part.rows, whole.rows.size());
    if (here[i].tensor.dim() != there[i].tensor.dim() || !leaves.compares()) continue;
    return RowDifference{i, tell(whole.outputs, i, leaves, 0, part.rows, whole.rows.size())};
  }
  return std::nullopt;
}

std::vector<RowDifference> differences(const RowsOfOutputs& whole, const RowsOfOutputs& part,
                                       const std::vector<bool>& compared,
                                       const std::vector<int64_t>& dims) {
  const at::NoGradGuard no_grad;
  const auto& here = part.outputs.leaves();
  const auto& there = whole.outputs.leaves();
  std::vector<RowDifference> found;
  for (size_t i = 0; i < here.size() && here.size() == there.size(); ++i) {
    if (i < compared.size() && !compared[i]) continue;
    if (!comparable(here[i].tensor) || !comparable(there[i].tensor)) continue;
    const Leaves leaves(there[i].tensor, here[i].tensor, part.rows, whole.rows.size());
    const auto apart = leaves.apart(i < dims.size() ? dims[i] : -1);
    if (!apart || apart->most <= rounding_of(here[i].tensor)) continue;
    RowDifference differs{
        i, tell(whole.outputs, i, leaves, apart->most, part.rows, whole.rows.size())};
    differs.dim = apart->dim;
    if (apart->dim >= 0)
      differs.apart = relative_distances(leaves.part(), apart->there, apart->dim);
    if (!differs.apart.defined()) differs.apart = at::full({1}, kApart, at::kDouble);
    found.push_back(std::move(differs));
  }
  return found;
}

void explain(std::vector<RowDifference>& differences, const Batch& outputs, const Batch& rounded,
             double times) {
  constexpr double kTurned = 4, kFarAboveRounding = 10;
  const at::NoGradGuard no_grad;
  std::erase_if(differences, [&](RowDifference& differs) {
    if (differs.leaf >= rounded.leaves().size()) return false;
    const at::Tensor& still = outputs.leaves()[differs.leaf].tensor;
    const at::Tensor& other = rounded.leaves()[differs.leaf].tensor;
    if (!comparable(other)) return false;
    const double rounding = rounding_of(still);
    const bool rows = differs.dim >= 0 && still.sizes() == other.sizes();
    // Where sizes follow values there are other rows, which nobody can tell apart.
    const at::Tensor moved =
        rows ? relative_distances(still.resolve_conj().resolve_neg(),
                                  other.resolve_conj().resolve_neg(), differs.dim)
             : at::full({1}, relative_distance(still, other), at::kDouble);
    const double most = is_coarse(rounding) ? 1 : times;
    const at::Tensor turned =
        moved.ge(kFarAboveRounding * rounding).logical_and_(differs.apart.le(moved * kTurned));
    const at::Tensor by_chance = differs.apart.le(moved * most).logical_or_(turned);
    differs.apart = differs.apart.masked_fill(by_chance, 0.0);
    return differs.apart.max().item<double>() <= rounding;
  });
}

}  // namespace infinitybatch
