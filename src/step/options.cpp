#include "step/options.hpp"

#include "step/virtual_batch_state.hpp"

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

Options checked_options(Options options) {
  if (options.micro_batch_size && *options.micro_batch_size < 1) {
    throw InvalidArgument("micro_batch_size is " + std::to_string(*options.micro_batch_size) +
                          "; it is a number of samples, 1 or more");
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
  return checked_options(std::move(options));
}

VirtualBatch::State::State(Model model, Loss loss, Options options)
    : model_(std::move(model)),
      loss_(std::move(loss)),
      options_(checked_options(std::move(options))),
      use_tapes_(options_.use_tapes) {}

}  // namespace infinitybatch
