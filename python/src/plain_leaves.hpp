#pragma once

namespace infinitybatch::python {

/// Tells the library what Python's numbers and text are: see `infinitybatch::PlainLeaves`.
void register_plain_leaves();

}  // namespace infinitybatch::python
