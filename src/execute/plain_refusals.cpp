#include "execute/plain_refusals.hpp"

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch {

void refuse_number(const std::string& name) {
  throw CouplingError(
      name, "forward changes '" + name +
                "', a number that it keeps in Python, by another amount for other samples: it "
                "counts samples, or depends on them, and micro-batches would leave another number "
                "than the whole batch; hand it in as an argument, make the budget large enough for "
                "one micro-batch, or allow it with batch_coupling=\"per_micro_batch\"");
}

void refuse_object(const std::string& name) {
  throw CouplingError(
      name, "forward depends on '" + name +
                "', which it makes or changes in Python, and makes another one of other samples, "
                "where the whole batch makes one of all: make it in front of the step, hand it in "
                "as an argument, make the budget large enough for one micro-batch, or allow it "
                "with batch_coupling=\"per_micro_batch\"");
}

void refuse_parameter(const std::string& name) {
  throw CouplingError(
      name, "forward puts another parameter into '" + name +
                "' in each call, and the gradient of each micro-batch goes to the one that it has "
                "made: make the budget large enough for one micro-batch, or write into the "
                "parameter that is there, as in with torch.no_grad(): self.weight.copy_(values)");
}

void refuse_nan(const std::string& name) {
  throw CouplingError(
      name, "forward makes the parameter '" + name +
                "' of its first batch, and the samples of one micro-batch give NaN in it: make the "
                "budget large enough for one micro-batch, or run forward once over the whole first "
                "batch in front of the first step, as in with torch.no_grad(): model(inputs)");
}

void refuse_generator(const std::string& name) {
  throw Unsupported(
      "forward advances '" + name +
      "', a generator or iterator that Python cannot copy, and each micro-batch would advance it "
      "once more, where the whole batch does once: keep its values in a list and count in an "
      "attribute (self.step += 1), use iter([...]) or itertools.count(), or call next() in front "
      "of the step");
}

}  // namespace infinitybatch
