#pragma once

#include "core/check.hpp"
#include "execute/forwards.hpp"
#include "execute/mixing_experiment.hpp"
#include "execute/output_law.hpp"
#include "execute/row_look.hpp"
#include "execute/whole_outputs.hpp"

#include <exception>
#include <functional>
#include <optional>
#include <vector>

namespace infinitybatch {

/// Whether samples are coupled by what no rule knows: asks recordings, and forwards on other rows.
/// And how outputs follow their samples.
class RowChecks final : public Check {
 public:
  RowChecks(const Setup& setup, Forwards& forwards);

  /// Outputs of all, of a coupled loss; must outlive this.
  void know(WholeOutputs& outputs) noexcept { whole_ = &outputs; }

  /// Whether somebody reads the recording of these rows.
  bool asks(Rows rows) const;
  /// Whether that has to tell how outputs follow them.
  bool learns_output_law(Rows rows) const;
  /// Runs forward, and takes it down where that was asked for.
  void stream(Rows rows);
  /// Of a recording, what tells whether ordinary ops mix samples or count them.
  void look_at(Rows rows, const Batch& inputs, const tape::Tape& tape, const Batch& outputs);
  /// Which outputs a separable loss reads, as far as its graph shows.
  void read_by(const at::Tensor& share);
  /// Which a loss of all has read.
  void read_by_loss();
  /// How outputs follow the samples, after the first micro-batch's recording, where it is not known
  /// yet. May run forward on a few other rows, and undoes that.
  /// \param inputs  that it ran on
  /// \param outputs that it gave, detached
  /// \throws BatchError naming an output that cannot be joined
  void learn_outputs(Rows rows, const Batch& inputs, const Batch& outputs, const tape::Tape& tape);

  /// Whether ordinary ops mix samples, as soon as a micro-batch has been recorded for it.
  /// Between micro-batches only. \throws CouplingError
  void examine();
  /// Whether samples are coupled, now that all micro-batches have been there: whether ordinary ops
  /// mix them, and whether the same rows, split otherwise, give the same rows of outputs, in steps
  /// 1, 2, 4, 8, ... of a kind of batch and where it is smaller.
  void look() override;
  /// What `look` has found. \throws CouplingError
  void rethrow() const override {
    if (differ_) std::rethrow_exception(differ_);
  }
  bool found() const noexcept { return differ_ != nullptr; }
  /// Whether that is what no cut can answer.
  bool beyond_cuts() const noexcept { return rows_differ_ || experiment_.found(); }
  /// Whether rows were looked at.
  bool looked() const noexcept { return looked_; }
  /// The peak of this step, if it has looked at rows, but for the look.
  std::optional<int64_t> peak_without_look() const {
    if (!looked_ || !high_water_) return std::nullopt;
    return problem_.device.is_cpu() ? high_water_->peak() : peak_before_look_;
  }
  /// What forward gives on these rows of another size, with `coupled::FixedOps`, undone. Nothing
  /// where that cannot be compared.
  /// \param rounded see `RoundedOps`; 0: as it rounds
  std::optional<TrialOutputs> try_forward(const Batch& inputs, int64_t rows, uint32_t rounded = 0);
  /// Whether a recording of another number of rows would tell more, until `examine`.
  bool wants_other_rows() const { return experiment_.may_count().has_value(); }
  void let_go() override { high_water_.reset(); }

 private:
  static bool asks_for_mixing(const Setup& setup);
  /// \param last no other micro-batch of this step comes
  void examine(bool last);
  OutputForm form_elsewhere(Rows rows, at::Device device);
  /// For each leaf of the outputs whether, and how, several places of a sample lie along its first
  /// dimension: some of `rows`, or of two where that is one, are compared with fewer of them.
  /// Empty where forward refuses to run on those.
  std::vector<Flattened> try_flattened(Rows rows);
  /// Runs forward on another number of rows, where rows are looked at for the first time and
  /// forward writes buffers: one that counts samples is left alike by micro-batches of one length.
  void recount(const std::function<Batch(Rows)>& load);
  /// The same in the first step of a kind of batch, where an op's number may count samples.
  void count_rows();
  void compare_rows();
  /// Of targets that flatten time and batch: whether the outputs that the loss reads do it in the
  /// same order, once for each kind of batch. \throws BatchError
  void check_flattened_targets();
  bool try_gradients(const Batch& inputs, Rows rows, const std::vector<int64_t>& dims,
                     const std::vector<bool>& compared, const ShowGradient& show, uint32_t rounded);

  const Problem& problem_;
  const Strategy& strategy_;
  const Resources& resources_;
  Forwards& forwards_;
  WholeOutputs* whole_ = nullptr;
  MixingExperiment experiment_;
  std::vector<bool> read_;   // outputs, by a separable loss; empty: not known
  bool loss_known_ = false;  // of all outputs
  bool looked_ = false;
  bool rows_differ_ = false;
  std::exception_ptr differ_;                    // then: how
  std::optional<memory::HighWater> high_water_;  // of this step, where rows will be looked at
  int64_t peak_before_look_ = 0;
};

}  // namespace infinitybatch
