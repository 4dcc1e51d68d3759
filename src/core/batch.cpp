#include <infinitybatch/core/batch.hpp>

#include <infinitybatch/core/errors.hpp>

#include <algorithm>

namespace infinitybatch {
namespace {

using StructurePtr = std::shared_ptr<const Structure>;

std::vector<Leaf> concatenate(std::vector<Batch>& children, std::vector<StructurePtr>& structures) {
  std::vector<Leaf> leaves;
  for (Batch& child : children) {
    structures.push_back(child.structure());
    std::move(child.leaves().begin(), child.leaves().end(), std::back_inserter(leaves));
  }
  return leaves;
}

}  // namespace

Batch::Batch() {
  static const StructurePtr empty = Structure::tuple({});
  structure_ = empty;
}

Batch::Batch(at::Tensor tensor) : leaves_(1), structure_(Structure::leaf()) {
  leaves_.front().tensor = std::move(tensor);
}

Batch::Batch(std::vector<Leaf> leaves, StructurePtr structure)
    : leaves_(std::move(leaves)), structure_(std::move(structure)) {
  if (leaves_.size() != structure_->leaf_count()) {
    throw InvalidArgument("a structure of " + std::to_string(structure_->leaf_count()) +
                          " leaves was given " + std::to_string(leaves_.size()));
  }
}

Batch Batch::tuple(std::vector<Batch> children) {
  std::vector<StructurePtr> structures;
  std::vector<Leaf> leaves = concatenate(children, structures);
  return {std::move(leaves), Structure::tuple(std::move(structures))};
}

Batch Batch::list(std::vector<Batch> children) {
  std::vector<StructurePtr> structures;
  std::vector<Leaf> leaves = concatenate(children, structures);
  return {std::move(leaves), Structure::list(std::move(structures))};
}

Batch Batch::dict(std::vector<std::pair<std::string, Batch>> children) {
  std::vector<std::string> keys;
  std::vector<Batch> values;
  for (auto& [key, value] : children) {
    keys.push_back(std::move(key));
    values.push_back(std::move(value));
  }
  std::vector<StructurePtr> structures;
  std::vector<Leaf> leaves = concatenate(values, structures);
  return {std::move(leaves), Structure::dict(std::move(keys), std::move(structures))};
}

Batch Batch::object(std::any value) {
  Batch batch{at::Tensor()};
  batch.leaves_.front().object = std::move(value);
  batch.leaves_.front().batch_dim = Leaf::kShared;
  return batch;
}

Batch Batch::shared() const {
  return with_batch_dim(Leaf::kShared);
}

Batch Batch::with_batch_dim(int64_t dim) const {
  if (dim < Leaf::kShared) {
    throw InvalidArgument("batch_dim is " + std::to_string(dim) +
                          "; count dimensions from the front, starting at 0");
  }
  Batch result = *this;
  for (Leaf& leaf : result.leaves_) {
    if (!leaf.tensor.defined()) continue;
    leaf.batch_dim = dim;
    leaf.marked = true;
  }
  return result;
}

bool Batch::is_tensor() const noexcept {
  return structure_->kind() == Structure::Kind::leaf && leaves_.front().tensor.defined();
}

const at::Tensor& Batch::tensor() const {
  if (!is_tensor()) {
    throw InvalidType("a single tensor was wanted, but this batch has " +
                      std::to_string(leaves_.size()) +
                      " leaves; take one with [index] or [\"key\"]");
  }
  return leaves_.front().tensor;
}

size_t Batch::size() const noexcept {
  return structure_->children().size();
}

Batch Batch::child(size_t index) const {
  const auto& children = structure_->children();
  if (index >= children.size()) {
    throw InvalidArgument("child " + std::to_string(index) + " of a batch that has " +
                          std::to_string(children.size()));
  }
  size_t first = 0;
  for (size_t i = 0; i < index; ++i) first += children[i]->leaf_count();
  const auto begin = leaves_.begin() + static_cast<std::ptrdiff_t>(first);
  const auto end = begin + static_cast<std::ptrdiff_t>(children[index]->leaf_count());
  return {std::vector<Leaf>(begin, end), children[index]};
}

Batch Batch::operator[](size_t index) const {
  return child(index);
}

Batch Batch::operator[](std::string_view key) const {
  const auto& keys = structure_->keys();
  const auto found = std::find(keys.begin(), keys.end(), key);
  if (found == keys.end()) {
    std::string known;
    for (const std::string& name : keys) known += (known.empty() ? "'" : ", '") + name + "'";
    throw InvalidArgument("this batch has no '" + std::string(key) + "'; it has " +
                          (known.empty() ? "no keys" : known));
  }
  return child(static_cast<size_t>(found - keys.begin()));
}

std::vector<at::Tensor> Batch::tensors() const {
  std::vector<at::Tensor> tensors;
  for (const Leaf& leaf : leaves_) {
    if (leaf.tensor.defined()) tensors.push_back(leaf.tensor);
  }
  return tensors;
}

}  // namespace infinitybatch
