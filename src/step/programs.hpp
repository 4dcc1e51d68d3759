#pragma once

#include <infinitybatch/core/model.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace infinitybatch {

/// Numbers the programs that one model's forward may run on tensors of the same shapes: a flag
/// among its arguments, or on the model, may lead it another way. What was learned of one program
/// (whether it mixes samples, how outputs follow them, recordings) says nothing of another.
class Programs {
 public:
  /// What a program is known by.
  struct Identity {
    uint64_t configuration = 0;  ///< `Model::configuration`
    std::string arguments;       ///< `BatchSource::arguments`
  };
  static Identity identity(const Model& model, const std::string& arguments);

  /// The number of the program that is to run now.
  int64_t number(const Identity& identity);
  /// Forward itself has left the model so: a counter that it raises is no other program.
  void left(uint64_t configuration) {
    left_ = configuration;
    left_by_ = last_;
  }

  void left_as_it_was() { left(asked_); }

  /// So many are known that more seem to come in every step (a schedule): time to forget them, and
  /// what was learned of them.
  bool full() const noexcept { return numbers_.size() >= kMost; }
  void clear() {
    numbers_.clear();
    configurations_.clear();
  }

 private:
  static constexpr size_t kMost = 64;
  std::map<uint64_t, int64_t> configurations_;
  std::map<std::pair<int64_t, std::string>, int64_t> numbers_;  // of these and arguments
  uint64_t asked_ = 0;                                          // last
  std::optional<uint64_t> left_;
  int64_t last_ = 0;  // numbers are never given twice
  int64_t left_by_ = 0;
  int64_t next_configuration_ = 0;
  int64_t next_ = 0;
};

}  // namespace infinitybatch
