#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>
#include <vector>

namespace infinitybatch::app {

/// What the header of a `.npy` file says (numpy.lib.format, versions 1.0, 2.0 and 3.0).
struct NpyHeader {
  std::string type;  ///< NumPy's `descr`: "<f4", "|u1"
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

/// Reads the Python dictionary in a header: {'descr': '<f4', 'fortran_order': False, 'shape': (2,),
/// } \param path for messages \throws DataError where it is anything else
NpyHeader parse_npy_header(const std::string& path, const std::string& text);

/// True where the file begins with NumPy's magic bytes.
bool looks_like_npy(const std::string& path);

/// Reads a NumPy array from a `.npy` file: little-endian, C order, of bool, int8 to int64, uint8,
/// float16, float32 or float64.
/// \return a tensor over the mapped file
/// \throws DataError for anything else, with the NumPy call that mends it
at::Tensor read_npy(const std::string& path);

}  // namespace infinitybatch::app
