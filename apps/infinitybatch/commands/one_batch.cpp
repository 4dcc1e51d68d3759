#include "commands/one_batch.hpp"

#include "interrupt.hpp"
#include "output/describe.hpp"
#include "output/json_lines.hpp"
#include "train/network_in_budget.hpp"

#include <infinitybatch/step/module.hpp>

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include <sstream>
#include <utility>

namespace infinitybatch::app {

OneBatch::OneBatch(Settings settings)
    : settings_(std::move(settings)), terminal_(settings_.json ? stderr : stdout) {
  watch_for_interrupts();
  const auto& training = settings_.training;
  data_ = load_dataset(settings_.data, settings_.model.context);
  at::manual_seed(training.seed);
  // verify and bench tell themselves what a budget has no room for.
  const bool plans = settings_.command == Command::plan;
  network_ = make_network_in_budget(settings_.model, data_, training.device,
                                    plans ? training.step.memory_budget : std::nullopt);
  for (const std::string& line : describe_job(data_, settings_, *network_)) terminal_.line(line);
  terminal_.line("");
  const at::Tensor order = at::arange(batch_size_for(training.step, data_), at::kLong);
  inputs_ = source_of(data_.train.inputs, order);
  targets_ = source_of(data_.train.targets, order);
}

Model OneBatch::model() const {
  return make_model(network_);
}

Options OneBatch::options() const {
  return library_options(settings_.training.step);
}

void OneBatch::tell(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) terminal_.line(line);
}

void OneBatch::write_result(const std::string& event, const nlohmann::ordered_json& fields) const {
  nlohmann::ordered_json job = job_as_json(data_, settings_, *network_);
  job.update(fields);
  write_json(event, job);
}

}  // namespace infinitybatch::app
