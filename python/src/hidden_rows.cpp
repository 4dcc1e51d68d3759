#include "hidden_rows.hpp"

#include "held.hpp"

#include <algorithm>

namespace infinitybatch::python {

void refuse_hidden_rows(py::handle value, const Batch& batch, int64_t samples, const char* name) {
  const auto is_plain = [](const Leaf& leaf) {
    return !leaf.tensor.defined() && std::any_cast<const Held&>(leaf.object).get() != Py_None;
  };
  // Mostly there are none, and Python need not be asked.
  if (std::none_of(batch.leaves().begin(), batch.leaves().end(), is_plain)) return;
  static const py::handle module = py::module_::import("infinitybatch._rows").release();
  module.attr("refuse_hidden_rows")(value, samples, name);
}

}  // namespace infinitybatch::python
