#pragma once

#include "data/encoding.hpp"

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::app {

/// Samples that are made on demand, so that a logical batch never needs to exist as one tensor.
/// What they are made from is mapped from a file and costs the memory budget nothing.
struct Split {
  /// \param indices 1-dimensional int64 tensor on the CPU, each in [0, size)
  using Rows = std::function<at::Tensor(const at::Tensor& indices)>;

  int64_t size = 0;
  Rows inputs;   ///< float32 [n, sample shape]; for text int64 [n, context]
  Rows targets;  ///< int64 [n]; for text int64 [n, context], the bytes that follow
};

enum class SampleKind { vectors, images, text };

/// What a model is trained on.
struct Dataset {
  std::string name;
  SampleKind kind = SampleKind::images;
  /// One sample: [features], [channels, height, width] or [context]
  std::vector<int64_t> sample_shape;
  int64_t classes = 0;
  bool has_one_class = false;  ///< all samples, those held out too
  Encoding encoding;
  Split train;
  Split held_out;  ///< may be empty
};

/// Where the samples come from.
struct DataOptions {
  /// Folder of IDX files or of images, .npy, .npz, .csv, IDX or text file, or a name.
  std::string data = "digits";
  std::string labels;  ///< a file beside .npy and IDX, an array of .npz, a column of .csv
  std::string inputs;  ///< an array of .npz
  std::string csv_header = "auto";  ///< whether line 1 holds names: auto, yes or no
  std::string image_size;  ///< to which images are scaled, "32" or "32x48"; empty: as they are
  std::optional<double>
      held_out;  ///< share kept for measuring; empty: 0.2, or the files' own split
};

/// Finds and opens a data set. A name without a folder ("digits") is looked for as it is, in
/// ./data, in $INFINITYBATCH_DATA, and where this program was built.
/// \param context bytes in one sample, where the data are text
/// \param known   of the model that the data are for; without it their encoding is learned
/// \throws DataError naming the file and what mends it, where something is not `known`, too;
///         UsageError where flags contradict each other
Dataset load_dataset(const DataOptions& options, int64_t context, const Encoding* known = nullptr);

/// The path that `name` means, and every place that was looked at (for messages).
struct DataPath {
  std::optional<std::string> found;
  std::vector<std::string> tried;
};
DataPath find_data(const std::string& name);

}  // namespace infinitybatch::app
