#pragma once

#include "coupled/draw_laws.hpp"
#include "coupled/random_ops.hpp"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::coupled {

/// See `draw_stand_in`.
class RandomDraw final : public WholeBatchOp {
 public:
  RandomDraw(const tape::OpFacts& facts, const DrawLaw* law, std::optional<at::Generator> given,
             std::shared_ptr<RandomStreams> streams);
  void collect(Rows rows, const Arguments& arguments) override;
  void combine(SettledBuffers& buffers) override;
  at::Tensor apply(Rows rows, const Arguments& arguments, std::vector<at::Tensor>& leaves) override;
  void begin_backward(bool keep) override { keep_ = keep; }
  void collect_gradient(Rows, const std::vector<at::Tensor>&) override {}
  void combine_gradients(autograd::GradientSinks& sinks) override;

 private:
  enum class Mode { unknown, pieces, shared, whole };
  struct Part {
    Rows rows;
    std::map<uint16_t, at::Tensor> inputs;  // whose values matter, until all are there
    std::optional<RandomStreams::Position> start;
  };
  [[noreturn]] void refuse(const std::string& why) const;
  void check_shape(uint16_t argument, const Shape& shape, Rows rows);
  Mode mode_for(const Arguments& arguments, Rows rows) const;
  /// The axis of the numbers themselves.
  BatchAxis drawn_axis() const;
  bool comes_first(const BatchAxis& drawn) const;
  at::Tensor run(const Arguments& arguments) const;
  at::Tensor draw_whole() const;
  at::Tensor draw_mask() const;
  Arguments whole_arguments() const;
  at::Tensor apply_mask(const at::Tensor& input, const Arguments& arguments, Rows rows) const;
  at::Tensor give_numbers(const Arguments& arguments, const at::Tensor& numbers) const;

  const tape::OpFacts& facts_;
  const DrawOp& op_;
  std::optional<DrawLaw> law_;  // none: a single micro-batch
  std::optional<at::Generator> given_;
  std::shared_ptr<RandomStreams> streams_;
  RandomStreams::Which stream_;
  bool in_place_;

  Mode mode_ = Mode::unknown;
  std::map<uint16_t, BatchAxis> axes_;
  std::map<uint16_t, Shape> shapes_;  // of the first micro-batch
  int64_t first_rows_ = 0;
  std::map<uint16_t, at::TensorOptions> options_;  // of tensors that it is given
  Arguments template_;  // of the first micro-batch, without tensors that follow the samples
  std::map<int64_t, Part> parts_;
  bool keep_ = false;   // another backward may need the numbers
  bool moved_ = false;  // the stream stands behind this op
  int64_t rows_ = 0;    // of all of them
  at::Tensor numbers_;  // with Mode::whole: for the whole batch; of dropout a mask of bools
};

}  // namespace infinitybatch::coupled
