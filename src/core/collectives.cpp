#include "core/collectives.hpp"

#include "core/foreign_exception.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <exception>
#include <utility>

namespace infinitybatch {
namespace {

/// Of the user code that runs in this thread.
struct Refusal {
  Refusal(std::string user, std::optional<std::string> reason)
      : who(std::move(user)), why(std::move(reason)), outer(std::exchange(innermost, this)) {}
  ~Refusal() { innermost = outer; }
  Refusal(const Refusal&) = delete;
  Refusal& operator=(const Refusal&) = delete;

  void rethrow() const {
    if (!op.empty()) throw Unsupported(who + " runs a collective (" + op + ") " + *why);
  }

  static thread_local Refusal* innermost;

  const std::string who;
  const std::optional<std::string> why;
  std::string op;  // the first that was refused
  Refusal* const outer;
};

thread_local Refusal* Refusal::innermost = nullptr;

thread_local int64_t begun = 0;
thread_local std::string last_begun;

/// Every operator of torch.distributed passes through a kernel at a key that no tensor switches
/// off, and which other operators fall through. Observers of operators (RecordFunction) cannot stop
/// one, and a dispatch mode would slow down all others.
void ask_first(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for (Refusal* here = Refusal::innermost; here != nullptr; here = here->outer) {
    if (!here->why) continue;
    if (here->op.empty()) here->op = op.operator_name().name;
    here->rethrow();
  }
  ++begun;
  last_begun = op.operator_name().name;
  static const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER,
                                         c10::DispatchKey::BackendSelect);
  op.redispatchBoxed(keys & below, stack);
}

TORCH_LIBRARY_IMPL(c10d, BackendSelect, library) {
  for (const char* name : {"_allgather_base_",
                           "_reduce_scatter_base_",
                           "allgather_",
                           "allgather_coalesced_",
                           "allgather_into_tensor_coalesced_",
                           "allreduce_",
                           "allreduce_coalesced_",
                           "alltoall_",
                           "alltoall_base_",
                           "barrier",
                           "broadcast_",
                           "gather_",
                           "monitored_barrier_",
                           "recv_",
                           "recv_any_source_",
                           "reduce_",
                           "reduce_scatter_",
                           "reduce_scatter_tensor_coalesced_",
                           "scatter_",
                           "send"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&ask_first>());
  }
}

}  // namespace

bool is_collective(std::string_view op) noexcept {
  return op.starts_with("c10d::") || op.starts_with("_c10d_functional::");
}

void without_collectives(std::string who, std::optional<std::string> why,
                         const std::function<void()>& run) {
  const Refusal refusal(std::move(who), std::move(why));
  try {
    run();
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    refusal.rethrow();
    throw;
  }
  refusal.rethrow();
}

CollectivesSince::CollectivesSince() : before_(begun) {}

bool CollectivesSince::any() const noexcept {
  return begun != before_;
}

void CollectivesSince::refuse_retry() const {
  if (!any()) return;
  throw Unsupported("the step has run a collective (" + last_begun +
                    ") and cannot be retried, after memory ran out or a replay gave other outputs: "
                    "other ranks would not answer a second time; give every rank more memory "
                    "(memory_budget=, or micro_batch_size= alone), or skip this step on all of "
                    "them: the next one is planned with what was learned");
}

}  // namespace infinitybatch
