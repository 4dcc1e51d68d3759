#include "build_info.hpp"
#include "data/dataset.hpp"
#include "data/pixels.hpp"
#include "data/zip.hpp"
#include "doctor/check.hpp"
#include "errors.hpp"
#include "memory/cpu_allocator.hpp"
#include "output/numbers.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/loss/criteria.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/step/module.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/Version.h>
#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <tuple>

namespace infinitybatch::app {
namespace {

std::string minor_of(const std::string& version) {
  const size_t first = version.find('.');
  return version.substr(0, version.find('.', first + 1));
}

/// The folder that torch was loaded from.
std::string torch_folder() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&at::show_config), &info) == 0 ||
      info.dli_fname == nullptr) {
    return "an unknown folder";
  }
  return std::filesystem::path(info.dli_fname).parent_path().string();
}

}  // namespace

Check check_versions() {
  Check check("versions");
  const std::string built = torch_built();
  const std::string loaded = torch_loaded();
  check.finding = "infinitybatch " + version() + ", built with torch " + built +
                  ", running with torch " + loaded + " from " + torch_folder();
  if (minor_of(built) != minor_of(loaded)) {
    check.health = Health::broken;
    check.remedy = "torch " + minor_of(loaded) + " has another binary interface; install torch " +
                   minor_of(built) + ", or build infinitybatch again";
  }
  check.values = {{"version", version()},
                  {"torch_built", built},
                  {"torch_loaded", loaded},
                  {"torch_folder", torch_folder()}};
  return check;
}

Check check_allocator() {
  Check check("CPU allocator");
  const auto state = memory::cpu_allocator_state();
  check.finding = memory::describe(state);
  if (state != memory::CpuAllocatorState::counting) {
    check.health = Health::broken;
    check.remedy =
        "without it no budget can be kept on the CPU; unset LD_PRELOAD, or leave out the "
        "library that replaces torch's allocator";
  }
  const auto now = memory::stats(c10::kCPU);
  check.values = {{"counting", state == memory::CpuAllocatorState::counting},
                  {"live_bytes", now.live},
                  {"peak_bytes", now.peak}};
  return check;
}

Check check_limit() {
  constexpr int64_t kBytes = 1 << 20;
  Check check("memory limit");
  const int64_t live = memory::stats(c10::kCPU).live;
  const at::Tensor held = at::empty({kBytes}, at::kByte);
  const int64_t counted = memory::stats(c10::kCPU).live - live;
  bool refused = false;
  try {
    memory::Limit limit(live + kBytes + kBytes / 2);
    at::empty({kBytes}, at::kByte);
  } catch (const c10::OutOfMemoryError&) {
    refused = true;
  }
  check.finding = "a tensor of 1 MiB was counted as " + format_bytes(counted) +
                  "; one above the limit was " + (refused ? "refused" : "NOT refused");
  if (!refused || counted < kBytes) {
    check.health = Health::broken;
    check.remedy = "budgets are not enforced; see the finding on the CPU allocator";
  }
  check.values = {{"counted_bytes", counted}, {"refused", refused}};
  return check;
}

Check check_gradient() {
  constexpr double kAllowed = 1e-12;
  Check check("gradient");
  // Numbers of its own, so that no other random stream is moved.
  at::Generator generator = at::detail::createCPUGenerator(1);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor inputs = at::randn({37, 8}, generator, options);
  const at::Tensor targets = at::randint(0, 5, {37}, generator, at::kLong);
  const at::Tensor weight = at::randn({5, 8}, generator, options).set_requires_grad(true);
  const at::Tensor native_weight = weight.detach().clone().set_requires_grad(true);

  const auto forward = [](const at::Tensor& x, const at::Tensor& w) {
    return at::linear(x, w).tanh();
  };
  at::cross_entropy_loss(forward(inputs, native_weight), targets).backward();
  const Model model = make_model(
      [&](const Batch& batch) { return Batch(forward(batch.tensor(), weight)); }, {weight});
  Options step;
  step.micro_batch_size = 5;
  VirtualBatch batch(model, losses::cross_entropy(), step);
  batch.backward(inputs, targets);
  const double error =
      ((weight.grad() - native_weight.grad()).norm() / native_weight.grad().norm()).item<double>();
  check.finding = "37 samples in micro-batches of 5 differ from the whole batch by " +
                  shortest(error) + " (allowed: " + shortest(kAllowed) + ")";
  if (!(error <= kAllowed)) {
    check.health = Health::broken;
    check.remedy = "this must not happen; please report it with this output";
  }
  check.values = {{"relative_error", error}, {"allowed", kAllowed}};
  return check;
}

Check check_data() {
  Check check("data");
  DataOptions digits;
  const DataPath path = find_data(digits.data);
  check.values = {{"found", path.found.has_value()}};
  if (!path.found) {
    check.health = Health::note;
    check.finding = "the default data set, digits, is not there";
    check.remedy = "make it with: python scripts/export_digits.py; or give --data";
    return check;
  }
  try {
    const Dataset data = load_dataset(digits, /*context=*/1);
    check.finding = "digits: " + with_commas(data.train.size) + " samples to train, " +
                    with_commas(data.held_out.size) + " held out, in " + *path.found;
    check.values["path"] = *path.found;
  } catch (const Error& error) {
    check.health = Health::broken;
    check.finding = one_line(error.what_without_backtrace());
    check.remedy = "make the digits again with: python scripts/export_digits.py";
  }
  return check;
}

Check check_formats() {
  Check check("data formats");
  std::string missing;
  check.finding = "IDX, .npy, .csv, text";
  for (const auto& [reads, what, package] :
       {std::tuple{reads_zip(), ".npz", "libminizip-dev"},
        std::tuple{reads_images(), "folders of images", "libstb-dev"}}) {
    check.values[what] = reads;
    if (reads) {
      check.finding += std::string(", ") + what;
    } else {
      missing += std::string(missing.empty() ? "" : " ") + package;
    }
  }
  if (!missing.empty()) {
    check.health = Health::note;
    check.remedy = "for more: apt-get install " + missing + ", and build again";
  }
  return check;
}

}  // namespace infinitybatch::app
