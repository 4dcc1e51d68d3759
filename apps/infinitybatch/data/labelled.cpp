#include "data/labelled.hpp"

#include "errors.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace infinitybatch::app {
namespace {

// More classes than this in a labels file means that it holds something else.
constexpr int64_t kMostClasses = 65536;
constexpr int64_t kChunkRows = 1024;

/// A tensor over a vector that it keeps: as little the allocator's as mapped files are.
at::Tensor outside_allocator(std::vector<int64_t> values) {
  auto keep = std::make_shared<std::vector<int64_t>>(std::move(values));
  return at::from_blob(
      keep->data(), {static_cast<int64_t>(keep->size())}, [keep](void*) {},
      at::TensorOptions().dtype(at::kLong));
}

std::vector<int64_t> sample_shape(const Labelled& data) {
  const auto sizes = data.inputs.sizes();
  if (sizes.size() < 2 || sizes.size() > 4) {
    throw DataError(data.inputs_name + ": has " + std::to_string(sizes.size()) +
                    " dimensions; vectors are [n, features], images [n, height, width] or "
                    "[n, channels, height, width]");
  }
  std::vector<int64_t> shape(sizes.begin() + 1, sizes.end());
  if (shape.size() == 2) {
    shape.insert(shape.begin(), 1);
  }
  return shape;
}

void check(const Labelled& data) {
  if (!at::isIntegralType(data.labels.scalar_type(), /*includeBool=*/true)) {
    throw DataError(data.labels_name +
                    ": labels are not integers; classes are expected, as in "
                    "labels.astype('int64')");
  }
  if (data.labels.dim() != 1) {
    throw DataError(data.labels_name + ": labels have " + std::to_string(data.labels.dim()) +
                    " dimensions; one class per sample is expected, shape [n]");
  }
  sample_shape(data);  // throws where the inputs are no samples at all
  if (data.inputs.numel() == 0) {
    throw DataError(data.inputs_name + ": holds no samples");
  }
  if (data.inputs.size(0) != data.labels.size(0)) {
    throw DataError(data.inputs_name + " has " + std::to_string(data.inputs.size(0)) +
                    " samples but " + data.labels_name + " has " +
                    std::to_string(data.labels.size(0)) +
                    " labels; give files that are a pair, one label a sample");
  }
}

/// The labels as int64. \throws DataError where one is negative or absurdly large
std::vector<int64_t> classes_of(const Labelled& data) {
  const at::Tensor labels = data.labels.to(at::kLong).contiguous();
  const int64_t* begin = labels.const_data_ptr<int64_t>();
  std::vector<int64_t> values(begin, begin + labels.numel());
  for (size_t row = 0; row < values.size(); ++row) {
    if (values[row] < 0 || values[row] >= kMostClasses) {
      throw DataError(data.labels_name + ": label " + std::to_string(values[row]) + " of sample " +
                      std::to_string(row) + " is no class; classes are 0 to " +
                      std::to_string(kMostClasses - 1));
    }
  }
  return values;
}

/// With mean and deviation of all values of the given rows, made in slices, unless they are known.
Encoding encoding_of(const Labelled& data, const at::Tensor& rows, const Encoding* known) {
  double sum = 0;
  double squares = 0;
  double count = 0;
  for (int64_t begin = 0; begin < rows.size(0); begin += kChunkRows) {
    const int64_t end = std::min(begin + kChunkRows, rows.size(0));
    const at::Tensor part = data.inputs.index_select(0, rows.slice(0, begin, end)).to(at::kDouble);
    sum += part.sum().item<double>();
    squares += part.square().sum().item<double>();
    count += static_cast<double>(part.numel());
  }
  if (!std::isfinite(sum) || !std::isfinite(squares)) {
    throw DataError(data.inputs_name +
                    ": holds values that are not finite; replace them, as numpy.nan_to_num does");
  }
  if (known != nullptr) return *known;
  Encoding encoding = data.encoding;
  encoding.mean = sum / count;
  const double variance = std::max(squares / count - encoding.mean * encoding.mean, 0.0);
  encoding.deviation = variance > 0 ? std::sqrt(variance) : 1.0;
  return encoding;
}

Split make_split(const at::Tensor& inputs, const at::Tensor& labels, const at::Tensor& rows,
                 const Encoding& encoding, const std::vector<int64_t>& shape) {
  const double mean = encoding.mean;
  const double deviation = encoding.deviation;
  std::vector<int64_t> batch_shape = {-1};
  batch_shape.insert(batch_shape.end(), shape.begin(), shape.end());
  Split split;
  split.size = rows.size(0);
  split.inputs = [=](const at::Tensor& indices) {
    at::Tensor values = inputs.index_select(0, rows.index_select(0, indices)).to(at::kFloat);
    return values.sub_(mean).div_(deviation).reshape(batch_shape);
  };
  split.targets = [=](const at::Tensor& indices) {
    return labels.index_select(0, rows.index_select(0, indices));
  };
  return split;
}

at::Tensor all_rows(int64_t count) {
  std::vector<int64_t> rows(static_cast<size_t>(count));
  for (int64_t row = 0; row < count; ++row) {
    rows[static_cast<size_t>(row)] = row;
  }
  return outside_allocator(std::move(rows));
}

Dataset described(const std::string& name, const Labelled& data) {
  Dataset dataset;
  dataset.name = name;
  dataset.sample_shape = sample_shape(data);
  dataset.kind = dataset.sample_shape.size() == 1 ? SampleKind::vectors : SampleKind::images;
  return dataset;
}

/// Those that a model has names for are there, whether or not a sample has them.
int64_t count_classes(const std::vector<int64_t>& labels, const Encoding* known) {
  const int64_t count = *std::max_element(labels.begin(), labels.end()) + 1;
  return known == nullptr ? count : std::max(count, std::ssize(known->classes));
}

bool are_alike(const std::vector<int64_t>& labels) {
  return std::adjacent_find(labels.begin(), labels.end(), std::not_equal_to<>()) == labels.end();
}

}  // namespace

Dataset split_labelled(const std::string& name, const Labelled& data, double held_out,
                       const Encoding* known) {
  check(data);
  Dataset dataset = described(name, data);
  std::vector<int64_t> kept;
  std::vector<int64_t> held;
  for (int64_t row = 0; row < data.inputs.size(0); ++row) {
    const auto before = std::floor(static_cast<double>(row) * held_out);
    const auto after = std::floor(static_cast<double>(row + 1) * held_out);
    (after > before ? held : kept).push_back(row);
  }
  if (kept.empty()) {
    throw DataError(data.inputs_name + ": all " + std::to_string(held.size()) +
                    " samples would be held out and none trained on; choose a smaller --held-out");
  }
  std::vector<int64_t> labels = classes_of(data);
  dataset.classes = count_classes(labels, known);
  dataset.has_one_class = are_alike(labels);
  const at::Tensor classes = outside_allocator(std::move(labels));
  const at::Tensor train_rows = outside_allocator(std::move(kept));
  dataset.encoding = encoding_of(data, train_rows, known);
  dataset.train =
      make_split(data.inputs, classes, train_rows, dataset.encoding, dataset.sample_shape);
  dataset.held_out = make_split(data.inputs, classes, outside_allocator(std::move(held)),
                                dataset.encoding, dataset.sample_shape);
  return dataset;
}

Dataset join_labelled(const std::string& name, const Labelled& train, const Labelled& held_out,
                      const Encoding* known) {
  check(train);
  check(held_out);
  Dataset dataset = described(name, train);
  if (sample_shape(held_out) != dataset.sample_shape) {
    throw DataError(held_out.inputs_name + ": its samples have another shape than those of " +
                    train.inputs_name);
  }
  std::vector<int64_t> train_labels = classes_of(train);
  std::vector<int64_t> held_labels = classes_of(held_out);
  dataset.classes = std::max(count_classes(train_labels, known), count_classes(held_labels, known));
  dataset.has_one_class = are_alike(train_labels) && are_alike(held_labels) &&
                          train_labels.front() == held_labels.front();
  const at::Tensor train_rows = all_rows(train.inputs.size(0));
  const at::Tensor held_rows = all_rows(held_out.inputs.size(0));
  dataset.encoding = encoding_of(train, train_rows, known);
  dataset.train = make_split(train.inputs, outside_allocator(std::move(train_labels)), train_rows,
                             dataset.encoding, dataset.sample_shape);
  dataset.held_out = make_split(held_out.inputs, outside_allocator(std::move(held_labels)),
                                held_rows, dataset.encoding, dataset.sample_shape);
  return dataset;
}

}  // namespace infinitybatch::app
