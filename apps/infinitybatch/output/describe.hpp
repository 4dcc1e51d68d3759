#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

#include "data/dataset.hpp"
#include "models/network.hpp"
#include "options.hpp"

namespace infinitybatch::app {

/// What a command works on, in three lines: the data, the model, the batch and its memory.
std::vector<std::string> describe_job(const Dataset& data, const Settings& settings,
                                      const Network& network);

/// The same for machines; sizes in bytes.
nlohmann::ordered_json job_as_json(const Dataset& data, const Settings& settings,
                                   const Network& network);

}  // namespace infinitybatch::app
