#pragma once

#include <infinitybatch/step/options.hpp>

#include <cstdint>
#include <string>

namespace infinitybatch {

/// Calls `each(name, value)` for every option, in the order of the members.
template <typename AnyOptions, typename Each>
void for_each_option(AnyOptions& options, const Each& each) {
  // As many as there are members: a new one, which needs a line below, does not compile.
  [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = options;
  each("memory_budget", options.memory_budget);
  each("micro_batch_size", options.micro_batch_size);
  each("micro_batch_tokens", options.micro_batch_tokens);
  each("trim", options.trim);
  each("batch_dim", options.batch_dim);
  each("retained_micro_batches", options.retained_micro_batches);
  each("use_tapes", options.use_tapes);
  each("static_graph", options.static_graph);
  each("checkpoint_segments", options.checkpoint_segments);
  each("match_native_rng", options.match_native_rng);
  each("batch_coupling", options.batch_coupling);
  each("offload", options.offload);
  each("keep_outputs", options.keep_outputs);
  each("on_micro_batch", options.on_micro_batch);
  each("loss_scale", options.loss_scale);
  each("interrupt", options.interrupt);
}

/// `micro_batch_size` where `micro_batch_tokens` alone was given.
constexpr int64_t kAnyRows = int64_t{1} << 40;

/// The size that was given, for people: "micro_batch_size=32".
std::string given_size(const Options& options);

/// \throws InvalidArgument for `trim` or `micro_batch_tokens` out of range, or beside what they do
///         not go with
void check_trim(const Options& options);

/// Options of a VirtualBatch, once it is known that they go together.
/// \throws InvalidArgument for one out of range, or two that contradict each other
Options checked_options(Options options);

/// The same of a Wrap. \throws InvalidArgument also for one that means nothing there
Options checked_wrap_options(Options options);

}  // namespace infinitybatch
