#pragma once

#include <infinitybatch/step/virtual_batch.hpp>

#include <pybind11/pybind11.h>

namespace infinitybatch::python {

/// By hand: std::variant's own conversion wants types that can be made of nothing.
inline Loss to_loss(const pybind11::object& loss) {
  if (pybind11::isinstance<CoupledLoss>(loss)) return loss.cast<CoupledLoss>();
  return loss.cast<SeparableLoss>();
}

}  // namespace infinitybatch::python
