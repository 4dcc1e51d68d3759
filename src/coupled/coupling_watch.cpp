#include <infinitybatch/coupled/coupling_watch.hpp>

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>

#include <array>
#include <string_view>

namespace infinitybatch::coupled {
namespace {

thread_local CouplingWatch* innermost = nullptr;

enum class Kind { batch_norm, always, embedding, embedding_renorm, across_batch };

struct Watched {
  std::string_view op;
  Kind kind;
};

// Every spelling: the composite op that modules call, and the kernels that code may call directly.
constexpr std::array<Watched, 16> kWatched{{
    {"aten::batch_norm", Kind::batch_norm},
    {"aten::_batch_norm_impl_index", Kind::batch_norm},
    {"aten::native_batch_norm", Kind::batch_norm},
    {"aten::cudnn_batch_norm", Kind::batch_norm},
    {"aten::miopen_batch_norm", Kind::batch_norm},
    {"aten::_native_batch_norm_legit", Kind::batch_norm},
    {"aten::_batch_norm_with_update", Kind::always},
    {"aten::batch_norm_update_stats", Kind::always},
    {"aten::batch_norm_stats", Kind::always},
    {"aten::batch_norm_gather_stats", Kind::always},
    {"aten::batch_norm_gather_stats_with_counts", Kind::always},
    {"aten::embedding", Kind::embedding},
    {"aten::embedding_bag", Kind::embedding},
    {"aten::_embedding_bag", Kind::embedding},
    {"aten::embedding_renorm_", Kind::embedding_renorm},
    {"infinitybatch::across_batch", Kind::across_batch},
}};

/// `training` of every batch_norm and `scale_grad_by_freq` of every embedding is the first argument
/// that is a bool; its place differs between overloads.
bool first_bool(const c10::ArrayRef<const c10::IValue>& inputs) {
  for (const c10::IValue& input : inputs) {
    if (input.isBool()) return input.toBool();
  }
  return false;
}

bool couples(Kind kind, const c10::ArrayRef<const c10::IValue>& inputs) {
  switch (kind) {
    case Kind::batch_norm:
      return first_bool(inputs);
    case Kind::embedding:
      return first_bool(inputs) && inputs[0].isTensor() && inputs[0].toTensor().requires_grad();
    case Kind::always:
    case Kind::embedding_renorm:
    case Kind::across_batch:
      return true;
  }
  return false;
}

std::string reason(Kind kind) {
  switch (kind) {
    case Kind::embedding:
      return "scale_grad_by_freq divides by how often a word occurs in the whole batch";
    case Kind::embedding_renorm:
      return "max_norm rewrites rows of the weight during forward";
    case Kind::across_batch:
      return "its function asks for all samples";
    case Kind::batch_norm:
    case Kind::always:
      break;
  }
  return "BatchNorm in training mode normalises each sample by the whole batch";
}

}  // namespace

struct CouplingWatch::Inside : at::ObserverContext {};

bool CouplingWatch::at_work() noexcept {
  return innermost != nullptr;
}

CouplingWatch::Scope::Scope(CouplingWatch& watch)
    : outer_(innermost),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&on_op, &after_op)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {
  watch.inside_ = 0;
  innermost = &watch;
}

CouplingWatch::Scope::~Scope() {
  at::removeCallback(handle_);
  innermost = outer_;
}

std::unique_ptr<at::ObserverContext> CouplingWatch::on_op(const at::RecordFunction& op) {
  CouplingWatch* watch = innermost;
  const std::string_view name = op.name();
  if (watch == nullptr || name.size() < 15) return nullptr;
  if (name == "aten::instance_norm") {
    ++watch->inside_;
    return std::make_unique<Inside>();
  }
  if (name == "aten::embedding_renorm_") watch->remember(op.inputs()[0].toTensor());
  if (watch->inside_ > 0) return nullptr;
  for (const Watched& watched : kWatched) {
    if (name != watched.op || !couples(watched.kind, op.inputs())) continue;
    watch->seen_.push_back({std::string(name), reason(watched.kind)});
    ++watch->inside_;
    return std::make_unique<Inside>();
  }
  return nullptr;
}

void CouplingWatch::remember(const at::Tensor& weight) {
  for (const Write& write : writes_) {
    if (write.weight.is_same(weight)) return;
  }
  const at::NoGradGuard no_grad;
  writes_.push_back({weight, weight.detach().clone()});
}

void CouplingWatch::check(int64_t rows, int64_t total) const {
  if (seen_.empty() || rows == total) return;
  const CoupledOp& first = seen_.front();
  throw CouplingError(
      first.op,
      first.op + " couples the samples of a batch (" + first.why + "), so micro-batches of " +
          std::to_string(rows) + " cannot give the gradient of all " + std::to_string(total) +
          "; put the layer into eval mode, use one that does not couple (GroupNorm), make the "
          "budget large enough for one micro-batch, or accept another gradient with "
          "batch_coupling=\"per_micro_batch\"");
}

void CouplingWatch::undo_writes() const {
  const at::NoGradGuard no_grad;
  for (const Write& write : writes_) at::Tensor(write.weight).copy_(write.before);
}

void CouplingWatch::after_op(const at::RecordFunction&, at::ObserverContext* context) {
  if (innermost != nullptr && dynamic_cast<Inside*>(context) != nullptr) {
    --innermost->inside_;
  }
}

}  // namespace infinitybatch::coupled
