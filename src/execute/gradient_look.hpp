#pragma once

#include "core/row_range.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/model.hpp>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// Is shown the gradient of a parameter, by its place among them.
using ShowGradient = std::function<void(size_t, const at::Tensor&)>;

/// The gradients of parameters that some rows give must be the sum of what these rows give in two
/// parts: outputs do not show what an `autograd.Function` or a hook combines in backward alone.
struct GradientLook {
  /// Shows each gradient as it comes, undone; false where they cannot be compared.
  /// \param dims along which samples lie in each leaf of the outputs; -1: not known
  /// \param rounded see `RoundedOps`; 0: as it rounds
  std::function<bool(const Batch& inputs, Rows rows, const std::vector<int64_t>& dims,
                     const ShowGradient& show, uint32_t rounded)>
      run;
  int64_t numbers = 0;  ///< of all parameters
  /// What differs, for people.
  std::optional<std::string> find(const Batch& inputs, int64_t rows,
                                  const std::vector<int64_t>& dims) const;
};

/// Whether going back through the graph of these runs code of the user's; nothing where there is no
/// graph.
std::optional<bool> own_backward_of(const Batch& outputs);

/// Runs the graph behind `number` backward once and shows the gradients of these, where they end;
/// leaves with hooks of the user's, which are for sums, are left out. Nothing goes further, and
/// there is one gradient at a time.
void show_gradients(const std::vector<NamedParameter>& parameters, const at::Tensor& number,
                    const ShowGradient& show);

/// One number that depends on every output in its own way, equally for the same sample among
/// others: the sum of outputs, each times a factor that is a formula of its place.
/// \param dims along which samples lie in each leaf; -1: not known, left out
/// \param compared which leaves matter; empty: all
/// \return undefined where no output has a gradient
at::Tensor weighed(const Batch& outputs, const std::vector<int64_t>& dims,
                   const std::vector<bool>& compared, Rows rows);

}  // namespace infinitybatch
