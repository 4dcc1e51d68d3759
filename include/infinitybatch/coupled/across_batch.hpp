#pragma once

#include <ATen/core/TensorBody.h>

#include <functional>
#include <vector>

namespace infinitybatch {

/// A function of tensors whose first dimension is the batch, to one tensor with as many rows.
using AcrossBatchFunction = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

/// An op of your own inside of a model that needs all samples at once: minibatch statistics, a
/// balance term over experts, a contrastive head.
///
///     at::Tensor forward(const at::Tensor& x) {
///       const auto spread = [](const std::vector<at::Tensor>& all) {
///         return all[0].std(0, /*unbiased=*/false).mean().expand({all[0].size(0), 1});
///       };
///       return head(at::cat({x, across_batch(spread, {x})}, 1));
///     }
///
/// In ordinary runs this is `function(inputs)`. Inside of a step `function` is given the rows of
/// the whole logical batch, and each micro-batch gets its rows of the result; gradients of inputs
/// and of parameters that `function` uses are exact. It holds the inputs, the result and its graph
/// for the whole batch meanwhile.
/// \param function depends on its inputs and on parameters only: what else it captures is that of
///                 the first micro-batch. It may run on rows that are repeated, for a shape alone
/// \param inputs   (rows, …) each
/// \returns (rows of the first input, …)
/// \throws InvalidArgument where the result has another number of rows; in a step CouplingError
/// where an input does not come from the samples, or `function` uses another tensor of forward, or
/// fails for any rows of a micro-batch, repeated or not
at::Tensor across_batch(const AcrossBatchFunction& function, const std::vector<at::Tensor>& inputs);

namespace coupled {

/// Ops of a recording can only hold numbers: while it lives, functions that `across_batch` was
/// given in this thread are kept under one.
class AcrossBatchFunctions {
 public:
  AcrossBatchFunctions();
  ~AcrossBatchFunctions();
  AcrossBatchFunctions(const AcrossBatchFunctions&) = delete;
  AcrossBatchFunctions& operator=(const AcrossBatchFunctions&) = delete;
  /// Lets go of them. Numbers begin again, so that two recordings of one forward are alike.
  void forget();
  /// Lets go of them for good: it may live on beside later ones.
  void close();

 private:
  int64_t first_;
  bool open_ = true;
};

}  // namespace coupled
}  // namespace infinitybatch
