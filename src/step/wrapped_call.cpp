#include "step/wrapped_call.hpp"

#include "core/batch_form.hpp"
#include "core/bits.hpp"
#include "step/admission.hpp"
#include "step/wrap_run.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {

Version Version::of(std::string what, const at::Tensor& tensor) {
  // Inference tensors count no versions; nothing can be said of them.
  return {std::move(what), tensor,
          tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version())};
}

bool Version::holds() const {
  return tensor.is_inference() || tensor._version() == version;
}

void Version::check() const {
  if (holds()) return;
  throw StateError(what + " of shape " + c10::str(tensor.sizes()) +
                   " has been changed in place since forward read it (version " +
                   std::to_string(tensor._version()) + ", expected " + std::to_string(version) +
                   "); run backward before changing it");
}

Findings Wrapped::findings_of(const BatchKind& kind) {
  const std::lock_guard<std::mutex> lock(mutex);
  return known.of(kind).findings;
}

void Wrapped::keep(const BatchKind& kind, const Findings& findings) {
  const std::lock_guard<std::mutex> lock(mutex);
  Findings& here = known.of(kind).findings;
  // A call inside of this one, or in another thread without gradients, may have found more.
  const Findings other = std::exchange(here, findings);
  here.examined = here.examined || other.examined;
  here.recordings_checked = here.recordings_checked || other.recordings_checked;
  here.reduce_checked = here.reduce_checked || other.reduce_checked;
  if (other.rows_seen.steps > here.rows_seen.steps) here.rows_seen = other.rows_seen;
}

StaticForward Wrapped::static_forward_of(const Problem& problem, const std::string& kind) {
  std::vector<const void*> owned = owned_by(problem);
  const std::lock_guard<std::mutex> lock(mutex);
  StaticForward& known = static_forwards[kind];
  const bool believed = known.tapes.owned == owned && !*known.tapes.outdated;
  if (believed && !*known.tapes.varies) return known;
  StaticForward anew;
  if (believed) anew.tapes.varies = known.tapes.varies;
  anew.tapes.owned = std::move(owned);
  return known = std::move(anew);
}

void Wrapped::keep_static_forward(const std::string& kind, StaticForward known) {
  const std::lock_guard<std::mutex> lock(mutex);
  static_forwards[kind] = std::move(known);
}

int64_t room_for_left(const Wrapped& wrapped, at::Device device) {
  constexpr int64_t kWithoutBudget = int64_t{64} << 20;
  if (!wrapped.joins_left) return 0;
  const auto& budget = wrapped.options.memory_budget;
  return budget ? budget->resolve(device) / 16 : kWithoutBudget;
}

std::string kind_of_forward(const BatchKind& of_batch, const Problem& problem,
                            const std::vector<size_t>& wanted_inputs, bool recording) {
  std::string kind = of_batch.program + of_batch.lengths + "|wants ";
  for (const size_t index : wanted_inputs) kind += std::to_string(index) + ",";
  for (const NamedParameter& each : problem.parameters)
    kind += each.tensor.requires_grad() ? '1' : '0';
  if (!recording) kind += c10::InferenceMode::is_enabled() ? "|inference" : "|no graph";
  return kind;
}

int64_t Wrapped::begin_program(const std::string& arguments) {
  const Programs::Identity identity = Programs::identity(model, arguments);
  const std::lock_guard<std::mutex> lock(mutex);
  if (programs.full()) {
    programs.clear();
    static_forwards.clear();
    known.forget_programs();
  }
  return programs.number(identity);
}

void Wrapped::end_program(const std::string& arguments) {
  const Programs::Identity identity = Programs::identity(model, arguments);
  const std::lock_guard<std::mutex> lock(mutex);
  programs.left(identity.configuration);
}

void Wrapped::note_recorded(const NodeRange& nodes) {
  constexpr size_t kMost = 64;
  if (!options.static_graph || nodes.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex);
  if (recorded.size() == kMost) recorded.erase(recorded.begin());
  recorded.push_back(nodes);
}

std::shared_ptr<offload::Store> Wrapped::store_on(at::Device device) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!store || store->device() != device) store = make_store(options.offload, device);
  return store;
}

OneThread::OneThread(Wrapped& wrapped) : wrapped_(wrapped) {
  const std::lock_guard<std::mutex> lock(wrapped.mutex);
  if (wrapped.calls_at_work > 0 && wrapped.worker != std::this_thread::get_id()) {
    throw StateError(
        "this wrapped model is at work in another thread; one thread at a time may call it with "
        "gradients or run backward through it: take turns (a lock around both), or give each "
        "thread a model of its own");
  }
  wrapped.worker = std::this_thread::get_id();
  ++wrapped.calls_at_work;
}

OneThread::~OneThread() {
  const std::lock_guard<std::mutex> lock(wrapped_.mutex);
  --wrapped_.calls_at_work;
}

StoreUse::StoreUse(Wrapped& wrapped, const offload::Store* store) {
  if (store == nullptr) return;
  if (wrapped.copying.exchange(true)) {
    throw StateError(
        "this wrapped model is at work already, in another thread; where what waits is offloaded "
        "one "
        "thread at a time may call it or run backward through it; give offload=\"never\" where "
        "memory "
        "allows, or wrap the model once for each thread");
  }
  wrapped_ = &wrapped;
}

StoreUse::~StoreUse() {
  if (wrapped_ != nullptr) wrapped_->copying = false;
}

WrappedCall::WrappedCall() = default;
WrappedCall::~WrappedCall() = default;

bool WrappedCall::made(const torch::autograd::Node& node) const {
  if (nodes.contains(node)) return true;
  if (!wrapped->options.static_graph) return false;
  const std::lock_guard<std::mutex> lock(wrapped->mutex);
  return std::any_of(wrapped->recorded.begin(), wrapped->recorded.end(),
                     [&](const NodeRange& range) { return range.contains(node); });
}

void WrappedCall::add_offloaded(const OffloadedMeanwhile& copies) {
  offloaded += copies;
  if (!report) return;
  const std::lock_guard<std::mutex> lock(wrapped->mutex);
  report->offloaded_bytes = offloaded.bytes;
  report->offload_seconds = offloaded.seconds;
}

Batch WrappedCall::micro_batch(Rows part) const {
  Batch micro = without_graph(to_device(rows(inputs, part.begin, part.end), device));
  for (const size_t index : wanted_inputs) {
    const at::Tensor& leaf = micro.leaves()[index].tensor;
    leaf.set_requires_grad(true);
    // Nothing but this call's node leads from here to the caller's tensor.
    leaf.register_hook([at_work = at_work](const at::Tensor&) {
      if (!*at_work) refuse_left_of_input_in_engine();
    });
  }
  return micro;
}

}  // namespace infinitybatch
