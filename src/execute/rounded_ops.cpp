#include "execute/rounded_ops.hpp"

#include "core/tensor_memory.hpp"
#include "core/unwatched.hpp"
#include "execute/last_bits.hpp"

#include <ATen/core/TensorBody.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace infinitybatch {
namespace {

/// Ops that move or select numbers and compute none, beside those whose results are views.
bool moves_only(std::string_view name) {
  constexpr std::string_view kAten = "aten::";
  // Nobody knows what others give: it may be memory that they keep.
  if (!name.starts_with(kAten)) return true;
  name.remove_prefix(kAten.size());
  static const std::unordered_set<std::string_view> names{"_to_copy",
                                                          "_unique",
                                                          "_unique2",
                                                          "abs",
                                                          "adaptive_max_pool1d",
                                                          "adaptive_max_pool2d",
                                                          "adaptive_max_pool3d",
                                                          "absolute",
                                                          "amax",
                                                          "amin",
                                                          "aminmax",
                                                          "arange",
                                                          "block_diag",
                                                          "broadcast_tensors",
                                                          "cat",
                                                          "ceil",
                                                          "clamp",
                                                          "clamp_max",
                                                          "clamp_min",
                                                          "clip",
                                                          "clone",
                                                          "combinations",
                                                          "complex",
                                                          "concat",
                                                          "concatenate",
                                                          "constant_pad_nd",
                                                          "contiguous",
                                                          "cummax",
                                                          "cummin",
                                                          "diag",
                                                          "diag_embed",
                                                          "diagonal_scatter",
                                                          "dstack",
                                                          "embedding",
                                                          "eye",
                                                          "fill",
                                                          "flip",
                                                          "fliplr",
                                                          "flipud",
                                                          "floor",
                                                          "fmax",
                                                          "fmin",
                                                          "full",
                                                          "full_like",
                                                          "gather",
                                                          "hardtanh",
                                                          "heaviside",
                                                          "hstack",
                                                          "im2col",
                                                          "index",
                                                          "index_copy",
                                                          "index_fill",
                                                          "index_put",
                                                          "index_select",
                                                          "kthvalue",
                                                          "lift",
                                                          "lift_fresh",
                                                          "masked_fill",
                                                          "masked_scatter",
                                                          "masked_select",
                                                          "max",
                                                          "max_pool1d",
                                                          "max_pool1d_with_indices",
                                                          "max_pool2d",
                                                          "max_pool2d_with_indices",
                                                          "max_pool3d",
                                                          "max_pool3d_with_indices",
                                                          "maximum",
                                                          "median",
                                                          "nanmedian",
                                                          "meshgrid",
                                                          "min",
                                                          "minimum",
                                                          "mode",
                                                          "msort",
                                                          "nan_to_num",
                                                          "neg",
                                                          "negative",
                                                          "new_full",
                                                          "new_ones",
                                                          "new_zeros",
                                                          "one_hot",
                                                          "ones",
                                                          "ones_like",
                                                          "pad",
                                                          "pad_sequence",
                                                          "pixel_shuffle",
                                                          "pixel_unshuffle",
                                                          "positive",
                                                          "put",
                                                          "reflection_pad1d",
                                                          "reflection_pad2d",
                                                          "reflection_pad3d",
                                                          "relu",
                                                          "relu6",
                                                          "repeat",
                                                          "repeat_interleave",
                                                          "replication_pad1d",
                                                          "replication_pad2d",
                                                          "replication_pad3d",
                                                          "roll",
                                                          "rot90",
                                                          "round",
                                                          "scalar_tensor",
                                                          "scatter",
                                                          "select_scatter",
                                                          "sgn",
                                                          "sign",
                                                          "slice_scatter",
                                                          "sort",
                                                          "stack",
                                                          "take",
                                                          "take_along_dim",
                                                          "threshold",
                                                          "tile",
                                                          "to",
                                                          "topk",
                                                          "tril",
                                                          "triu",
                                                          "trunc",
                                                          "type_as",
                                                          "unfold",
                                                          "unfold_copy",
                                                          "unique_consecutive",
                                                          "unique_dim",
                                                          "vstack",
                                                          "where",
                                                          "zeros",
                                                          "zeros_like"};
  return names.contains(name);
}

/// \param visit `void(const at::Tensor&)`
template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isList()) {  // of tensors that may be none
    for (const c10::IValue& each : value.toListRef()) {
      if (each.isTensor() && each.toTensor().defined()) visit(each.toTensor());
    }
  }
}

}  // namespace

/// The memory that an op was given. It may hand it back.
struct RoundedOps::Given : tape::OpContext {
  std::vector<const c10::StorageImpl*> memory;
};

RoundedOps::RoundedOps(uint32_t which)
    : which_(which), listening_(*this, tape::Hears{.results = true}) {}

std::unique_ptr<tape::OpContext> RoundedOps::begin(const tape::SeenOp& op) noexcept {
  std::unique_ptr<Given> given;
  errors_.guard([&] {
    const tape::OpFacts* const facts = op.facts();
    if (facts == nullptr || facts->writes || facts->leaves_raw || moves_only(op.name())) return;
    // What may give a view (reshape) computes nothing where it gives a copy.
    if (std::find(facts->viewed.begin(), facts->viewed.end(), true) != facts->viewed.end()) return;
    auto found = std::make_unique<Given>();
    for (const c10::IValue& input : op.inputs()) {
      each_tensor(input,
                  [&](const at::Tensor& tensor) { found->memory.push_back(storage_of(tensor)); });
    }
    given = std::move(found);
  });
  return given;
}

void RoundedOps::end(const tape::SeenOp& op, tape::OpContext* context) noexcept {
  if (context == nullptr) return;
  const auto& memory = static_cast<const Given&>(*context).memory;
  errors_.guard([&] {
    const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
    const Unwatched unseen;
    for (const c10::IValue& output : op.outputs()) {
      each_tensor(output, [&](const at::Tensor& tensor) {
        if (!can_be_moved(tensor) || tensor.is_inference()) return;
        if (std::find(memory.begin(), memory.end(), storage_of(tensor)) != memory.end()) return;
        round_otherwise(flat_of(tensor), which_);
      });
    }
  });
}

}  // namespace infinitybatch
