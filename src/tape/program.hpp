#pragma once

#include "provenance.hpp"

#include <infinitybatch/tape/tape.hpp>

#include <ATen/record_function.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <unordered_map>

namespace infinitybatch::tape {

/// What a Recorder knows while ops go by: the tape as far as it is written, and the provenance of
/// every value on it.
class Program {
 public:
  Program(const Batch& inputs, const std::vector<at::Tensor>& buffers,
          const std::vector<at::Device>& devices);

  void begin(const at::RecordFunction& op) noexcept;
  void end(const at::RecordFunction& op) noexcept;
  void give_up(std::string reason);
  Tape finish(const Batch& outputs);

 private:
  struct Value {
    c10::weak_intrusive_ptr<c10::TensorImpl> impl;  // keeps the address from being used again
    Provenance provenance;
    int64_t external = -1;  // index into Tape::externals
  };
  struct Memory {
    explicit Memory(c10::weak_intrusive_ptr<c10::StorageImpl> memory) : storage(std::move(memory)) {}
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<ValueId> values;
    bool made_here = false;  // by an op of this recording
    bool raw = false;        // by `empty`, and no op has written it yet
  };

  void begin_op(const at::RecordFunction& op);
  void end_op(const at::RecordFunction& op);
  void take_argument(const c10::IValue& argument, size_t position, bool written);
  /// The number of a tensor that is being read or written.
  ValueId use(const at::Tensor& tensor, bool written);
  ValueId define(const at::Tensor& tensor);
  ValueId find_external(const at::Tensor& tensor);
  ValueId add_external(const at::Tensor& tensor, int64_t input_leaf);
  ValueId add_value(const at::Tensor& tensor);
  Memory* memory_of(const at::Tensor& tensor);
  bool lies_in_recorded_memory(const at::Tensor& tensor) const;
  void restore_raw(const at::Tensor& tensor, ValueId value);
  void before_write(const at::Tensor& tensor, ValueId value);
  /// After a write: everything in the same memory looks different now.
  void refresh(const at::Tensor& tensor);
  void watch_generators();
  void remember_generators();
  void take_passed_generator(const at::Generator& generator);
  uint32_t modes_index();

  Tape tape_;
  std::vector<Value> values_;
  std::unordered_map<const c10::TensorImpl*, ValueId> numbers_;
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;
  std::unordered_map<const c10::TensorImpl*, size_t> buffers_;
  std::vector<at::Tensor> held_buffers_;
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> expected_;  // their states unless user code touched them
  std::vector<c10::Stream> streams_;
  size_t saved_tensor_hooks_ = 0;
  bool drew_ = false;

  int depth_ = 0;
  bool pending_ = false;  // an op is at work
  Op op_;
  std::vector<at::Tensor> written_;  // its arguments that it changes
  std::exception_ptr failure_;
};

}  // namespace infinitybatch::tape
