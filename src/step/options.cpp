#include "retained.hpp"
#include "virtual_batch_state.hpp"

#include <utility>

namespace infinitybatch {

VirtualBatch::State::State(Model model, Loss loss, Options options)
    : model_(std::move(model)), loss_(std::move(loss)), options_(std::move(options)) {
  if (options_.micro_batch_size && *options_.micro_batch_size < 1) {
    throw InvalidArgument("micro_batch_size is " + std::to_string(*options_.micro_batch_size) +
                          "; it is a number of samples, 1 or more");
  }
  check_retained(options_.retained_micro_batches, options_.micro_batch_size.has_value());
  check_checkpoint_options();
  if (!options_.micro_batch_size && !options_.memory_budget) options_.memory_budget = "auto";
  use_tapes_ = options_.use_tapes;
  if (options_.static_graph && !options_.use_tapes) {
    throw InvalidArgument(
        "static_graph=True reuses the recording of forward, which use_tapes=False forbids; leave "
        "one of them out");
  }
  if (options_.static_graph && options_.batch_coupling != BatchCoupling::exact) {
    throw InvalidArgument(
        "static_graph=True computes layers such as BatchNorm over the whole batch, which "
        "batch_coupling=\"per_micro_batch\" forbids; leave one of them out");
  }
  const bool own = !options_.use_tapes || options_.batch_coupling != BatchCoupling::exact;
  if (options_.match_native_rng && own) {
    throw InvalidArgument(
        "match_native_rng=True needs the recording of forward and batch_coupling=\"exact\"; leave "
        "it out, or use_tapes=False and batch_coupling=\"per_micro_batch\"");
  }
}

void VirtualBatch::State::check_checkpoint_options() const {
  if (!options_.checkpoint_segments) return;
  const std::string given =
      "checkpoint_segments is " + std::to_string(*options_.checkpoint_segments);
  if (*options_.checkpoint_segments < 2) {
    throw InvalidArgument(given + "; it is a number of segments, 2 or more");
  }
  if (!options_.micro_batch_size) {
    throw InvalidArgument(given +
                          " without micro_batch_size; a plan for a memory_budget chooses "
                          "the segments itself");
  }
  if (options_.retained_micro_batches > 0) {
    throw InvalidArgument(
        given +
        " together with retained_micro_batches, which keeps whole graphs; leave one of them out");
  }
  if (options_.static_graph) {
    throw InvalidArgument(given +
                          " together with static_graph=True, which skips your forward and with it "
                          "the activations that segments keep; leave static_graph out");
  }
  if (!options_.use_tapes) {
    throw InvalidArgument(given +
                          " together with use_tapes=False, but segments are pieces of the "
                          "recording of forward; leave one of them out");
  }
}

}  // namespace infinitybatch
