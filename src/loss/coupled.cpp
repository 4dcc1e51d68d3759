#include <infinitybatch/loss/coupled.hpp>

#include "loss/one_number.hpp"

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch {

CoupledLoss::CoupledLoss(std::string name, Value value, std::optional<at::Device> device)
    : name_(std::move(name)), value_(std::move(value)), device_(device) {
  if (!value_) throw InvalidArgument("the loss '" + name_ + "' has no function for its value");
}

at::Tensor CoupledLoss::value(const Batch& outputs, const Batch& targets) const {
  return one_number(value_(outputs, targets), "the loss '" + name_ + "'");
}

namespace losses {

CoupledLoss coupled(CoupledLoss::Value value, std::optional<at::Device> device) {
  return {"coupled", std::move(value), device};
}

}  // namespace losses
}  // namespace infinitybatch
