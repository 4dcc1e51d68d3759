#pragma once

#include <string>
#include <vector>

namespace infinitybatch::app {

/// ", did you mean --epochs?" where one of `known` is close to `written`; else nothing.
std::string suggestion(const std::string& written, const std::vector<std::string>& known);

}  // namespace infinitybatch::app
