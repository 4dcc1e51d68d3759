// The part of Executor that compares rows of a larger batch with the same rows of a smaller one.
#include <infinitybatch/execute/executor.hpp>

#include "light_recording.hpp"

#include <infinitybatch/autograd/engine.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/coupled/fixed_ops.hpp>
#include <infinitybatch/tape/recorder.hpp>

#include <exception>
#include <string>
#include <utility>

namespace infinitybatch {

void Executor::note_read() {
  if (job_.looked == nullptr || !read_.empty() || !share_.requires_grad()) return;
  std::map<const torch::autograd::Node*, std::vector<size_t>> leaves;
  read_.resize(outputs_.leaves().size(), false);
  for (size_t i = 0; i < read_.size(); ++i) {
    const at::Tensor& tensor = outputs_.leaves()[i].tensor;
    if (tensor.defined() && tensor.requires_grad()) leaves[tensor.grad_fn().get()].push_back(i);
  }
  autograd::walk_graph({share_}, [&](const torch::autograd::Node& node) {
    const auto found = leaves.find(&node);
    if (found == leaves.end()) return;
    for (const size_t leaf : found->second) read_[leaf] = true;
  });
}

std::optional<TrialOutputs> Executor::try_forward(const Batch& inputs, int64_t rows) {
  std::optional<TrialOutputs> tried;
  const auto run = [&](bool light) {
    aside(/*trial=*/true, [&] {
      inputs_ = inputs;
      const std::vector<at::Device> devices = devices_of(job_);
      const coupled::FixedOps fixed(devices, rows);
      const auto call = [&] {
        forward({0, rows});
        return std::exchange(outputs_, Batch());
      };
      Batch outputs;
      if (light) {
        tape::Recorder recorder(inputs_, {}, devices);
        recorder.lighten(job_.device);
        outputs = run_lightly(recorder, call);
      } else {
        outputs = call();
      }
      if (!fixed.strayed()) tried = TrialOutputs{detached(outputs), fixed.foreign()};
    });
  };
  try {
    run(/*light=*/true);
  } catch (const Unsupported&) {  // forward asks for gradients itself
    run(/*light=*/false);
  }
  return tried;
}

void Executor::look_at_rows() {
  if (job_.looked == nullptr || !job_.exact_coupling || wrote_inputs_ || watch_.talked()) return;
  const int64_t rows = smallest_;
  if (rows == 0 || rows >= job_.batch_size()) return;
  if (*job_.looked != 0 && *job_.looked <= rows) return;
  RowLook look;
  look.batch_size = job_.batch_size();
  look.rows = rows;
  look.device = job_.device;
  if (high_water_) look.peak = room_for_a_look(high_water_->peak());
  if (job_.outside == nullptr) {
    look.compared = job_.coupled == nullptr ? read_
                    : two_pass_             ? two_pass_->outputs().read()
                                            : whole_outputs_->read();
  }
  look.load = [this](Rows part) {
    return to_device(job_.inputs->rows(part.begin, part.end), job_.device);
  };
  look.run = [this](const Batch& inputs, int64_t count) { return try_forward(inputs, count); };
  const std::optional<std::string> differs = look.find().differs;
  if (!differs) {
    *job_.looked = rows;
    return;
  }
  rows_differ_ = true;
  throw infinitybatch::rows_differ(*differs, job_.batch_size());
}

std::exception_ptr Executor::look_quietly() {
  try {
    look_at_rows();
  } catch (const CouplingError&) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace infinitybatch
