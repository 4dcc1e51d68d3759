#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace infinitybatch::app {

/// Writes one event as one line of JSON to stdout, at once: readers may follow along. The first key
/// is "event". Numbers that JSON does not have (NaN, infinity) become null.
void write_json(const std::string& event, const nlohmann::ordered_json& fields);

}  // namespace infinitybatch::app
