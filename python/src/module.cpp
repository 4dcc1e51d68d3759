// The extension module infinitybatch._C.
#include "bind.hpp"

PYBIND11_MODULE(_C, module) {
  using namespace infinitybatch::python;
  module.doc() = "infinitybatch's C++ library. Use it through the package infinitybatch.";
  bind_errors(module);
  bind_batch(module);
  bind_memory(module);
  bind_loss(module);
  bind_contrastive(module);
  bind_coupled(module);
  bind_plan(module);
  bind_tape(module);
  bind_bench(module);
  bind_verify(module);
  bind_step_report(module);
  bind_virtual_batch(module);
  bind_wrap(module);
  bind_trainer(module);
  bind_evaluation(module);
  bind_noise_scale(module);
  bind_data(module);
  bind_random(module);
  register_random_sources();
  register_wrapped_tensors();
}
