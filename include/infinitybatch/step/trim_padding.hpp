#pragma once

#include <infinitybatch/core/batch.hpp>

#include <functional>
#include <string>
#include <vector>

namespace infinitybatch {

/// How padding is marked, so that each micro-batch is computed at the length of its longest row.
///
///     Options{.micro_batch_tokens = 4096, .trim = {{.mask = {"attention_mask"}}}}
///
/// A sequence that is padded apart from others (the two sides of an encoder and decoder) has one of
/// these for itself. Rows without any position that is marked as real count as the longest: what a
/// model makes of them depends on all of their padding.
struct TrimPadding {
  /// The argument [samples, time] (time first where its samples lie along dimension 1) that marks
  /// padding, by its name or position, any of several; of an argument that is nested, by the last
  /// keys of its path. "targets" are the targets. Empty where lengths are given.
  std::vector<std::string> mask = {};
  /// The value that marks it: 0 of a mask, -100 of labels, the padding token of token ids.
  double padding = 0;
  /// In place of a mask: real positions of each sample, a tensor [samples], from the inputs.
  std::function<at::Tensor(const Batch& inputs)> lengths = {};
  /// With `lengths`: padding stands in front.
  bool left = false;
  /// Arguments that are trimmed beside the mask, along each of their dimensions that is as long.
  /// Without any: all tensors that have that size in the dimension of the mask's time.
  std::vector<std::string> inputs = {};
  /// Targets have that dimension, too, and a separable loss takes nothing from positions that the
  /// mask marks as padding: they are trimmed beside the outputs. Else outputs are padded back.
  bool targets = false;
};

}  // namespace infinitybatch
