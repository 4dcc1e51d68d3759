#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace infinitybatch::app {

/// "constant", "linear" and "cosine".
const std::vector<std::string>& schedule_names();

/// The learning rate of an epoch (from 0): a function of its number alone, so that training can go
/// on anywhere. Linear and cosine fall from `lr` towards 0, which comes after the last epoch.
double scheduled_lr(const std::string& schedule, double lr, int64_t epoch, int64_t epochs);

}  // namespace infinitybatch::app
