#include "retained.hpp"

#include <infinitybatch/core/errors.hpp>

#include <string>

namespace infinitybatch {

void check_retained(int64_t micro_batches, bool size_is_given) {
  const std::string given = "retained_micro_batches is " + std::to_string(micro_batches);
  if (micro_batches < 0) {
    throw InvalidArgument(given + "; it is a number of micro-batches, 0 or more");
  }
  if (micro_batches > 0 && !size_is_given) {
    throw InvalidArgument(given +
                          " without micro_batch_size; a plan for a memory_budget keeps as many "
                          "graphs as fit");
  }
}

}  // namespace infinitybatch
