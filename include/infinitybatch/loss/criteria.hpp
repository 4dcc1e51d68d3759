#pragma once

// Ready-made losses for every separable criterion of torch::nn. A function is named as the one in
// torch::nn::functional, without "_loss"; its options have torch's names and defaults.
//
// A criterion is called as criterion(*outputs, *targets): the tensors of the outputs, then those of
// the targets, in order. All of them
// - compute float16 and bfloat16 outputs in float32, because a sum over many samples leaves
//   float16's range where native's mean does not; float32 and float64 stay as they are;
// - move their own weight tensors to the outputs' device;
// - throw InvalidArgument where the arguments are too many or too few, where broadcasting would
//   couple samples, and for a Reduction that the criterion doesn't know. Values and shapes that the
//   criterion itself refuses raise torch's own error.
#include <infinitybatch/loss/binary.hpp>
#include <infinitybatch/loss/classification.hpp>
#include <infinitybatch/loss/distance.hpp>
#include <infinitybatch/loss/linear_cross_entropy.hpp>
#include <infinitybatch/loss/loss.hpp>
#include <infinitybatch/loss/reduction.hpp>
#include <infinitybatch/loss/regression.hpp>
#include <infinitybatch/loss/sequence.hpp>
