#pragma once

#include <infinitybatch/train/events.hpp>

#include <memory>
#include <vector>

namespace infinitybatch {

/// Listens to a Trainer. Override the methods of the events that you want.
class Callback {
 public:
  virtual ~Callback() = default;
  virtual void on_run_begin(const events::RunBegin& /*event*/) {}
  virtual void on_run_end(const events::RunEnd& /*event*/) {}
  virtual void on_epoch_begin(const events::EpochBegin& /*event*/) {}
  virtual void on_epoch_end(const events::EpochEnd& /*event*/) {}
  virtual void on_batch_begin(const events::BatchBegin& /*event*/) {}
  virtual void on_batch_end(const events::BatchEnd& /*event*/) {}
  virtual void on_micro_batch(const events::MicroBatch& /*event*/) {}
  virtual void on_evaluation_begin(const events::EvaluationBegin& /*event*/) {}
  virtual void on_evaluation_end(const events::EvaluationEnd& /*event*/) {}
  virtual void on_checkpoint_saved(const events::CheckpointSaved& /*event*/) {}
  virtual void on_failure(const events::Failure& /*event*/) {}
};

/// Several callbacks as one, told in order. Where one throws, the others hear of the event all the
/// same; then the first exception goes on.
class Callbacks final : public Callback {
 public:
  /// Composed ones are flattened; null pointers are left out.
  explicit Callbacks(const std::vector<std::shared_ptr<Callback>>& callbacks);
  const std::vector<std::shared_ptr<Callback>>& all() const noexcept { return all_; }

  void on_run_begin(const events::RunBegin& event) override;
  void on_run_end(const events::RunEnd& event) override;
  void on_epoch_begin(const events::EpochBegin& event) override;
  void on_epoch_end(const events::EpochEnd& event) override;
  void on_batch_begin(const events::BatchBegin& event) override;
  void on_batch_end(const events::BatchEnd& event) override;
  void on_micro_batch(const events::MicroBatch& event) override;
  void on_evaluation_begin(const events::EvaluationBegin& event) override;
  void on_evaluation_end(const events::EvaluationEnd& event) override;
  void on_checkpoint_saved(const events::CheckpointSaved& event) override;
  void on_failure(const events::Failure& event) override;

 private:
  template <typename Event>
  void tell(void (Callback::*method)(const Event&), const Event& event) const;

  std::vector<std::shared_ptr<Callback>> all_;
};

/// Both, `left` first.
std::shared_ptr<Callback> operator+(const std::shared_ptr<Callback>& left,
                                    const std::shared_ptr<Callback>& right);

}  // namespace infinitybatch
