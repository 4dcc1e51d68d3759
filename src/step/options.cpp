#include "step/options.hpp"

#include <infinitybatch/core/errors.hpp>

#include <string>
#include <utility>

namespace infinitybatch {
namespace {

void check_retained(const Options& options) {
  const std::string given =
      "retained_micro_batches is " + std::to_string(options.retained_micro_batches);
  if (options.retained_micro_batches < 0) {
    throw InvalidArgument(given + "; it is a number of micro-batches, 0 or more");
  }
  if (options.retained_micro_batches > 0 && !options.micro_batch_size) {
    throw InvalidArgument(given +
                          " without micro_batch_size; a plan for a memory_budget keeps as many "
                          "graphs as fit");
  }
}

void check_checkpoint_segments(const Options& options) {
  if (!options.checkpoint_segments) return;
  const std::string given =
      "checkpoint_segments is " + std::to_string(*options.checkpoint_segments);
  if (*options.checkpoint_segments < 2) {
    throw InvalidArgument(given + "; it is a number of segments, 2 or more");
  }
  if (!options.micro_batch_size) {
    throw InvalidArgument(given +
                          " without micro_batch_size; a plan for a memory_budget chooses "
                          "the segments itself");
  }
  if (options.retained_micro_batches > 0) {
    throw InvalidArgument(
        given +
        " together with retained_micro_batches, which keeps whole graphs; leave one of them out");
  }
  if (options.static_graph) {
    throw InvalidArgument(given +
                          " together with static_graph=True, which skips your forward and with it "
                          "the activations that segments keep; leave static_graph out");
  }
  if (!options.use_tapes) {
    throw InvalidArgument(given +
                          " together with use_tapes=False, but segments are pieces of the "
                          "recording of forward; leave one of them out");
  }
}

}  // namespace

void check_trim(const Options& options) {
  if (options.micro_batch_tokens && *options.micro_batch_tokens < 1) {
    throw InvalidArgument("micro_batch_tokens is " + std::to_string(*options.micro_batch_tokens) +
                          "; it is a number of positions, 1 or more");
  }
  if (options.trim.empty()) {
    if (!options.micro_batch_tokens) return;
    throw InvalidArgument(
        "micro_batch_tokens counts positions, and only trim tells how many a sample has; add "
        "trim=ib.trim_padding(mask=\"attention_mask\")");
  }
  for (const TrimPadding& each : options.trim) {
    if (each.mask.empty() != static_cast<bool>(each.lengths)) {
      throw InvalidArgument("trim needs a mask or lengths, and not both of them");
    }
    if (each.targets && options.keep_outputs) {
      throw InvalidArgument(
          "keep_outputs returns outputs at their full length, and trim with targets=True leaves "
          "them trimmed; leave one of them out, or read them in on_micro_batch");
    }
  }
  if (options.static_graph) {
    throw InvalidArgument(
        "static_graph=True reuses one recording for each number of rows, and trim gives rows other "
        "lengths; leave one of them out");
  }
  if (options.match_native_rng) {
    throw InvalidArgument(
        "match_native_rng=True gives the random numbers of the whole batch, padding included, "
        "which trim does not compute; leave one of them out");
  }
}

Options checked_options(Options options) {
  if (options.micro_batch_size && *options.micro_batch_size < 1) {
    throw InvalidArgument("micro_batch_size is " + std::to_string(*options.micro_batch_size) +
                          "; it is a number of samples, 1 or more");
  }
  check_trim(options);
  if (options.micro_batch_tokens && !options.micro_batch_size) {
    options.micro_batch_size = kAnyRows;  // a given size, in other words
  }
  check_retained(options);
  check_checkpoint_segments(options);
  if (options.static_graph && !options.use_tapes) {
    throw InvalidArgument(
        "static_graph=True reuses the recording of forward, which use_tapes=False forbids; leave "
        "one of them out");
  }
  if (options.static_graph && options.batch_coupling != BatchCoupling::exact) {
    throw InvalidArgument(
        "static_graph=True computes layers such as BatchNorm over the whole batch, which "
        "batch_coupling=\"per_micro_batch\" forbids; leave one of them out");
  }
  const bool own = !options.use_tapes || options.batch_coupling != BatchCoupling::exact;
  if (options.match_native_rng && own) {
    throw InvalidArgument(
        "match_native_rng=True needs the recording of forward and batch_coupling=\"exact\"; leave "
        "it out, or use_tapes=False and batch_coupling=\"per_micro_batch\"");
  }
  if (!options.micro_batch_size && !options.memory_budget) options.memory_budget = "auto";
  return options;
}

std::string given_size(const Options& options) {
  const auto number = [](const char* name, int64_t value) {
    return std::string(name) + "=" + std::to_string(value);
  };
  if (!options.micro_batch_tokens) {
    return number("micro_batch_size", options.micro_batch_size.value_or(0));
  }
  const std::string tokens = number("micro_batch_tokens", *options.micro_batch_tokens);
  if (options.micro_batch_size.value_or(kAnyRows) == kAnyRows) return tokens;
  return number("micro_batch_size", *options.micro_batch_size) + " and " + tokens;
}

Options checked_wrap_options(Options options) {
  if (options.checkpoint_segments) {
    throw InvalidArgument(
        "checkpoint_segments means nothing for wrap, which computes whole micro-batches; use "
        "VirtualBatch, or give a smaller micro_batch_size");
  }
  if (options.keep_outputs) {
    throw InvalidArgument(
        "keep_outputs means nothing for wrap, whose forward returns the outputs of all samples; "
        "leave it out");
  }
  if (options.loss_scale) {
    throw InvalidArgument(
        "loss_scale means nothing for wrap, which does not see the loss; multiply the loss by it "
        "before backward()");
  }
  for (const TrimPadding& each : options.trim) {
    if (!each.targets) continue;
    throw InvalidArgument(
        "targets=True of trim means nothing for wrap, which sees no targets and pads outputs back; "
        "leave it out");
  }
  return checked_options(std::move(options));
}

}  // namespace infinitybatch
