#include "commands/commands.hpp"
#include "commands/saved_model.hpp"
#include "interrupt.hpp"
#include "output/json_lines.hpp"
#include "output/numbers.hpp"
#include "output/terminal.hpp"
#include "store/atomic_file.hpp"
#include "train/evaluate.hpp"

#include <infinitybatch/memory/limit.hpp>

#include <ATen/Functions.h>

#include <optional>

namespace infinitybatch::app {
namespace {

/// A `.npy` file that grows row by row: what is predicted never lies in memory as a whole.
class NpyFile {
 public:
  NpyFile(const std::string& path, int64_t rows) : file_(path), rows_(rows) {}

  void add(const at::Tensor& values) {
    const at::Tensor rows = values.cpu().contiguous();
    if (shape_.empty()) begin(rows);
    file_.write(rows.const_data_ptr(), rows.nbytes());
  }
  void commit() { file_.commit(); }
  const std::vector<int64_t>& shape() const { return shape_; }

 private:
  void begin(const at::Tensor& first) {
    constexpr size_t kAlignment = 64;
    constexpr size_t kMagicBytes = 10;
    shape_ = first.sizes().vec();
    shape_[0] = rows_;
    std::string header = std::string("{'descr': '") +
                         (first.scalar_type() == at::kLong ? "<i8" : "<f4") +
                         "', 'fortran_order': False, 'shape': (";
    for (int64_t size : shape_) header += std::to_string(size) + ", ";
    header += "), }";
    header.append(kAlignment - (kMagicBytes + header.size() + 1) % kAlignment, ' ');
    header += '\n';
    const auto length = static_cast<uint16_t>(header.size());
    file_.write(std::string("\x93NUMPY\x01\x00", 8));
    file_.write(&length, sizeof length);
    file_.write(header);
  }

  AtomicFile file_;
  int64_t rows_;
  std::vector<int64_t> shape_;
};

void count(const at::Tensor& classes, std::vector<int64_t>& counts) {
  const at::Tensor here = classes.cpu().contiguous();
  const int64_t* const begin = here.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < here.numel(); ++i) ++counts.at(static_cast<size_t>(begin[i]));
}

}  // namespace

ExitCode run_predict(const Settings& settings) {
  watch_for_interrupts();
  const auto saved = open_saved_model(settings);
  const DataOptions& data = settings.data.data.empty() ? saved->description.data : settings.data;
  check_is_not_read("--output", settings.output, "--data", find_data(data.data).found.value_or(""));
  check_is_not_read("--output", settings.output, "--labels", data.labels);
  std::optional<memory::Limit> limit;
  if (const auto& budget = settings.training.step.memory_budget) {
    limit.emplace(*budget, settings.training.device);
  }
  const std::vector<std::string>& names = saved->data.encoding.classes;
  std::vector<int64_t> counts(names.size());
  NpyFile file(settings.output, saved->size());
  for (const Split* split : saved->splits) {
    evaluate(saved->network, *split, slice_of(settings), [&](const MicroBatch& rows) {
      const at::Tensor scores = rows.outputs.tensor();
      if (settings.scores) return file.add(scores);
      const at::Tensor classes = scores.argmax(1);
      file.add(classes);
      if (!names.empty()) count(classes, counts);
    });
  }
  file.commit();
  Terminal terminal(settings.json ? stderr : stdout);
  if (!saved->same_data) terminal.line(kOtherData);
  terminal.line(settings.output + ": " + (settings.scores ? "scores" : "classes") + " of " +
                with_commas(saved->size()) + " samples of " + saved->data.name + " (" +
                saved->samples + ")");
  std::string predicted;
  for (size_t i = 0; i < names.size(); ++i) {
    predicted += (i == 0 ? "" : ", ") + std::to_string(i) + " " + names[i];
    if (!settings.scores) predicted += " (" + with_commas(counts[i]) + ")";
  }
  if (!names.empty()) terminal.line("classes: " + predicted);
  if (settings.json) {
    write_json("predict", {{"file", settings.file},
                           {"output", settings.output},
                           {"data", saved->data.name},
                           {"of", saved->samples},
                           {"shape", file.shape()},
                           {"scores", settings.scores},
                           {"same_data", saved->same_data},
                           {"classes", names}});
  }
  return ExitCode::ok;
}

}  // namespace infinitybatch::app
