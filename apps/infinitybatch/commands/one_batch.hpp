#pragma once

#include "data/dataset.hpp"
#include "models/network.hpp"
#include "options.hpp"
#include "output/terminal.hpp"

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <nlohmann/json.hpp>

#include <memory>
#include <optional>
#include <string>

namespace infinitybatch::app {

/// What the commands begin with that look at one batch of a network: plan, verify and bench.
class OneBatch {
 public:
  /// Opens the data, makes the network, and tells people what it works on. Ctrl-C counts from now
  /// on. \throws DataError, UsageError
  explicit OneBatch(Settings settings);
  OneBatch(const OneBatch&) = delete;
  OneBatch& operator=(const OneBatch&) = delete;

  Model model() const;
  /// The flags that VirtualBatch takes.
  Options options() const;
  /// Every line of `text`, for people.
  void tell(const std::string& text);
  /// With --json the last event of a command: the job's fields, then `fields`.
  void write_result(const std::string& event, const nlohmann::ordered_json& fields) const;

  bool json() const noexcept { return settings_.json; }
  const Network& network() const noexcept { return *network_; }
  Terminal& terminal() noexcept { return terminal_; }
  const BatchSource& inputs() const noexcept { return inputs_; }
  const BatchSource& targets() const noexcept { return targets_; }

 private:
  Settings settings_;  // with what the data decided
  Terminal terminal_;
  Dataset data_;  // the sources read from it
  std::shared_ptr<Network> network_;
  BatchSource inputs_;
  BatchSource targets_;
};

/// null for nothing.
template <typename Value>
nlohmann::ordered_json to_json(const std::optional<Value>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
}

}  // namespace infinitybatch::app
