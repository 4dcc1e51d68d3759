#pragma once

#include "options.hpp"

#include <CLI/CLI.hpp>

namespace infinitybatch::app {

/// The flags of each command, writing into `settings`, which must outlive `command`.
void add_train_flags(CLI::App& command, Settings& settings);
void add_evaluate_flags(CLI::App& command, Settings& settings);
void add_predict_flags(CLI::App& command, Settings& settings);
void add_export_flags(CLI::App& command, Settings& settings);
void add_plan_flags(CLI::App& command, Settings& settings);
void add_verify_flags(CLI::App& command, Settings& settings);
void add_bench_flags(CLI::App& command, Settings& settings);
void add_doctor_flags(CLI::App& command, Settings& settings);

}  // namespace infinitybatch::app
