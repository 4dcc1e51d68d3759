#include "execute/row_look.hpp"

#include "core/foreign_exception.hpp"
#include "core/out_of_memory.hpp"
#include "core/sample_dims.hpp"
#include "core/sample_rows.hpp"
#include "coupled/row_errors.hpp"
#include "execute/row_difference.hpp"

#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace infinitybatch {
namespace {

/// Forward does at other values of the parameters what it does not at its own: a check of a user's
/// fails, or numbers overflow.
struct OnlyAtItsOwnValues {};

bool refuses_rows(const std::exception_ptr& error) {
  return !is_out_of_memory(error) && coupled::may_be_of_rows(error);
}

/// Whether forward fails on these rows, once more.
bool fails(const RowLook& look, const Batch& inputs, int64_t rows) {
  try {
    look.run(inputs, rows, /*rounded=*/0);
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    if (!refuses_rows(std::current_exception())) throw;
    return true;
  }
  return false;
}

/// Forward on rows that no micro-batch has. It may refuse them, time and again; what it throws but
/// once is no matter of the rows. Nothing where it refuses them.
std::optional<TrialOutputs> attempt(const RowLook& look, const Batch& inputs, int64_t rows) {
  try {
    return look.run(inputs, rows, /*rounded=*/0);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    keep_foreign_exception(error);
    if (!refuses_rows(error)) throw;
    const bool moved = look.moved != nullptr && look.moved->is_on();
    if (moved) look.moved->off();
    if (fails(look, inputs, rows)) return std::nullopt;
    if (moved) {
      look.moved->on();
      if (fails(look, inputs, rows)) throw OnlyAtItsOwnValues();
    }
    std::rethrow_exception(error);
  }
}

bool is_finite(const Batch& outputs) {
  const at::NoGradGuard no_grad;
  for (const Leaf& leaf : outputs.leaves()) {
    const at::Tensor& tensor = leaf.tensor;
    if (!tensor.defined() || tensor.layout() != at::kStrided) continue;
    if (!tensor.is_floating_point() && !tensor.is_complex()) continue;
    if (!tensor.isfinite().all().item<bool>()) return false;
  }
  return true;
}

/// Which rows run alone: in the middle, where there are samples on both sides, and at both ends.
/// Single samples are many and cheap, so that more of them run, and where that leaves some out,
/// both halves, which have them all.
std::vector<Rows> parts(int64_t more, int64_t fewer, bool singles) {
  constexpr int64_t kMost = 16;
  std::vector<Rows> found;
  const auto add = [&](int64_t begin, int64_t count) {
    const auto known = [&](const Rows& rows) {
      return rows.begin == begin && rows.size() == count;
    };
    if (std::none_of(found.begin(), found.end(), known)) found.push_back({begin, begin + count});
  };
  add((more - fewer + 1) / 2, fewer);
  add(more - fewer, fewer);
  add(0, fewer);
  if (!singles) return found;
  const int64_t count = std::min(more, kMost);
  for (int64_t i = 1; i + 1 < count; ++i) add(i * (more - 1) / (count - 1), 1);
  if (more <= kMost) return found;
  add(0, more / 2);
  add(more / 2, more - more / 2);
  return found;
}

/// Whether what is thrown says that there is no room for so many rows, since this was made.
class Refusal {
 public:
  explicit Refusal(const RowLook& look) : look_(look) {}

  bool is(const std::exception_ptr& error) const {
    const bool refused = !look_.device.is_cpu() || memory::failed_allocations() != failed_;
    return is_out_of_memory(error) && refused;  // a user may throw the like
  }

 private:
  const RowLook& look_;
  int64_t failed_ = memory::failed_allocations();
};

/// What going back shows where outputs show nothing, in the memory that a budget allows: two
/// samples at least.
/// \throws what allocation throws where there is no room for these
std::optional<std::string> gradients_differ(const RowLook& look, const Batch& inputs, int64_t fewer,
                                            const std::vector<int64_t>& dims) {
  if (!look.gradients) return std::nullopt;
  look.goes_back = true;
  int64_t samples = std::max<int64_t>(2, fewer);
  while (true) {
    const Refusal refusal(look);
    try {
      return look.gradients->find(inputs, samples, dims);
    } catch (...) {
      if (refuses_rows(std::current_exception())) return std::nullopt;
      if (!refusal.is(std::current_exception()) || samples == 2) throw;
    }
    samples = std::max<int64_t>(2, samples / 2);
  }
}

/// Of the outputs of `all` rows those of some, in leaves that differ.
Batch rows_that_differ(const Batch& outputs, int64_t all, Rows here,
                       const std::vector<RowDifference>& differences,
                       const std::vector<int64_t>& dims) {
  std::vector<Leaf> leaves = outputs.leaves();
  for (const RowDifference& differs : differences) {
    if (differs.leaf >= leaves.size() || differs.dim < 0) continue;
    at::Tensor& tensor = leaves[differs.leaf].tensor;
    if (!tensor.defined() || tensor.dim() <= differs.dim) continue;
    const int64_t size = tensor.size(differs.dim);
    Leaf like;
    like.places = size / all;
    if (like.places == 0 || size != like.places * all) continue;  // sizes follow values
    like.interleaved = differs.leaf < dims.size() && dims[differs.leaf] == kInterleaved;
    tensor = like.places == 1 ? tensor.narrow(differs.dim, here.begin, here.size())
                              : rows_of(tensor, like, here);
  }
  return {std::move(leaves), outputs.structure()};
}

/// Strikes out what differs by rounding alone, which kernels of other batch sizes do otherwise: it
/// grows in what is chaotic, and turns a choice between two that are as good (a router's, a
/// codebook's, a maximum). What one rounding leaves alone another one turns.
///
/// All rows are rounded otherwise, not the few alone: a sample that is alone is as large as the
/// mean, or the median, that it is compared with.
/// \param whole outputs of these inputs
/// \param here  the rows that differ
void explain_by_rounding(const RowLook& look, const Batch& inputs, const RowsOfOutputs& whole,
                         Rows here, const std::vector<int64_t>& dims,
                         std::vector<RowDifference>& differences) {
  constexpr uint32_t kRoundings = 9;
  constexpr double kSmooth = 64;
  const int64_t all = whole.rows.size();
  for (uint32_t which = 1; which <= kRoundings && !differences.empty(); ++which) {
    std::optional<MovedValues::Nudge> parameters;
    if (look.moved != nullptr) parameters.emplace(*look.moved, which);
    std::optional<TrialOutputs> rounded;
    try {
      rounded = look.run(inputs, all, which);
    } catch (...) {
      keep_foreign_exception(std::current_exception());
      if (!refuses_rows(std::current_exception())) throw;
    }
    if (!rounded) continue;
    const auto some = [&](const Batch& outputs) {
      return rows_that_differ(outputs, all, here, differences, dims);
    };
    explain(differences, some(whole.outputs), some(rounded->outputs), which == 1 ? kSmooth : 1);
  }
}

/// Forward on `more` rows, and on fewer of them at several places.
RowLook::Seen compare(const RowLook& look, const Batch& inputs, int64_t more, int64_t fewer) {
  look.goes_back = false;
  const std::optional<TrialOutputs> of_whole = attempt(look, inputs, more);
  if (!of_whole) return {};
  const bool moved = look.moved != nullptr && look.moved->is_on();
  if (moved && !is_finite(of_whole->outputs)) throw OnlyAtItsOwnValues();
  const RowsOfOutputs whole{of_whole->outputs, {0, more}};
  RowLook::Seen seen;
  for (const Rows here : parts(more, fewer, look.singles)) {
    const Batch some = rows(inputs, here.begin, here.end);
    const std::optional<TrialOutputs> of_part = attempt(look, some, here.size());
    if (!of_part && here.size() != fewer) continue;  // forward refuses halves only
    if (!of_part) return {};
    const RowsOfOutputs part{of_part->outputs, here};
    if (auto listed = look.joins ? values_per_sample(whole, part) : std::nullopt) {
      seen.differs = std::move(listed);
      seen.listed = true;
      return seen;
    }
    // A draw of Python's for each sample gives others to the same rows.
    if (of_part->strayed || of_whole->strayed || of_part->foreign != of_whole->foreign) {
      const auto differs = several_places(whole, part, look.compared);
      return differs ? RowLook::Seen{differs->what, {}} : RowLook::Seen{};
    }
    seen.compared = true;
    if (seen.dims.empty()) seen.dims = dims_of_rows(whole, part);
    const std::vector<int64_t>& dims = look.dims.empty() ? seen.dims : look.dims;
    std::vector<RowDifference> apart = differences(whole, part, look.compared, dims);
    explain_by_rounding(look, inputs, whole, here, dims, apart);
    if (!apart.empty()) return {apart.front().what, {}};
  }
  if (auto differs = gradients_differ(look, inputs, fewer, seen.dims)) {
    return {std::move(differs), {}, /*backward=*/true};
  }
  return seen;
}

/// The same with parameters at other values, if they can be had.
RowLook::Seen compare(const RowLook& look, const std::vector<Rows>& here, int64_t fewer) {
  int64_t more = 0;
  for (const Rows rows : here) more += rows.size();
  Batch inputs;
  try {
    inputs = look.load(here);
  } catch (const BatchError&) {
    return {};  // pieces of a source that do not fit together: of other lengths
  }
  if (look.again || look.moved == nullptr || look.moved->empty()) {
    return compare(look, inputs, more, fewer);
  }
  try {
    look.moved->on();  // and so they stay: `find` moves them back
    return compare(look, inputs, more, fewer);
  } catch (const OnlyAtItsOwnValues&) {
    look.moved->off();
  }
  return compare(look, inputs, more, fewer);
}

/// Values go back to their own when a look is done.
struct MovedBack {
  MovedValues* moved;
  ~MovedBack() {
    if (moved != nullptr) moved->off();
  }
};

using LookedAt = std::vector<std::vector<Rows>>;

/// Where `more` rows lie side by side: samples behind the first ones may be what forward combines.
LookedAt neighbours(const RowLook& look, int64_t more) {
  LookedAt places;
  for (const int64_t begin : places_of_looks(look.batch_size, more)) {
    places.push_back({{begin, begin + more}});
    if (look.few) break;
  }
  return places;
}

/// Two samples near each other and far apart: those of one group (a mask's, a label's) that forward
/// combines may not be neighbours.
LookedAt pairs_of_samples(const RowLook& look) {
  LookedAt places{{{0, 2}}};
  if (look.few) return places;
  const int64_t last = look.batch_size - 1;
  const auto add = [&](int64_t first, int64_t second) {
    const std::vector<Rows> pair{{first, first + 1}, {second, second + 1}};
    const bool known = std::any_of(places.begin(), places.end(), [&](const auto& other) {
      return other.front().begin == first && other.back().end == second + 1;
    });
    if (first >= 0 && first < second && !known) places.push_back(pair);
  };
  for (const int64_t apart : {int64_t{1}, int64_t{2}, int64_t{3}, last / 2, last}) {
    for (const int64_t first : {int64_t{0}, (last - apart) / 2, last - apart}) {
      add(first, first + apart);
    }
  }
  return places;
}

/// \param some whether places without room are left out, if there is one that has it
RowLook::Seen compare_at(const RowLook& look, const LookedAt& places, int64_t fewer, bool some) {
  RowLook::Seen seen;
  std::exception_ptr without_room;
  for (const std::vector<Rows>& place : places) {
    const Refusal refusal(look);
    try {
      RowLook::Seen here = compare(look, place, fewer);
      if (here.differs && place.size() > 1) {
        *here.differs = "of samples " + std::to_string(place.front().begin) + " and " +
                        std::to_string(place.back().begin) + " alone, " + *here.differs;
      } else if (here.differs && place.front().begin > 0) {
        *here.differs = "behind the first " + std::to_string(place.front().begin) + " samples, " +
                        *here.differs;
      }
      if (here.differs || !seen.compared) seen = std::move(here);
      if (seen.differs) return seen;
    } catch (...) {
      without_room = std::current_exception();
      if (!some || !refusal.is(without_room)) throw;
    }
  }
  if (without_room && !seen.compared) std::rethrow_exception(without_room);
  return seen;
}

/// Of the room that a look on an accelerator has, what it may foresee to take.
constexpr double kShare = 0.8;

/// When what was not seen before has come.
std::string since(const RowsSeen& before) {
  if (before.looked == 0) return "";
  return " (step " + std::to_string(before.steps + 1) +
         " with such batches; nothing differed in step " + std::to_string(before.looked) +
         ", so gradients may be those of micro-batches since step " +
         std::to_string(before.looked + 1) + ")";
}

}  // namespace

std::vector<int64_t> places_of_looks(int64_t batch_size, int64_t rows) {
  constexpr int64_t kMost = 4;  // all of a large batch would be as dear as the step
  const int64_t count = std::min(kMost, (batch_size + rows - 1) / rows);
  std::vector<int64_t> begins{0};
  for (int64_t i = 1; i < count; ++i) begins.push_back(i * (batch_size - rows) / (count - 1));
  return begins;
}

void watch_peak(std::optional<memory::HighWater>& peak, at::Device device) {
  try {
    peak.emplace(device);
  } catch (const StateError&) {
    // Somebody else's allocator: no limit can be kept.
  }
}

int64_t room_for_a_look(int64_t peak, at::Device device) {
  const int64_t some = device.is_cpu() ? int64_t{256} << 10 : int64_t{16} << 20;
  const memory::Statistics now = memory::stats(device);
  const std::optional<int64_t> limit = device.is_cpu() ? now.limit : memory::Limit::measured();
  return limit ? *limit : std::max(peak, now.live + some);
}

void RowsSeen::note(int64_t batch_size, int64_t least, std::vector<int64_t> found) {
  if (dims.empty() || least < rows) dims = std::move(found);
  samples = rows == 0 ? batch_size : std::min(samples, batch_size);
  rows = rows == 0 ? least : std::min(rows, least);
  looked = ++steps;
}

CouplingError rows_differ(const RowLook::Seen& seen, int64_t batch_size, const RowsSeen& before,
                          const Batch& inputs) {
  if (seen.listed) {
    return CouplingError(
        "forward", *seen.differs +
                       ", which micro-batches do not give as the whole batch does. Return one "
                       "tensor with a row for each sample, as in torch.stack(outputs), and take it "
                       "apart behind the model (outputs.unbind()); or make the budget, or "
                       "micro_batch_size, large enough for one micro-batch");
  }
  const char* what = seen.backward ? "backward combines samples"
                                   : "forward combines samples, or depends on how many there are";
  return CouplingError(
      seen.backward ? "backward" : "forward",
      *seen.differs + since(before) + ": " + what +
          ", so micro-batches cannot give the gradient of all " + std::to_string(batch_size) + "." +
          marks_that_fit(inputs, "inputs", batch_size) +
          " Compute what needs all samples by across_batch; make the budget large enough for one "
          "micro-batch, or accept another gradient with batch_coupling=\"per_micro_batch\"");
}

RowLook::Seen RowLook::find_on_accelerator() const {
  // Nothing refuses what passes a limit there. Two samples, or one more than a micro-batch has, fit
  // where the step did, which kept a graph; what they took, and then what more rows took, says how
  // many more fit.
  int64_t more = std::min(batch_size, rows > 3 ? rows + 1 : int64_t{2});
  LookedAt places = neighbours(*this, more);
  LookedAt others;  // are looked at where there is no room for more rows
  if (more == 2 && batch_size > 2) places = pairs_of_samples(*this);
  const bool grows = peak && !few;
  if (grows) {
    others.assign(places.begin() + 1, places.end());
    places.resize(1);
  }
  Seen seen;
  int64_t last = 0, rise_of_last = 0;
  for (int64_t fewer = std::max<int64_t>(1, more / 2);; fewer = std::min(rows, more / 2)) {
    const int64_t live = memory::live(device);
    const memory::HighWater watch(device);
    Seen here;
    try {
      here = compare_at(*this, places, fewer, /*some=*/false);
    } catch (...) {
      // The device has less room than the budget.
      if (seen.grown > 0 && is_out_of_memory(std::current_exception())) {
        throw LookedTooFar{more};
      }
      throw;
    }
    if (here.differs) return here;
    if (seen.dims.empty()) seen.dims = here.dims;
    seen.compared = seen.compared || here.compared;
    if (more == batch_size || !grows) return seen;
    const int64_t rise = std::max<int64_t>(1, watch.peak() - live);
    const int64_t since = last == 0 ? rise : std::max<int64_t>(1, rise - rise_of_last);
    // What is allocated is rounded, and a kernel's workspace may appear: not to the last byte.
    const int64_t room = *peak - memory::live(device) - rise - rise / 8;
    const double fit = kShare * static_cast<double>(std::max<int64_t>(0, room)) *
                       static_cast<double>(more - last) / static_cast<double>(since);
    const int64_t next =
        std::min(most, more + static_cast<int64_t>(std::min(fit, double(batch_size - more))));
    if (next < more + (more + 1) / 2) break;
    others.clear();
    last = std::exchange(more, next);
    seen.grown = more;
    rise_of_last = rise;
    places = neighbours(*this, more);
  }
  if (others.empty()) return seen;
  Seen here = compare_at(*this, others, std::max<int64_t>(1, more / 2), /*some=*/false);
  return here.differs ? here : seen;
}

RowLook::Seen RowLook::find() const {
  const MovedBack back{moved};
  if (!device.is_cpu()) return find_on_accelerator();
  struct Sizes {
    int64_t more, fewer;
    LookedAt places;
  };
  std::vector<Sizes> sizes;
  const auto add = [&](int64_t more, int64_t fewer) {
    sizes.push_back({more, fewer, neighbours(*this, more)});
  };
  const std::optional<int64_t> given = memory::stats(at::kCPU).limit;  // by the user
  std::optional<memory::Limit> limit;
  const int64_t least = std::min(batch_size, rows == 1 ? int64_t{3} : rows + 1);
  if (peak && !few) {
    for (int64_t more = batch_size; more > least; more = (more + 1) / 2) add(more, rows);
    limit.emplace(*peak);
  }
  const size_t unlimited = sizes.size();
  add(least, rows);
  // Under a tight budget: what takes no more room than a micro-batch, or than two samples.
  for (int64_t more = rows; more > 2; more = (more + 1) / 2) add(more, more / 2);
  if (least > 2) sizes.push_back({2, 1, pairs_of_samples(*this)});
  int64_t needed = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i == unlimited) {
      limit.reset();
      if (given) limit.emplace(*given);  // to tell what it refuses
    }
    const Refusal refusal(*this);
    try {
      return compare_at(*this, sizes[i].places, sizes[i].fewer, sorted && i >= unlimited);
    } catch (...) {
      if (!refusal.is(std::current_exception())) throw;
      if (limit) needed = limit->refused();
      if (i + 1 < sizes.size()) continue;
      if (given && needed > *given) throw NoRoomToLook(needed, *given, sizes[i].more, goes_back);
      throw;
    }
  }
  return {};
}

NoRoomToLook::NoRoomToLook(int64_t needed, int64_t limit, int64_t samples, bool backward)
    : BudgetExceeded(needed, limit, std::nullopt,
                     backward ? "Comparing the gradient of 2 samples with those of each alone, "
                                "which tells whether backward combines them,"
                              : "Comparing forward on " + std::to_string(samples) +
                                    " samples with forward on fewer, which tells whether it "
                                    "combines them,") {}

}  // namespace infinitybatch
