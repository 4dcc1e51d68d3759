#include "coupled/part_of_batch.hpp"

namespace infinitybatch::coupled {
namespace {

thread_local std::optional<PartOfBatch::Facts> now;

}  // namespace

PartOfBatch::PartOfBatch(std::optional<Facts> facts) : outer_(now) {
  now = facts && facts->rows < facts->total ? facts : std::nullopt;
}

PartOfBatch::~PartOfBatch() {
  now = outer_;
}

const std::optional<PartOfBatch::Facts>& PartOfBatch::at_work() noexcept {
  return now;
}

bool PartOfBatch::of_one() noexcept {
  return now && now->rows == 1;
}

}  // namespace infinitybatch::coupled
