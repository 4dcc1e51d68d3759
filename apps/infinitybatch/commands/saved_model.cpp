#include "commands/saved_model.hpp"

#include "errors.hpp"

namespace infinitybatch::app {
namespace {

std::string by_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

Dataset load_all(DataOptions options, int64_t context, const Encoding& known) {
  try {
    options.held_out = 0;
    return load_dataset(options, context, &known);
  } catch (const UsageError&) {
    // A folder that brings its own held-out files: both are evaluated.
    options.held_out.reset();
    return load_dataset(options, context, &known);
  }
}

/// That of the training. A file of an earlier version does not hold it: it is learned once more.
Encoding encoding_of(const ModelDescription& model, const std::string& path) {
  if (model.encoding) return *model.encoding;
  if (model.kind == SampleKind::text) return {"text"};
  try {
    const Dataset data = load_dataset(model.data, model.model.context);
    if (fingerprint_of(data) == model.fingerprint) return data.encoding;
  } catch (const Error&) {
  }
  throw DataError(path +
                  ": was saved by an earlier version, without the classes, columns and scaling of "
                  "its training, and --data " +
                  model.data.data +
                  ", which would tell them, is not here as it was; put it back, or train anew");
}

void check_suits(const SavedModel& saved, const std::string& path) {
  const ModelDescription& model = saved.description;
  const Dataset& data = saved.data;
  if (data.kind != model.kind || data.sample_shape != model.sample_shape) {
    throw DataError("--data " + data.name + " has samples of " + by_text(data.sample_shape) +
                    ", and the model in " + path + " takes " + by_text(model.sample_shape));
  }
  if (data.classes > model.classes) {
    throw DataError("--data " + data.name + " has " + std::to_string(data.classes) +
                    " classes, and the model in " + path + " knows " +
                    std::to_string(model.classes));
  }
}

}  // namespace

int64_t slice_of(const Settings& settings) {
  constexpr int64_t kUsual = 256;
  return settings.training.step.micro_batch_size.value_or(kUsual);
}

int64_t SavedModel::size() const {
  int64_t sum = 0;
  for (const Split* split : splits) sum += split->size;
  return sum;
}

std::unique_ptr<SavedModel> open_saved_model(const Settings& settings) {
  const StoredTensors stored = read_safetensors(settings.file);
  auto saved = std::make_unique<SavedModel>();
  saved->description = description_in(stored);
  saved->network = network_in(stored, saved->description);
  saved->network->to(settings.training.device);
  const DataOptions& own = saved->description.data;
  const int64_t context = saved->description.model.context;
  const bool other = !settings.data.data.empty() &&
                     (settings.data.data != own.data ||
                      (!settings.data.labels.empty() && settings.data.labels != own.labels));
  saved->data =
      other ? load_all(settings.data, context, encoding_of(saved->description, settings.file))
            : load_dataset(own, context);
  check_suits(*saved, settings.file);
  saved->same_data = fingerprint_of(saved->data) == saved->description.fingerprint;
  if (!other && !saved->same_data) {
    throw DataError("--data " + own.data + " holds other samples than " + settings.file +
                    " was trained on; name the data to use, as in: --data ./" + own.data);
  }
  if (other && !settings.samples.empty()) {
    throw UsageError("--samples " + settings.samples +
                     " is of the data that the model was trained on; leave it out with --data");
  }
  saved->samples = other ? "all" : settings.samples.empty() ? "held-out" : settings.samples;
  const Split& train = saved->data.train;
  const Split& held_out = saved->data.held_out;
  if (saved->samples != "held-out" && train.size > 0) saved->splits.push_back(&train);
  if (saved->samples != "train" && held_out.size > 0) saved->splits.push_back(&held_out);
  if (saved->splits.empty()) {
    throw UsageError("nothing was held out of " + own.data + " in the training of " +
                     settings.file + "; name other data with --data, or: --samples train");
  }
  return saved;
}

}  // namespace infinitybatch::app
