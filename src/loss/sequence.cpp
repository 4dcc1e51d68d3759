#include <infinitybatch/loss/sequence.hpp>

#include "loss/arguments.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>

namespace infinitybatch::losses {
namespace {

struct CTCArguments {
  at::Tensor log_probs, target, input_lengths, target_lengths;
};

CTCArguments ctc_arguments(const std::string& name, const Batch& outputs, const Batch& targets) {
  const auto tensors =
      arguments(name, outputs, targets,
                {"(log_probs; target, input_lengths, target_lengths) or (log_probs, input_lengths; "
                 "target, target_lengths)",
                 4, 4, /*most_of_outputs=*/2});
  const bool lengths_from_model = outputs.tensors().size() == 2;
  return {tensors[0], tensors[lengths_from_model ? 2 : 1], tensors[lengths_from_model ? 1 : 2],
          tensors[3]};
}

void check_shapes(const std::string& name, const CTCArguments& given) {
  if (given.target.dim() == 1) {
    throw InvalidArgument(name + " was given concatenated targets of shape " +
                          shape_of(given.target) +
                          ", which cannot be split by samples; pad_ctc_targets(targets, "
                          "target_lengths) makes (N, S) of them");
  }
  if (given.log_probs.dim() == 3 && given.target.dim() == 2) {
    const int64_t samples = given.log_probs.size(1);
    const auto one_each = [&](const at::Tensor& lengths) {
      return lengths.dim() == 1 && lengths.size(0) == samples;
    };
    if (given.target.size(0) == samples && one_each(given.input_lengths) &&
        one_each(given.target_lengths)) {
      return;
    }
  }
  throw InvalidArgument(name +
                        " takes log_probs (T, N, C), target (N, S) and lengths (N), but got " +
                        shape_of(given.log_probs) + ", " + shape_of(given.target) + ", " +
                        shape_of(given.input_lengths) + ", " + shape_of(given.target_lengths));
}

}  // namespace

SeparableLoss ctc(CTCLossOptions options) {
  const std::string name = "ctc_loss";
  check_reduction(name, options.reduction);
  auto sum = [name, options](const Batch& outputs, const Batch& targets) {
    const CTCArguments given = ctc_arguments(name, outputs, targets);
    check_shapes(name, given);
    const bool mean = options.reduction == Reduction::mean;
    const at::Tensor loss = at::ctc_loss(
        given.log_probs, given.target, given.input_lengths, given.target_lengths, options.blank,
        mean ? at::Reduction::Mean : at::Reduction::Sum, options.zero_infinity);
    // torch's mean is that of the losses per target length, which its sum isn't.
    return mean ? loss.mul(static_cast<double>(given.log_probs.size(1))) : loss;
  };
  return {name, std::move(sum), count_samples(options.reduction)};
}

at::Tensor pad_ctc_targets(const at::Tensor& concatenated, const at::Tensor& target_lengths) {
  if (concatenated.dim() != 1 || target_lengths.dim() != 1 || target_lengths.size(0) == 0) {
    throw InvalidArgument("pad_ctc_targets takes (sum of target_lengths) and (N), but got " +
                          shape_of(concatenated) + " and " + shape_of(target_lengths));
  }
  const at::Tensor lengths = target_lengths.to(at::kCPU, at::kLong).contiguous();
  const at::IntArrayRef sizes(lengths.const_data_ptr<int64_t>(),
                              static_cast<size_t>(lengths.numel()));
  int64_t total = 0;
  for (int64_t size : sizes) {
    if (size < 0) {
      throw InvalidArgument("pad_ctc_targets: a target's length is " + std::to_string(size));
    }
    total += size;
  }
  if (total != concatenated.size(0)) {
    throw InvalidArgument("pad_ctc_targets: the lengths of " + std::to_string(sizes.size()) +
                          " targets add up to " + std::to_string(total) + ", but there are " +
                          std::to_string(concatenated.size(0)) + " labels");
  }
  return at::pad_sequence(at::split_with_sizes(concatenated, sizes), /*batch_first=*/true);
}

}  // namespace infinitybatch::losses
