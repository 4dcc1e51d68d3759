#include "step/sorted_batch.hpp"

#include "step/mark_batch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <algorithm>
#include <cctype>
#include <numeric>
#include <sstream>
#include <utility>

namespace infinitybatch {
namespace {

constexpr const char* kTargets = "targets";

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

bool is_position(const std::string& name) {
  return std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; });
}

/// Whether a leaf is what an argument's name says: its position, its first keys or its last ones.
bool is_named(const std::vector<std::string>& path, const std::string& name) {
  if (is_position(name)) return path.front() == name;
  std::string joined;
  for (const std::string& key : path) joined += "." + key;
  joined += '.';
  const std::string wanted = "." + name + ".";
  return joined.starts_with(wanted) || joined.ends_with(wanted);
}

bool is_any(const std::vector<std::string>& path, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return is_named(path, name); });
}

/// Where one sequence's tensors lie.
class Search {
 public:
  /// \param number among the sequences
  Search(const TrimPadding& given, const Batch& inputs, const Batch& targets, SequenceInputs& known,
         size_t number)
      : given_(given), inputs_(inputs), targets_(targets), known_(known), number_(number) {}

  Trimming::Sequence find() {
    find_reference();
    Trimming::Sequence sequence;
    const Leaf& like = side().leaves()[reference_.leaf];
    sequence.full = like.tensor.size(reference_.dim);
    given_.lengths ? from_lengths(sequence) : from_mask(like, sequence);
    add_inputs(like, sequence);
    if (given_.targets || in_targets_) add_alike(targets_, like, sequence.targets, nullptr);
    return sequence;
  }
  /// Of an input that nobody has named.
  bool is_by_size(size_t leaf) const {
    return given_.inputs.empty() && (in_targets_ || leaf != reference_.leaf);
  }

 private:
  const Batch& side() const { return in_targets_ ? targets_ : inputs_; }

  static bool has_time(const Leaf& leaf) {
    return leaf.tensor.defined() && leaf.batch_dim != Leaf::kShared && leaf.places == 1 &&
           leaf.tensor.dim() >= 2 && leaf.batch_dim <= 1;
  }
  static int64_t time_of(const Leaf& leaf) { return leaf.batch_dim == 0 ? 1 : 0; }

  std::string names_of_inputs() const {
    std::string names;
    for (size_t i = 0; i < inputs_.leaves().size(); ++i) {
      const at::Tensor& tensor = inputs_.leaves()[i].tensor;
      if (!tensor.defined()) continue;
      names += (names.empty() ? "inputs" : ", inputs") + inputs_.structure()->leaf_name(i) + " " +
               shape_of(tensor);
    }
    return names;
  }

  /// What tells how long the sequence is, padding included.
  void find_reference() {
    in_targets_ = given_.mask.size() == 1 && given_.mask.front() == kTargets;
    if (!given_.mask.empty()) {
      const std::string& name = given_.mask.front();
      std::vector<size_t> found;
      for (size_t i = 0; !in_targets_ && i < inputs_.leaves().size(); ++i) {
        if (inputs_.leaves()[i].tensor.defined() && is_any(path_of(inputs_, i), given_.mask)) {
          found.push_back(i);
        }
      }
      for (size_t i = 0; in_targets_ && i < targets_.leaves().size(); ++i) {
        if (targets_.leaves()[i].tensor.defined()) found.push_back(i);
      }
      if (found.size() != 1) {
        throw BatchError("trim= names the mask '" + name + "', which " +
                         (found.empty() ? "is none of " : "may be several of ") +
                         (in_targets_ ? std::string("the targets") : names_of_inputs()) +
                         "; name one tensor of shape [samples, time]");
      }
      const Leaf& leaf = side().leaves()[found.front()];
      if (!has_time(leaf) || leaf.tensor.dim() != 2) {
        throw BatchError("the mask of trim=, '" + name + "', has shape " + shape_of(leaf.tensor) +
                         "; it has to be [samples, time], or [time, samples] with batch_dim=1");
      }
      reference_ = {found.front(), time_of(leaf)};
      return;
    }
    for (size_t i = 0; i < inputs_.leaves().size(); ++i) {
      const Leaf& leaf = inputs_.leaves()[i];
      const bool wanted = given_.inputs.empty() || is_wanted(i);
      if (!wanted || !has_time(leaf)) continue;
      reference_ = {i, time_of(leaf)};
      return;
    }
    throw BatchError("trim= has lengths and finds no input of shape [samples, time, ...] among " +
                     names_of_inputs() + "; name it, as in inputs=[\"input_ids\"]");
  }

  bool is_wanted(size_t leaf) const { return is_any(path_of(inputs_, leaf), given_.inputs); }

  void from_lengths(Trimming::Sequence& sequence) const {
    const at::Tensor given = given_.lengths(inputs_).detach().to(at::kCPU, at::kLong).contiguous();
    const int64_t samples = batch_size(inputs_, "inputs");
    if (given.dim() != 1 || given.size(0) != samples) {
      throw BatchError("lengths of trim= have shape " + shape_of(given) + " for " +
                       std::to_string(samples) + " samples; give one number for each");
    }
    sequence.left = given_.left;
    const auto* numbers = given.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < samples; ++i) {
      if (numbers[i] < 0 || numbers[i] > sequence.full) {
        throw BatchError("trim= gives sample " + std::to_string(i) + " the length " +
                         std::to_string(numbers[i]) + ", but there are " +
                         std::to_string(sequence.full) + " positions");
      }
      sequence.lengths.push_back(numbers[i] == 0 ? sequence.full : numbers[i]);
    }
  }

  /// Where padding stands on both sides, that behind is cut off.
  void from_mask(const Leaf& leaf, Trimming::Sequence& sequence) const {
    const at::Tensor mask = leaf.batch_dim == 0 ? leaf.tensor : leaf.tensor.t();
    const int64_t samples = mask.size(0);
    constexpr int64_t kElements = int64_t{1} << 16;
    const int64_t rows =
        std::clamp<int64_t>(kElements / std::max<int64_t>(sequence.full, 1), 1, samples);
    std::vector<int64_t> first;
    std::vector<int64_t> last;
    for (int64_t begin = 0; begin < samples; begin += rows) {
      const at::Tensor real = mask.narrow(0, begin, std::min(rows, samples - begin))
                                  .detach()
                                  .to(at::kCPU)
                                  .ne(given_.padding);
      const at::Tensor contiguous = real.contiguous();
      const auto* marks = contiguous.const_data_ptr<bool>();
      for (int64_t i = 0; i < real.size(0); ++i) {
        const bool* row = marks + i * sequence.full;
        const bool* end = row + sequence.full;
        const bool* from = std::find(row, end, true);
        const bool none = from == end;
        while (end != row && !end[-1]) --end;
        first.push_back(none ? 0 : from - row);
        last.push_back(none ? -1 : end - row);
      }
    }
    bool starts = true;
    bool ends = true;
    for (size_t i = 0; i < first.size(); ++i) {
      if (last[i] < 0) continue;
      starts = starts && first[i] == 0;
      ends = ends && last[i] == sequence.full;
    }
    sequence.left = !starts && ends;
    for (size_t i = 0; i < first.size(); ++i) {
      const int64_t length = sequence.left ? sequence.full - first[i] : last[i];
      sequence.lengths.push_back(last[i] < 0 ? sequence.full : length);
    }
  }

  void add_inputs(const Leaf& like, Trimming::Sequence& sequence) const {
    if (given_.inputs.empty()) {
      add_alike(inputs_, like, sequence.inputs, &sequence.unsure);
      return;
    }
    if (!in_targets_) sequence.inputs.push_back(reference_);
    for (size_t leaf = 0; leaf < inputs_.leaves().size(); ++leaf) {
      const Leaf& here = inputs_.leaves()[leaf];
      const bool added = !in_targets_ && leaf == reference_.leaf;
      if (!here.tensor.defined() || added || !is_wanted(leaf)) continue;
      for (int64_t dim = 0; dim < here.tensor.dim(); ++dim) {
        if (dim == here.batch_dim) continue;
        // It is named for that one.
        const bool time = has_time(here) && dim == time_of(here);
        const SequenceInputs::Told told = ask(inputs_, leaf, dim, sequence.full);
        if (here.tensor.size(dim) != sequence.full) continue;
        if (told == SequenceInputs::Told::stays && !time) continue;
        sequence.inputs.push_back({leaf, dim});
        if (told == SequenceInputs::Told::nothing && !time) sequence.unsure.push_back({leaf, dim});
      }
    }
  }

  /// All that have the same size in the same dimension, in each batch so far.
  void add_alike(const Batch& batch, const Leaf& like, std::vector<Trimming::Along>& found,
                 std::vector<Trimming::Along>* unsure) const {
    const int64_t full = like.tensor.size(reference_.dim);
    for (size_t i = 0; i < batch.leaves().size(); ++i) {
      const Leaf& leaf = batch.leaves()[i];
      if (!has_time(leaf) || leaf.batch_dim != like.batch_dim) continue;
      const SequenceInputs::Told told = ask(batch, i, reference_.dim, full);
      if (told == SequenceInputs::Told::stays) continue;
      found.push_back({i, reference_.dim});
      const bool named = &batch == &side() && i == reference_.leaf;
      if (unsure != nullptr && !named && told == SequenceInputs::Told::nothing) {
        unsure->push_back({i, reference_.dim});
      }
    }
  }

  SequenceInputs::Told ask(const Batch& batch, size_t leaf, int64_t dim, int64_t full) const {
    const std::string what = std::to_string(number_) +
                             (&batch == &targets_ ? "targets" : "inputs") +
                             batch.structure()->leaf_name(leaf) + "|" + std::to_string(dim);
    return known_.meet(what, full, batch.leaves()[leaf].tensor.size(dim));
  }

  const TrimPadding& given_;
  const Batch& inputs_;
  const Batch& targets_;
  SequenceInputs& known_;
  const size_t number_;
  bool in_targets_ = false;
  Trimming::Along reference_;
};

/// Of two sequences that are as long only names tell which tensor belongs to which.
void refuse_shared_leaves(const std::vector<Search>& searches,
                          std::vector<Trimming::Sequence>& sequences, const Batch& inputs) {
  for (size_t a = 0; a < sequences.size(); ++a) {
    for (size_t b = 0; b < sequences.size(); ++b) {
      if (a == b) continue;
      std::erase_if(sequences[a].inputs, [&](const Trimming::Along& here) {
        const auto same = [&](const Trimming::Along& there) {
          return there.leaf == here.leaf && there.dim == here.dim;
        };
        const auto& others = sequences[b].inputs;
        if (std::none_of(others.begin(), others.end(), same)) return false;
        const bool by_size = searches[a].is_by_size(here.leaf);
        if (by_size != searches[b].is_by_size(here.leaf)) return by_size;  // the other one names it
        throw BatchError("inputs" + inputs.structure()->leaf_name(here.leaf) +
                         " is as long as two masks of trim=, " + std::to_string(sequences[a].full) +
                         " positions; name what is padded with each mask, as in "
                         "trim_padding(mask=\"attention_mask\", inputs=[\"input_ids\"])");
      });
    }
  }
}

/// Positions that a row has in all sequences.
std::vector<int64_t> totals(const std::vector<Trimming::Sequence>& sequences) {
  std::vector<int64_t> total(sequences.front().lengths.size(), 0);
  for (const Trimming::Sequence& sequence : sequences) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += sequence.lengths[i];
  }
  return total;
}

}  // namespace

bool tells_lengths(const Options& options, const Batch& batch, size_t leaf, bool targets) {
  return std::any_of(options.trim.begin(), options.trim.end(), [&](const TrimPadding& each) {
    const bool of_targets = each.mask.size() == 1 && each.mask.front() == kTargets;
    return of_targets == targets && (targets || is_any(path_of(batch, leaf), each.mask));
  });
}

int64_t packed_from(int64_t begin, const std::vector<Trimming::Sequence>& sequences,
                    std::optional<int64_t> tokens, std::optional<int64_t> most) {
  const auto rows = static_cast<int64_t>(sequences.front().lengths.size()) - begin;
  std::vector<int64_t> longest(sequences.size(), 0);
  int64_t size = 0;
  for (; size < rows && (!most || size < *most); ++size) {
    int64_t positions = 0;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const int64_t here = sequences[i].lengths[static_cast<size_t>(begin + size)];
      longest[i] = std::max(longest[i], here);
      positions += longest[i];
    }
    if (tokens && size > 0 && (size + 1) * positions > *tokens) break;
  }
  return size;
}

std::vector<int64_t> packed(const std::vector<Trimming::Sequence>& sequences,
                            std::optional<int64_t> tokens, std::optional<int64_t> most) {
  const auto rows = static_cast<int64_t>(sequences.front().lengths.size());
  std::vector<int64_t> sizes;
  for (int64_t row = 0; row < rows; row += sizes.back()) {
    sizes.push_back(packed_from(row, sequences, tokens, most));
  }
  return sizes;
}

std::shared_ptr<Trimming> trimming_of(const Options& options, const Batch& inputs,
                                      const Batch& targets, SequenceInputs& known) {
  auto trimming = std::make_shared<Trimming>();
  std::vector<Search> searches;
  for (const TrimPadding& each : options.trim) {
    searches.emplace_back(each, inputs, targets, known, searches.size());
    trimming->sequences.push_back(searches.back().find());
  }
  refuse_shared_leaves(searches, trimming->sequences, inputs);
  for (Trimming::Sequence& sequence : trimming->sequences) {
    std::erase_if(sequence.unsure, [&](const Trimming::Along& each) {
      return std::find(sequence.inputs.begin(), sequence.inputs.end(), each) ==
             sequence.inputs.end();
    });
  }
  for (const Trimming::Sequence& sequence : trimming->sequences) {
    for (const auto& [leaf, dim] : sequence.inputs) {
      if (!inputs.leaves()[leaf].tensor.requires_grad()) continue;
      throw InvalidArgument("inputs" + inputs.structure()->leaf_name(leaf) +
                            " requires grad and would be trimmed; leave trim out, or detach it");
    }
  }
  const std::vector<int64_t> total = totals(trimming->sequences);
  std::vector<int64_t> order(total.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto split = [&] {
    return packed(trimming->sequences, options.micro_batch_tokens, options.micro_batch_size);
  };
  // One micro-batch of all is what forward would see natively, and it may combine its samples.
  if (!options.micro_batch_size || split().size() > 1) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return total[static_cast<size_t>(a)] > total[static_cast<size_t>(b)];
    });
  }
  trimming->sort_by(std::move(order));
  for (Trimming::Sequence& sequence : trimming->sequences) {
    std::vector<int64_t> sorted;
    for (const int64_t row : trimming->order) {
      sorted.push_back(sequence.lengths[static_cast<size_t>(row)]);
    }
    sequence.lengths = std::move(sorted);
  }
  if (options.micro_batch_size) trimming->sizes = split();
  constexpr size_t kFewest = 6;  // with less a planner has nothing to compare
  trimming->planned = !options.micro_batch_size && trimming->sequences.size() == 1 &&
                      trimming->order.size() >= kFewest;
  return trimming;
}

void refuse_coupled(const std::exception_ptr& error, const Problem& problem) {
  if (!problem.is_reordered()) std::rethrow_exception(error);
  try {
    std::rethrow_exception(error);
  } catch (const CouplingError& coupled) {
    throw CouplingError(
        coupled.op(),
        std::string(coupled.what()) +
            ". With trim= rows are sorted by length, and no budget makes them one micro-batch: in "
            "place of a larger budget, leave trim out, or give micro_batch_size=" +
            std::to_string(problem.batch_size()));
  }
}

void plan_by_length(Request& request, const Trimming& trimming) {
  request.reordered = trimming.reorders;
  if (!trimming.planned) return;
  const Trimming::Sequence& sequence = trimming.sequences.front();
  request.lengths = sequence.lengths;
  const bool padded_back =
      sequence.targets.empty() && sequence.outputs && !sequence.outputs->along.empty();
  request.signature += padded_back ? "|padded back from" : "|trimmed";
  if (padded_back) return;  // outputs are as long as the batch
  for (std::vector<int64_t>& leaf : request.dims) {
    for (int64_t& size : leaf) {
      if (size == sequence.full) size = 0;
    }
  }
}

}  // namespace infinitybatch
