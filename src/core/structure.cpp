#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/errors.hpp>

namespace infinitybatch {

using StructurePtr = std::shared_ptr<const Structure>;

StructurePtr Structure::leaf() {
  static const StructurePtr single = std::make_shared<Structure>();
  return single;
}

namespace {

size_t count_leaves(const std::vector<StructurePtr>& children) {
  size_t count = 0;
  for (const StructurePtr& child : children) count += child->leaf_count();
  return count;
}

}  // namespace

StructurePtr Structure::tuple(std::vector<StructurePtr> children) {
  auto structure = std::make_shared<Structure>();
  structure->kind_ = Kind::tuple;
  structure->leaf_count_ = count_leaves(children);
  structure->children_ = std::move(children);
  return structure;
}

StructurePtr Structure::list(std::vector<StructurePtr> children) {
  auto structure = std::make_shared<Structure>();
  structure->kind_ = Kind::list;
  structure->leaf_count_ = count_leaves(children);
  structure->children_ = std::move(children);
  return structure;
}

StructurePtr Structure::dict(std::vector<std::string> keys, std::vector<StructurePtr> children) {
  if (keys.size() != children.size()) throw InvalidArgument("a dict needs one key for each child");
  auto structure = std::make_shared<Structure>();
  structure->kind_ = Kind::dict;
  structure->leaf_count_ = count_leaves(children);
  structure->keys_ = std::move(keys);
  structure->children_ = std::move(children);
  return structure;
}

StructurePtr Structure::foreign(std::any tree, std::vector<std::string> names) {
  auto structure = std::make_shared<Structure>();
  structure->kind_ = Kind::foreign;
  structure->leaf_count_ = names.size();
  structure->keys_ = std::move(names);
  structure->tree_ = std::move(tree);
  return structure;
}

std::string Structure::leaf_name(size_t index) const {
  if (kind_ == Kind::leaf) return "";
  if (kind_ == Kind::foreign) return keys_.at(index);
  for (size_t i = 0; i < children_.size(); ++i) {
    const size_t count = children_[i]->leaf_count();
    if (index < count) {
      const std::string step =
          kind_ == Kind::dict ? "['" + keys_[i] + "']" : "[" + std::to_string(i) + "]";
      return step + children_[i]->leaf_name(index);
    }
    index -= count;
  }
  throw InvalidArgument("this structure has fewer leaves");
}

}  // namespace infinitybatch
