#include "coupled/coupling_watch.hpp"

#include "core/collectives.hpp"
#include "core/tensor_memory.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Context.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace infinitybatch::coupled {
namespace {

enum class Kind { batch_norm, always, embedding, across_batch };

struct Watched {
  std::string_view op;
  Kind kind;
};

constexpr std::string_view kRenorm = "aten::embedding_renorm_";

// Every spelling: the composite op that modules call, and the kernels that code may call directly.
constexpr std::array<Watched, 15> kWatched{{
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
    {"infinitybatch::across_batch", Kind::across_batch},
}};

/// What the name of an op says.
struct Meaning {
  explicit Meaning(std::string_view name)
      : talks(is_collective(name)),
        renorms(name == kRenorm),
        is_instance_norm(name == "aten::instance_norm") {
    const auto found = std::find_if(kWatched.begin(), kWatched.end(),
                                    [&](const Watched& each) { return each.op == name; });
    if (found != kWatched.end()) watched = &*found;
  }

  const Watched* watched = nullptr;
  bool talks;  // to other ranks
  bool renorms;
  bool is_instance_norm;
};

/// Read once in a thread for each operator: a forward of a small layer has ten ops, and reading
/// twenty names for each took longer than all else that is done for them here.
Meaning meaning_of(const tape::SeenOp& op) {
  const tape::OpFacts* const facts = op.facts();
  if (facts == nullptr) return Meaning(op.name());
  thread_local ska::flat_hash_map<const tape::OpFacts*, Meaning> known;  // facts are never freed
  const auto found = known.find(facts);
  return found != known.end() ? found->second
                              : known.emplace(facts, Meaning(op.name())).first->second;
}

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
    case Kind::across_batch:
      return true;
  }
  return false;
}

std::string reason(Kind kind) {
  switch (kind) {
    case Kind::embedding:
      return "scale_grad_by_freq divides by how often a word occurs in the whole batch";
    case Kind::across_batch:
      return "its function asks for all samples";
    case Kind::batch_norm:
    case Kind::always:
      break;
  }
  return "BatchNorm in training mode normalises each sample by the whole batch";
}

}  // namespace

struct CouplingWatch::Inside : tape::OpContext {};

struct CouplingWatch::Renorming : tape::OpContext {};

struct CouplingWatch::Drawing : tape::OpContext {
  Drawing(std::string name, std::vector<Stand> stand)
      : op(std::move(name)), before(std::move(stand)) {}
  std::string op;
  std::vector<Stand> before;
};

void CouplingWatch::watch_draws(const std::vector<at::Device>& devices) {
  generators_ = {at::globalContext().defaultGenerator(at::kCPU)};
  for (const at::Device& device : devices) {
    if (!device.is_cpu()) generators_.push_back(at::globalContext().defaultGenerator(device));
  }
}

std::vector<CouplingWatch::Stand> CouplingWatch::stand_of(
    const std::vector<at::Generator>& generators) {
  std::vector<Stand> stand;
  for (const at::Generator& generator : generators) {
    stand.push_back({generator, GeneratorState(generator)});
  }
  return stand;
}

CouplingWatch::Context CouplingWatch::on_draw(const tape::SeenOp& op) {
  const tape::OpFacts* facts = op.facts();
  std::vector<at::Generator> generators = generators_;
  for (const c10::IValue& input : op.inputs()) {
    if (!input.isGenerator()) continue;
    generators.push_back(input.toGenerator());
    const bool known = std::any_of(given_.begin(), given_.end(), [&](const Stand& each) {
      return each.generator == generators.back();
    });
    if (!known) given_.push_back({generators.back(), GeneratorState(generators.back())});
  }
  if (drew_ || generators_.empty()) return nullptr;
  auto drawing = std::make_unique<Drawing>(facts->name(), stand_of(generators));
  drawing_ = true;
  return drawing;
}

void CouplingWatch::undo_draws() const {
  for (const Stand& given : given_) given.state.put_back(given.generator);
}

std::function<void()> CouplingWatch::hold_draws() const {
  std::vector<at::Generator> generators;
  for (const Stand& given : given_) generators.push_back(given.generator);
  const auto held = std::make_shared<std::vector<Stand>>(stand_of(generators));
  return [held] {
    for (const Stand& each : *held) each.state.put_back(each.generator);
  };
}

CouplingWatch::Scope::Scope(CouplingWatch& watch) : listening_(watch) {
  watch.inside_ = 0;
  watch.drawing_ = false;
  watch.renormed_->forget();
  watch.means_.clear();
}

CouplingWatch::Scope::~Scope() = default;

CouplingWatch::Context CouplingWatch::begin(const tape::SeenOp& op) noexcept {
  Context context;
  errors_.guard([&] { context = meet(op); });
  return context;
}

CouplingWatch::Context CouplingWatch::meet(const tape::SeenOp& op) {
  const Meaning meaning = meaning_of(op);
  const tape::OpFacts* const facts = op.facts();
  if (meaning.talks && !collective_) collective_ = op.name();
  // What an embedding's `max_norm` rewrites is renormed_'s to see.
  if (inside_ == 0 && !meaning.renorms && memory_.minds(facts)) {
    errors_.guard_part([&] { memory_.observe(op); });
  }
  if (inside_ == 0 && (meaning.is_instance_norm || !means_.empty())) {
    errors_.guard_part([&] { means_.observe(op); });
  }
  const bool reads = inside_ == 0 && !renormed_->empty();
  const bool lookup = reads && renormed_->is_lookup(op);
  if (reads && !lookup) on_read(op);
  if (!drawing_ && facts != nullptr && facts->draws) {
    if (auto drawing = on_draw(op)) return drawing;
  }
  if (meaning.is_instance_norm) return enter();
  if (inside_ > 0) return nullptr;
  if (meaning.renorms) return on_renorm(op);
  if (const Watched* const watched = meaning.watched;
      watched != nullptr && couples(watched->kind, op.inputs())) {
    if (watched->kind == Kind::batch_norm && is_parameter(op.inputs()[0])) return nullptr;
    seen_.push_back({std::string(watched->op), reason(watched->kind)});
    return enter();
  }
  return lookup ? enter() : nullptr;  // its inner ops read the weight as well
}

/// Ops inside of the one that begins are not looked at.
CouplingWatch::Context CouplingWatch::enter() {
  auto inside = std::make_unique<Inside>();
  ++inside_;
  return inside;
}

void CouplingWatch::know_parameters(const std::vector<NamedParameter>& parameters) {
  renormed_->know_parameters(parameters);
  parameters_.reserve(parameters.size());
  memory_.expect(parameters.size());
  for (const NamedParameter& parameter : parameters) {
    if (c10::StorageImpl* storage = storage_of(parameter.tensor)) parameters_.insert(storage);
    memory_.know(parameter.tensor, /*carried=*/false);
  }
}

bool CouplingWatch::is_parameter(const c10::IValue& value) const {
  return value.isTensor() && parameters_.count(storage_of(value.toTensor())) != 0;
}

CouplingWatch::Context CouplingWatch::on_renorm(const tape::SeenOp& op) {
  auto renorming = std::make_unique<Renorming>();
  memory_.leave_rescaled(op.inputs()[0].toTensor());
  if (auto why = renormed_->begin(op)) seen_.push_back({std::string(kRenorm), std::move(*why)});
  ++inside_;
  return renorming;
}

void CouplingWatch::on_read(const tape::SeenOp& op) {
  const bool known = std::any_of(seen_.begin(), seen_.end(),
                                 [](const CoupledOp& seen) { return seen.op == kRenorm; });
  if (known || std::string_view(op.name()) == kRenorm) return;
  if (auto why = renormed_->other_read(op)) {
    seen_.push_back({std::string(kRenorm), std::move(*why)});
  }
}

void CouplingWatch::check(int64_t rows, int64_t total) const {
  if (seen_.empty() || rows == total) return;
  const CoupledOp& first = seen_.front();
  throw CouplingError(
      first.op, first.op + " couples the samples of a batch (" + first.why +
                    "), so micro-batches of " + std::to_string(rows) +
                    " cannot give the gradient of all " + std::to_string(total) +
                    "; put the layer into eval mode, use one that does not couple (GroupNorm), "
                    "raise memory_budget or micro_batch_size until the batch is one micro-batch, "
                    "or accept another gradient with batch_coupling=\"per_micro_batch\"");
}

void CouplingWatch::end(const tape::SeenOp& /*op*/, tape::OpContext* context) noexcept {
  errors_.guard([&] { leave(*context); });
}

void CouplingWatch::leave(tape::OpContext& context) {
  if (dynamic_cast<Inside*>(&context) != nullptr) {
    --inside_;
  } else if (dynamic_cast<Renorming*>(&context) != nullptr) {
    --inside_;
    renormed_->end();
  } else if (auto* drawing = dynamic_cast<Drawing*>(&context)) {
    drawing_ = false;
    // One place has one order: nothing is drawn for it, but for the whole batch there is.
    bool drew = drawing->op == "aten::randperm";
    for (const Stand& before : drawing->before) {
      drew = drew || !(GeneratorState(before.generator) == before.state);
    }
    if (drew && !drew_) drew_ = drawing->op;
  }
}

}  // namespace infinitybatch::coupled
