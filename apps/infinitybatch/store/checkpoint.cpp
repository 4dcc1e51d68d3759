#include "store/checkpoint.hpp"

#include "errors.hpp"
#include "store/optimizer_state.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

namespace infinitybatch::app {
namespace {

using TrainingJson = nlohmann::ordered_json;

constexpr const char* kTrainingKey = "infinitybatch.training";
constexpr const char* kRandom = "random/cpu";
const std::string kAverages = "ema/";

at::Tensor random_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

TrainingJson training_in(const StoredTensors& stored) {
  const auto found = stored.metadata.find(kTrainingKey);
  if (found == stored.metadata.end()) {
    throw DataError(stored.path + (stored.metadata.count("infinitybatch") > 0
                                       ? ": holds weights alone, and no state of a training; "
                                         "resume from the checkpoint beside it, as in: "
                                         "--resume " +
                                             checkpoint_beside(stored.path)
                                       : ": is no checkpoint of infinitybatch train"));
  }
  return TrainingJson::parse(found->second, nullptr, /*allow_exceptions=*/false);
}

[[noreturn]] void refuse_damaged(const StoredTensors& stored) {
  throw DataError(stored.path + ": its state of the training is damaged; resume from another");
}

}  // namespace

std::string checkpoint_beside(const std::string& model_path) {
  const std::string ending = ".safetensors";
  const bool has =
      model_path.size() > ending.size() &&
      model_path.compare(model_path.size() - ending.size(), ending.size(), ending) == 0;
  const std::string stem =
      has ? model_path.substr(0, model_path.size() - ending.size()) : model_path;
  return stem + ".checkpoint" + ending;
}

void save_checkpoint(const std::string& path, const Network& network,
                     torch::optim::Optimizer& optimizer, const ModelDescription& description,
                     const FlagValues& flags, const Snapshot& snapshot) {
  NamedTensors tensors = weights_of(network);
  for (auto& named : optimizer_state(optimizer)) tensors.push_back(std::move(named));
  tensors.emplace_back(kRandom, random_state());
  for (const auto& [name, average] : snapshot.averages) {
    tensors.emplace_back(kAverages + name, average);
  }
  const TrainerState& state = snapshot.state;
  TrainingJson training = {{"flags", TrainingJson::object()},
                           {"epoch", state.epoch},
                           {"step", state.step},
                           {"batch", state.batch},
                           {"in_epoch", state.in_epoch},
                           {"loss_sum", state.loss_sum},
                           {"samples", state.samples},
                           {"seconds", state.seconds}};
  for (const auto& [flag, value] : flags) training["flags"][flag] = value;
  if (snapshot.first_loss) training["first_loss"] = *snapshot.first_loss;
  write_safetensors(path, std::move(tensors),
                    {{"format", "pt"},
                     {"infinitybatch", as_json(description).dump()},
                     {kTrainingKey, training.dump()}});
}

FlagValues flags_in(const StoredTensors& stored) {
  const TrainingJson training = training_in(stored);
  FlagValues flags;
  try {
    for (const auto& [flag, value] : training.at("flags").items()) {
      flags.emplace_back(flag, value.get<std::string>());
    }
  } catch (const TrainingJson::exception&) {
    refuse_damaged(stored);
  }
  return flags;
}

Snapshot snapshot_in(const StoredTensors& stored) {
  const TrainingJson training = training_in(stored);
  Snapshot snapshot;
  TrainerState& state = snapshot.state;
  try {
    state.epoch = training.at("epoch").get<int64_t>();
    state.step = training.at("step").get<int64_t>();
    state.batch = training.at("batch").get<int64_t>();
    state.in_epoch = training.at("in_epoch").get<bool>();
    state.loss_sum = training.at("loss_sum").get<double>();
    state.samples = training.at("samples").get<int64_t>();
    state.seconds = training.at("seconds").get<double>();
    if (training.contains("first_loss")) snapshot.first_loss = training["first_loss"].get<double>();
  } catch (const TrainingJson::exception&) {
    refuse_damaged(stored);
  }
  for (const auto& [name, tensor] : stored.tensors) {
    if (name.rfind(kAverages, 0) == 0) {
      snapshot.averages.emplace_back(name.substr(kAverages.size()), tensor);
    }
  }
  return snapshot;
}

void load_checkpoint(const StoredTensors& stored, Network& network,
                     torch::optim::Optimizer& optimizer) {
  const auto random = stored.tensors.find(kRandom);
  if (random == stored.tensors.end()) refuse_damaged(stored);
  load_weights(network, stored);
  load_optimizer_state(optimizer, stored);
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::scoped_lock lock(generator.mutex());
  generator.set_state(random->second.clone());
}

}  // namespace infinitybatch::app
