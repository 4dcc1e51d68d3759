#pragma once

#include "data/dataset.hpp"
#include "models/network.hpp"
#include "options.hpp"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace infinitybatch::app {

/// What a command works on, in three lines: the data, the model, the batch and its memory.
std::vector<std::string> describe_job(const Dataset& data, const Settings& settings,
                                      const Network& network);

/// Where what waits for the rest of the batch is offloaded: "on disk (/var/tmp)", "on the host (up
/// to 64 MiB), then on disk (/var/tmp)".
std::string offload_place(const StepOptions& step, c10::Device device);

/// The job for machines; sizes in bytes.
nlohmann::ordered_json job_as_json(const Dataset& data, const Settings& settings,
                                   const Network& network);

}  // namespace infinitybatch::app
