#pragma once

#include "core/callback_errors.hpp"
#include "core/recycled.hpp"
#include "core/torch_compat.hpp"
#include "tape/frontiers.hpp"
#include "tape/generators.hpp"
#include "tape/memories.hpp"
#include "tape/op_bus.hpp"
#include "tape/provenance.hpp"
#include "tape/tape.hpp"
#include "tape/unseen_memory.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <memory_resource>
#include <unordered_set>

namespace infinitybatch::tape {

/// What a Recorder knows while ops go by: the tape as far as it is written, and the provenance of
/// every value on it. Once the tape is opaque it only watches for what makes running the user's
/// code again inexact: writes into memory that outlives the call.
class Program final : public OpListener {
 public:
  Program(const Batch& inputs, const std::vector<at::Tensor>& buffers,
          const std::vector<at::Device>& devices);

  std::unique_ptr<OpContext> begin(const SeenOp& op) noexcept override;
  void end(const SeenOp& op, OpContext* context) noexcept override;
  /// Forward is over.
  void stop() { unseen_.stop(); }
  /// \throws what went wrong while ops went by
  void rethrow() { errors_.rethrow(); }
  Tape finish(const Batch& outputs);

  /// A recording that runs inside of this one, and is told of each op first: what it does to
  /// results was there, for this one, all the while.
  Program* inner = nullptr;
  /// See Recorder::disturb.
  std::function<bool(const Tape&, const Op&)> disturb;
  std::function<at::Tensor(const at::Tensor&)> lent;  ///< See Recorder::borrow.
  /// See Recorder::leave_parameters.
  std::shared_ptr<const std::unordered_set<const c10::StorageImpl*>> parameters;
  bool witnesses = false;  ///< See Recorder::witness.
  /// See Recorder::lighten and Recorder::keep.
  std::optional<at::Device> light;
  FrontierGuide guide;
  bool keeps_tail = false;
  Frontiers frontiers;
  std::function<void(const Frontiers&, int32_t)> reached;

 private:
  struct Value {
    c10::weak_intrusive_ptr<c10::TensorImpl> impl;  // keeps the address from being used again
    Provenance provenance;
    Memory* memory = nullptr;  // that `provenance.storage` is; null without one
    int64_t external = -1;     // index into Tape::externals
  };

  void give_up(std::string reason);
  void refuse(std::string reason);

  // Ops (program.cpp).
  void meet(const SeenOp& op);
  void begin_op(const SeenOp& op);
  void end_op(const SeenOp& op);
  void watch_begin(const SeenOp& op);
  void watch_end(const SeenOp& op);
  void take_argument(const c10::IValue& argument, size_t position);
  void take_generator(const at::Generator& generator);
  bool given_drew();
  bool seeded_behind() const;
  void disturb_outputs(c10::ArrayRef<c10::IValue> outputs) const;
  void note_cast(const SeenOp& op);
  uint32_t modes_index();
  // Light recordings (light.cpp).
  void begin_cost();
  void end_cost(c10::ArrayRef<c10::IValue> outputs);
  struct Holders {
    ValueId value;
    size_t of_tensor;
    size_t of_memory;
  };
  std::vector<Holders> holders() const;
  void note_program();
  void follow_guide();
  void keep_frontier();
  void begin_tail();
  void leave_guide();
  bool is_put_back(const at::Tensor& tensor);
  bool threw() const;

  // Values (values.cpp).
  enum class Access { read, view, write };
  /// The number of a tensor that takes part in an op.
  ValueId use(const at::Tensor& tensor, Access access);
  ValueId define(const at::Tensor& tensor);
  ValueId find_external(const at::Tensor& tensor);
  ValueId add_external(const at::Tensor& tensor, int64_t input_leaf);
  ValueId add_value(const at::Tensor& tensor);
  /// After an op that may have changed it.
  void look_again(Value& value, const at::Tensor& tensor);
  void restore_raw(const at::Tensor& tensor, ValueId value);
  void before_write(const at::Tensor& tensor, ValueId value);
  /// Refuses where `tensor` outlives the call and nobody puts it back.
  void judge_write(const at::Tensor& tensor);
  /// After a write: everything in the same memory looks different now.
  void refresh(const at::Tensor& tensor);
  void check_externals();
  void judge_leftovers();
  // Weights of which forward scales rows (values.cpp).
  bool outlives_call(const at::Tensor& tensor);
  bool is_written(const Memory& memory) const;
  void begin_scaling(const at::Tensor& weight);
  void check_reads_before(const Memory& weight);
  /// What was done to a value since it was looked at; null where nothing was.
  static const char* difference(const Value& value, const at::Tensor& now);

  Tape tape_;
  Arena<(size_t{1} << 14)> arena_;  // of what is known of values
  std::pmr::vector<Value> values_{arena_.resource()};
  HashMap<const c10::TensorImpl*, ValueId> numbers_{arena_.resource()};
  Memories memories_{arena_.resource()};
  HashMap<const c10::TensorImpl*, size_t> buffers_{arena_.resource()};
  std::vector<at::Tensor> held_buffers_;
  Generators generators_;
  UnseenMemory unseen_;
  std::vector<Draw> passed_;                  // the user's own generators, as the call found them
  std::vector<GeneratorState> passed_after_;  // as ops have left them
  std::vector<size_t> given_;                 // of these, to the op at work
  std::vector<c10::Stream> streams_;
  size_t saved_tensor_hooks_ = 0;

  int depth_ = 0;  // of registered operators that are at work
  const OpFacts* facts_ = nullptr;
  int exceptions_ = 0;         // in flight when the op began
  bool recording_ = false;     // the op at work is going to the tape
  bool shows_values_ = false;  // user code may see values through it
  Op op_;
  uint32_t last_modes_ = 0;
  std::vector<at::Tensor> written_;                     // the op's arguments that it changes
  std::vector<std::pair<at::Tensor, ValueId>> viewed_;  // raw ones that it may give a view of
  std::vector<const c10::TensorImpl*> casts_;           // weights that autocast has in its cache
  /// Tensors of unknown origin that were written: harmless if they are gone in the end.
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, std::string>> leftovers_;
  std::vector<ValueId> scaled_by_;  // indices of rows that were scaled
  bool input_written_ = false;
  std::optional<memory::PeakScope> rise_;  // of the op at work, in a light recording
  int64_t live_ = 0;                       // when it began
  uint64_t first_node_ = 0;                // the sequence number of its first graph node
  bool astray_ = false;                    // another program than the guide's
  uint64_t first_of_tail_ = 0;             // the sequence number of the first node that is kept
  /// Where the graph behind the last cut was separated from the one in front: nodes of both sides.
  std::vector<compat::NodePtr> separated_;
  CallbackErrors errors_;
};

}  // namespace infinitybatch::tape
