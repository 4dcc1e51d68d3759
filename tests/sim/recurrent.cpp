// The fused cells of recurrent layers, which torch has no CPU kernels for.
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Maybe& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_hidden,
                                             const Tensor& c, const Maybe& input_bias,
                                             const Maybe& hidden_bias) {
  const at::DisableRecordFunctionGuard unrecorded;
  const auto gates =
      (with_bias(from_input, input_bias) + with_bias(from_hidden, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor cell = gates[2].tanh();
  const Tensor out = gates[3].sigmoid();
  const Tensor next = forget * c + in * cell;
  return {out * next.tanh(), next, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Maybe& of_h, const Maybe& of_c,
                                                      const Tensor& c, const Tensor& next,
                                                      const Tensor& gates, bool biased) {
  const at::DisableRecordFunctionGuard unrecorded;
  const auto parts = gates.chunk(4, 1);
  const Tensor& in = parts[0];
  const Tensor& forget = parts[1];
  const Tensor& cell = parts[2];
  const Tensor& out = parts[3];
  const Tensor bent = next.tanh();
  Tensor of_next = of_c && of_c->defined() ? *of_c : at::zeros_like(next);
  Tensor of_out = at::zeros_like(next);
  if (of_h && of_h->defined()) {
    of_next = of_next + *of_h * out * (1 - bent * bent);
    of_out = *of_h * bent * out * (1 - out);
  }
  const Tensor of_gates =
      at::cat({of_next * cell * in * (1 - in), of_next * c * forget * (1 - forget),
               of_next * in * (1 - cell * cell), of_out},
              1);
  return {of_gates, of_next * forget, biased ? of_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& from_input, const Tensor& from_hidden,
                                    const Tensor& h, const Maybe& input_bias,
                                    const Maybe& hidden_bias) {
  const at::DisableRecordFunctionGuard unrecorded;
  const auto a = with_bias(from_input, input_bias).chunk(3, 1);
  const auto b = with_bias(from_hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (a[0] + b[0]).sigmoid();
  const Tensor update = (a[1] + b[1]).sigmoid();
  const Tensor next = (a[2] + reset * b[2]).tanh();
  return {next + update * (h - next), at::cat({reset, update, next, h, b[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gradient,
                                                                     const Tensor& kept,
                                                                     bool biased) {
  const at::DisableRecordFunctionGuard unrecorded;
  const auto parts = kept.chunk(5, 1);
  const Tensor& reset = parts[0];
  const Tensor& update = parts[1];
  const Tensor& next = parts[2];
  const Tensor of_update = gradient * (parts[3] - next) * (1 - update) * update;
  const Tensor of_next = gradient * (1 - update) * (1 - next * next);
  const Tensor of_reset = of_next * parts[4] * (1 - reset) * reset;
  const Tensor of_input = at::cat({of_reset, of_update, of_next}, 1);
  const Tensor of_hidden = at::cat({of_reset, of_update, of_next * reset}, 1);
  return {of_input, of_hidden, gradient * update, biased ? of_input.sum(0) : Tensor(),
          biased ? of_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

}  // namespace
}  // namespace sim
