#include "tape/op_facts.hpp"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace infinitybatch::tape {
namespace {

// They give memory that nobody has written. `resize_` does where it grows.
constexpr std::array<std::string_view, 10> kRaw{
    "aten::empty",          "aten::empty_like",      "aten::empty_strided",
    "aten::empty_permuted", "aten::new_empty",       "aten::new_empty_strided",
    "aten::resize_",        "aten::empty_quantized", "aten::_empty_affine_quantized",
    "aten::resize_as_",
};

// Values of tensors that reach the host without a number in the schema's returns.
constexpr std::array<std::string_view, 8> kReadsValues{
    "aten::nonzero",  "aten::nonzero_numpy", "aten::masked_select",      "aten::_unique",
    "aten::_unique2", "aten::unique_dim",    "aten::unique_consecutive", "aten::argwhere",
};

constexpr std::array<std::string_view, 4> kForwardMode{
    "aten::_make_dual",
    "aten::_make_dual_copy",
    "aten::_unpack_dual",
    "aten::_fw_primal",
};

constexpr std::array<std::string_view, 3> kLookups{
    "aten::embedding",
    "aten::embedding_bag",
    "aten::_embedding_bag",
};

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_generator(const c10::Argument& argument) {
  const auto type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

bool is_number(const c10::Argument& returned) {
  switch (returned.type()->kind()) {
    case c10::TypeKind::BoolType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::ComplexType:
      return true;
    default:
      return false;
  }
}

std::unique_ptr<OpFacts> read(const c10::OperatorHandle& handle) {
  auto facts = std::make_unique<OpFacts>(handle);
  const c10::FunctionSchema& schema = handle.schema();
  facts->argument_count = schema.arguments().size();
  facts->return_count = schema.returns().size();
  facts->draws = handle.hasTag(at::Tag::nondeterministic_seeded);
  facts->writes_metadata = handle.hasTag(at::Tag::inplace_view);
  for (const c10::Argument& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    // Norms update these without saying so in their schema.
    const bool running = argument.name() == "running_mean" || argument.name() == "running_var";
    const bool written = (alias != nullptr && alias->isWrite()) || running;
    facts->written.push_back(written);
    facts->viewed.push_back(alias != nullptr && !written);
    facts->writes = facts->writes || written;
    facts->draws = facts->draws || is_generator(argument);
  }
  facts->leaves_raw = contains(kRaw, facts->name());
  facts->casts = handle.operator_name() == c10::OperatorName("aten::to", "dtype");
  facts->scales_rows = facts->name() == "aten::embedding_renorm_";
  facts->looks_up = contains(kLookups, facts->name());
  facts->forward_ad = contains(kForwardMode, facts->name());
  facts->reads_values = contains(kReadsValues, facts->name()) ||
                        (handle.hasTag(at::Tag::dynamic_output_shape) &&
                         facts->name() != "aten::index");  // by masks alone: see Program
  for (const c10::Argument& returned : schema.returns()) {
    facts->reads_values = facts->reads_values || is_number(returned);
  }
  return facts;
}

/// Tapes point to facts and may outlive the thread that read them: they are never given back.
const OpFacts* keep(std::unique_ptr<OpFacts> facts) {
  static std::mutex mutex;
  static auto* all = new std::vector<std::unique_ptr<OpFacts>>();
  const std::lock_guard<std::mutex> lock(mutex);
  return all->emplace_back(std::move(facts)).get();
}

/// Counts operators that are taken away: each may leave the address of its name to another one.
class Removals : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override {
    count.fetch_add(1, std::memory_order_release);
  }
  static inline std::atomic<uint64_t> count{0};
};

uint64_t operators_removed() {
  // The dispatcher tells as long as the process runs.
  static const auto* listening = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Removals>()));
  (void)listening;
  return Removals::count.load(std::memory_order_acquire);
}

/// Names point into the dispatcher's own schemas, one for each overload: while no operator is taken
/// away the address of a name is the operator.
struct Remembered {
  const char* name = nullptr;
  uint64_t removals = 0;
  const OpFacts* facts = nullptr;
};
constexpr size_t kRemembered = 1024;

size_t place_of(const char* name) {
  const auto address = reinterpret_cast<uintptr_t>(name);
  return ((address >> 4) ^ (address >> 14)) % kRemembered;
}

const OpFacts* look_up(const c10::OperatorName& full, const char* name, uint64_t removals) {
  thread_local std::unordered_map<const char*, const OpFacts*> known;
  thread_local uint64_t known_since = 0;
  if (std::exchange(known_since, removals) != removals) known.clear();
  if (const auto found = known.find(name); found != known.end()) return found->second;
  const auto handle = c10::Dispatcher::singleton().findOp(full);
  if (!handle || !handle->hasSchema()) return nullptr;
  return known[name] = keep(read(*handle));
}

}  // namespace

const OpFacts* facts_of(const at::RecordFunction& op) {
  thread_local std::array<Remembered, kRemembered> recent;
  const char* name = op.name();
  const uint64_t removals = operators_removed();
  Remembered& place = recent[place_of(name)];
  if (place.name == name && place.removals == removals) return place.facts;
  const std::optional<c10::OperatorName> full = op.operator_name();
  if (!full) return nullptr;
  const OpFacts* facts = look_up(*full, name, removals);
  if (facts != nullptr) place = {name, removals, facts};
  return facts;
}

}  // namespace infinitybatch::tape
