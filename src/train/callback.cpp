#include <infinitybatch/train/callback.hpp>

#include <exception>

namespace infinitybatch {

Callbacks::Callbacks(const std::vector<std::shared_ptr<Callback>>& callbacks) {
  for (const auto& callback : callbacks) {
    if (const auto* several = dynamic_cast<const Callbacks*>(callback.get())) {
      all_.insert(all_.end(), several->all_.begin(), several->all_.end());
    } else if (callback) {
      all_.push_back(callback);
    }
  }
}

template <typename Event>
void Callbacks::tell(void (Callback::*method)(const Event&), const Event& event) const {
  std::exception_ptr first;
  for (const auto& callback : all_) {
    try {
      ((*callback).*method)(event);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void Callbacks::on_run_begin(const events::RunBegin& event) {
  tell(&Callback::on_run_begin, event);
}
void Callbacks::on_run_end(const events::RunEnd& event) {
  tell(&Callback::on_run_end, event);
}
void Callbacks::on_epoch_begin(const events::EpochBegin& event) {
  tell(&Callback::on_epoch_begin, event);
}
void Callbacks::on_epoch_end(const events::EpochEnd& event) {
  tell(&Callback::on_epoch_end, event);
}
void Callbacks::on_batch_begin(const events::BatchBegin& event) {
  tell(&Callback::on_batch_begin, event);
}
void Callbacks::on_batch_end(const events::BatchEnd& event) {
  tell(&Callback::on_batch_end, event);
}
void Callbacks::on_micro_batch(const events::MicroBatch& event) {
  tell(&Callback::on_micro_batch, event);
}
void Callbacks::on_evaluation_begin(const events::EvaluationBegin& event) {
  tell(&Callback::on_evaluation_begin, event);
}
void Callbacks::on_evaluation_end(const events::EvaluationEnd& event) {
  tell(&Callback::on_evaluation_end, event);
}
void Callbacks::on_checkpoint_saved(const events::CheckpointSaved& event) {
  tell(&Callback::on_checkpoint_saved, event);
}
void Callbacks::on_failure(const events::Failure& event) {
  tell(&Callback::on_failure, event);
}

std::shared_ptr<Callback> operator+(const std::shared_ptr<Callback>& left,
                                    const std::shared_ptr<Callback>& right) {
  return std::make_shared<Callbacks>(std::vector<std::shared_ptr<Callback>>{left, right});
}

}  // namespace infinitybatch
