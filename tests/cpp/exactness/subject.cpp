#include "exactness/subject.hpp"

#include <algorithm>

namespace infinitybatch::testing {

Subject::Subject(const Family& family, const CriterionCase& criterion)
    : module_(register_module("model", family.make(criterion.features))), head_(criterion.head) {}

Batch Subject::forward(const Batch& inputs) {
  const at::Tensor features = module_->features(inputs);
  forwards_.push_back(features.size(0));
  Batch outputs = head_(features);
  for (const Leaf& leaf : outputs.leaves()) {
    if (!leaf.tensor.defined()) continue;
    const at::IntArrayRef shape = leaf.tensor.sizes();
    ambiguous_ = ambiguous_ || std::count(shape.begin(), shape.end(), features.size(0)) > 1;
  }
  return outputs;
}

void Subject::drop_gradients() {
  for (at::Tensor& parameter : parameters()) parameter.mutable_grad().reset();
}

void cast(torch::nn::Module& module, at::ScalarType type) {
  const at::NoGradGuard no_grad;
  const auto change = [type](at::Tensor tensor) {
    if (tensor.is_complex()) {
      tensor.set_data(tensor.to(c10::toComplexType(type)));
    } else if (tensor.is_floating_point()) {
      tensor.set_data(tensor.to(type));
    }
  };
  for (const at::Tensor& parameter : module.parameters()) change(parameter);
  for (const at::Tensor& buffer : module.buffers()) change(buffer);
}

std::shared_ptr<Subject> make_subject(const Family& family, const CriterionCase& criterion,
                                      at::ScalarType type, uint64_t seed) {
  torch::manual_seed(seed);
  auto subject = std::make_shared<Subject>(family, criterion);
  cast(*subject, type);
  return subject;
}

namespace {

Batch to_type(Batch batch, at::ScalarType type) {
  for (Leaf& leaf : batch.leaves()) {
    if (leaf.tensor.defined() && leaf.tensor.is_floating_point())
      leaf.tensor = leaf.tensor.to(type);
  }
  return batch;
}

}  // namespace

Data make_data(const Family& family, const CriterionCase& criterion, int64_t samples,
               at::ScalarType type, uint64_t seed) {
  Draw inputs(samples, at::TensorOptions(at::kFloat), seed);
  Draw targets(samples, at::TensorOptions(at::kFloat), seed + 1);
  return {to_type(family.inputs(inputs), type), to_type(criterion.targets(targets), type)};
}

namespace {

template <typename Change>
Batch with_samples(Batch batch, Change change) {
  for (Leaf& leaf : batch.leaves()) {
    if (leaf.tensor.defined() && leaf.batch_dim != Leaf::kShared) leaf.tensor = change(leaf);
  }
  return batch;
}

}  // namespace

Data reversed(const Data& data) {
  const auto flip = [](const Leaf& leaf) { return leaf.tensor.flip(leaf.batch_dim); };
  return {with_samples(data.inputs, flip), with_samples(data.targets, flip)};
}

Data ordered(const Data& data, const std::vector<int64_t>& order) {
  const at::Tensor index = at::tensor(order, at::kLong);
  const auto select = [&](const Leaf& leaf) {
    return leaf.tensor.index_select(leaf.batch_dim, index);
  };
  return {with_samples(data.inputs, select), with_samples(data.targets, select)};
}

Data part(const Data& data, int64_t begin, int64_t end) {
  const auto cut = [&](const Leaf& leaf) { return leaf.tensor.slice(leaf.batch_dim, begin, end); };
  return {with_samples(data.inputs, cut), with_samples(data.targets, cut)};
}

Batch joined(const std::vector<Batch>& parts) {
  Batch result = parts.front();
  for (size_t i = 0; i < result.leaves().size(); ++i) {
    Leaf& leaf = result.leaves()[i];
    if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
    std::vector<at::Tensor> tensors;
    for (const Batch& one : parts) tensors.push_back(one.leaves()[i].tensor);
    leaf.tensor = at::cat(tensors, leaf.batch_dim);
  }
  return result;
}

}  // namespace infinitybatch::testing
