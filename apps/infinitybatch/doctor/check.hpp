#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <utility>

namespace infinitybatch::app {

enum class Health {
  ok,
  note,    ///< works; something could be better
  broken,  ///< something will fail
};

/// What one look at the installation found.
struct Check {
  explicit Check(std::string what) : name(std::move(what)) {}

  std::string name;
  Health health = Health::ok;
  std::string finding;
  std::string remedy;  ///< empty where nothing is to be done
  nlohmann::ordered_json values = nlohmann::ordered_json::object();  ///< numbers, for machines
};

// Software: doctor/software.cpp
Check check_versions();
Check check_allocator();
Check check_limit();
Check check_gradient();
Check check_data();
Check check_formats();

// The machine: doctor/machine.cpp
Check check_devices();
Check check_memory();
Check check_threads();
Check check_malloc();

}  // namespace infinitybatch::app
