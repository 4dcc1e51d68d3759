#include "core/plain_leaves.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <optional>

namespace infinitybatch {
namespace {

std::optional<PlainLeaves>& of_binding() {
  static std::optional<PlainLeaves> known;
  return known;
}

/// What C++ writes, as text: of each type its own.
std::optional<std::string> own_text(const std::any& value) {
  if (const auto* text = std::any_cast<std::string>(&value)) return *text;
  if (const auto* number = std::any_cast<int64_t>(&value)) return std::to_string(*number);
  if (const auto* number = std::any_cast<int>(&value)) return std::to_string(*number);
  if (const auto* number = std::any_cast<double>(&value)) return std::to_string(*number);
  if (const auto* number = std::any_cast<float>(&value)) return std::to_string(*number);
  if (const auto* truth = std::any_cast<bool>(&value)) return *truth ? "true" : "false";
  return std::nullopt;
}

template <typename Number>
bool same_number(const std::any& left, const std::any& right) {
  const Number a = std::any_cast<Number>(left);
  const Number b = std::any_cast<Number>(right);
  return a == b || (a != a && b != b);
}

bool alike(const std::any& left, const std::any& right) {
  if (left.type() != right.type()) return false;
  if (left.type() == typeid(double)) return same_number<double>(left, right);
  if (left.type() == typeid(float)) return same_number<float>(left, right);
  if (const auto text = own_text(left)) return *text == *own_text(right);
  return !of_binding() || of_binding()->alike(left, right);
}

bool is_number(const std::any& value) {
  const std::type_info& type = value.type();
  if (type == typeid(int64_t) || type == typeid(int)) return true;
  if (type == typeid(double) || type == typeid(float)) return true;
  return value.has_value() && !own_text(value) && of_binding() && of_binding()->is_number(value);
}

std::string text_of(const std::any& value) {
  if (const auto text = own_text(value)) return *text;
  return of_binding() ? of_binding()->text(value) : "something";
}

std::string of_rows(int64_t rows) {
  return std::to_string(rows) + (rows == 1 ? " row" : " rows");
}

constexpr const char* kWayOut =
    "; a value that is no tensor stands once for the whole batch: return a tensor with one value "
    "for each sample, or let the loss, or who calls the model, compute it";

}  // namespace

void know_plain_leaves(const PlainLeaves& leaves) {
  of_binding() = leaves;
}

std::string identity_of_plain_leaves(const Batch& batch) {
  std::string text;
  for (const Leaf& leaf : batch.leaves()) {
    if (leaf.tensor.defined()) continue;
    const auto own = own_text(leaf.object);
    text += '|';
    if (own) {
      text += *own;
    } else if (leaf.object.has_value() && of_binding()) {
      text += of_binding()->identity(leaf.object);
    }
  }
  return text;
}

bool has_plain_numbers(const Batch& outputs) {
  return std::any_of(outputs.leaves().begin(), outputs.leaves().end(), [](const Leaf& leaf) {
    return !leaf.tensor.defined() && is_number(leaf.object);
  });
}

void check_plain_leaves(const std::vector<Batch>& parts, const std::vector<int64_t>& row_counts,
                        bool other_sizes) {
  if (parts.size() < 2) return;
  const Batch& first = parts.front();
  const bool one_size = std::all_of(row_counts.begin(), row_counts.end(),
                                    [&](int64_t count) { return count == row_counts.front(); });
  for (size_t i = 0; i < first.leaves().size(); ++i) {
    if (first.leaves()[i].tensor.defined()) continue;
    const std::any& value = first.leaves()[i].object;
    const std::string name = "outputs" + first.structure()->leaf_name(i);
    for (size_t part = 1; part < parts.size(); ++part) {
      if (parts[part].leaves().size() != first.leaves().size()) continue;
      const Leaf& other = parts[part].leaves()[i];
      if (other.tensor.defined() || alike(value, other.object)) continue;
      throw BatchError(name + " is " + text_of(value) + " for a micro-batch of " +
                       of_rows(row_counts.front()) + " and " + text_of(other.object) +
                       " for another of " + of_rows(row_counts[part]) + kWayOut);
    }
    if (!one_size || other_sizes || !is_number(value)) continue;
    if (text_of(value) != std::to_string(row_counts.front())) continue;
    throw BatchError(name + " is " + text_of(value) +
                     ", the number of rows of every micro-batch and not of all samples" + kWayOut +
                     ". Where it is a constant, give another micro_batch_size");
  }
}

}  // namespace infinitybatch
