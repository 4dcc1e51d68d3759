#include <infinitybatch/tape/op_facts.hpp>

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

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

}  // namespace

const OpFacts* facts_of(const at::RecordFunction& op) {
  // Names point into the dispatcher's own schemas. An operator that was taken away may leave its
  // address to another one, so the text is compared too.
  thread_local std::unordered_map<const char*, const OpFacts*> known;
  const char* name = op.name();
  const auto found = known.find(name);
  if (found != known.end() && found->second->name() == name &&
      found->second->handle.operator_name().overload_name == op.overload_name()) {
    return found->second;
  }
  const std::optional<c10::OperatorName> full = op.operator_name();
  if (!full) return nullptr;
  const auto handle = c10::Dispatcher::singleton().findOp(*full);
  if (!handle || !handle->hasSchema()) return nullptr;
  return known[name] = keep(read(*handle));
}

}  // namespace infinitybatch::tape
