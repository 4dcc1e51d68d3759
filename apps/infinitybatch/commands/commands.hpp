#pragma once

#include "exit_code.hpp"
#include "options.hpp"

namespace infinitybatch::app {

/// `infinitybatch train`. Errors are thrown.
ExitCode run_train(Settings settings);

/// `infinitybatch plan`
ExitCode run_plan(Settings settings);

/// `infinitybatch verify`: ExitCode::error where a gradient is not exact.
ExitCode run_verify(Settings settings);

/// `infinitybatch bench`
ExitCode run_bench(Settings settings);

/// `infinitybatch evaluate`
ExitCode run_evaluate(const Settings& settings);

/// `infinitybatch predict`
ExitCode run_predict(const Settings& settings);

/// `infinitybatch export`
ExitCode run_export(const Settings& settings);

/// `infinitybatch doctor`: ExitCode::error where something is broken.
ExitCode run_doctor(const Settings& settings);

}  // namespace infinitybatch::app
