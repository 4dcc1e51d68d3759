#pragma once

#include "core/exchange.hpp"
#include "execute/setup.hpp"
#include "tape/mixing.hpp"
#include "tape/row_numbers.hpp"
#include "tape/tape.hpp"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// Finds out, once for each kind of batch, whether ordinary ops of a model mix samples: one
/// micro-batch's forward is taken down, and played again on exchanged samples once the micro-batch
/// is done and freed. User code runs no second time, and nothing is left of it.
///
/// And whether ops give the samples a number that counts them (`x / len(x)`): where a number of the
/// recording could, somebody runs forward once more, on another number of rows.
///
/// Says nothing where a tape cannot tell: where it is opaque, where sizes depend on the samples'
/// values, where only numbers on the host were computed from several samples, of micro-batches of
/// one sample, of outputs in which samples have no place of their own (one number, a sum).
class MixingExperiment {
 public:
  /// \param examined set once the answer is known; null where nobody asks
  MixingExperiment(bool* examined, std::vector<at::Device> devices, int64_t batch_size);

  /// Whether the forward of these rows is to be taken down.
  bool wants(Rows rows) const noexcept;

  /// Takes down one forward that nobody else records. What goes wrong with that is not told.
  Batch record(Rows rows, const Batch& inputs, const std::vector<at::Tensor>& buffers,
               const std::function<Batch()>& forward);
  /// Of that one: of the outputs those that the loss reads are compared, as far as its graph shows.
  void read_by(const at::Tensor& loss);
  /// Of outputs that wait for a loss of all samples, those that it reads.
  void read_by_loss(const std::vector<bool>& read);
  /// Somebody's recording, as long as it is there. All outputs are compared, unless told otherwise.
  void take(Rows rows, const Batch& inputs, const tape::Tape& tape);

  /// The experiment, where there is something to play. Call it when the micro-batch is gone and
  /// buffers are as it found them.
  /// \param load gives its inputs once more: held meanwhile, they could be more than a budget
  /// allows
  /// \param last no other micro-batch is coming, which could tell more about numbers; see `unsure`
  /// \param sure false where it is not known yet which outputs matter: what mixes may be none of
  ///             them, and is left for later
  /// \throws CouplingError naming the op that mixes samples
  void run(const std::function<Batch(Rows)>& load, bool last, bool sure = true);
  /// The rows of the recording that waits for `run`, if one of its numbers may count them and
  /// nobody has said yet what it is for others.
  std::optional<Rows> may_count() const;
  /// Whether the recording of these rows would tell.
  bool awaits(Rows rows) const;
  /// What the same forward recorded on another number of rows.
  /// \param inputs, outputs without their tensors' values maybe
  void meet_others(int64_t rows, const Batch& inputs, const tape::Tape& tape, const Batch& outputs);
  /// No other number of rows can be had.
  void meet_no_others();
  /// The recording that waits for `run`; null without one.
  const tape::Tape* tape() const noexcept { return pending_ ? &pending_->tape : nullptr; }
  /// Whether it has found samples mixed.
  bool found() const noexcept { return found_; }

 private:
  struct Pending {
    Rows rows;
    Exchanges exchanges;
    Batch inputs;  // without their tensors
    tape::Tape tape;
    std::vector<const void*> nodes;  // of each output's graph, as forward gave it
    std::vector<bool> compared;
    std::string time_first;  // for a message
    bool met_others = false;
    std::optional<std::string> counting = {};  // the op whose number counts samples
  };
  bool may_play() const;
  std::vector<tape::GivenNumbers> numbers() const;
  /// Of two rows a number says little: the next micro-batch of more rows is looked at, too.
  bool unsure() const;
  std::optional<tape::Mixing> find_mixing(const std::function<Batch(Rows)>& load) const;

  bool* examined_;
  std::vector<at::Device> devices_;
  int64_t batch_size_;
  std::optional<Pending> pending_;
  bool unsure_of_two_ = false;
  bool found_ = false;
};

}  // namespace infinitybatch
