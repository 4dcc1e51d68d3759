// Every other op: torch's CPU kernel runs on the device's memory through the mapping for kernels.
// What comes back is the device's: an argument itself, a view of one, or new memory.
#include "device.hpp"
#include "kernels.hpp"
#include "memory.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace sim {
namespace {

using Stack = torch::jit::Stack;

/// Ops that take indices or lengths from the host.
bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> names{"aten::index",         "aten::index_put_",
                                           "aten::index_put",     "aten::_index_put_impl_",
                                           "aten::_unsafe_index", "aten::_pack_padded_sequence",
                                           "aten::_ctc_loss",     "aten::_ctc_loss_backward"};
  return names.contains(name);
}

bool uses_atomics(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index_add",     "aten::index_add_", "aten::scatter_add",
      "aten::scatter_add_",  "aten::cumsum",     "aten::_index_put_impl_",
      "aten::index_put",     "aten::index_put_", "aten::embedding_dense_backward",
      "aten::scatter_reduce"};
  return names.contains(name);
}

bool is_product(const std::string& name) {
  static const std::set<std::string> names{"aten::mm",    "aten::addmm",   "aten::addmm_",
                                           "aten::bmm",   "aten::baddbmm", "aten::linear",
                                           "aten::addmv", "aten::mv"};
  return names.contains(name);
}

/// What a product on CUDA takes once for each thread and stream, and keeps.
void keep_blas_workspace(int stream) {
  constexpr size_t kBytes = 8'519'680;
  static thread_local std::map<int, c10::DataPtr> workspaces;
  if (!workspaces.contains(stream)) workspaces[stream] = allocator().allocate(kBytes);
}

/// While it lives, torch's CPU generator gives numbers of the device's.
class CpuNumbers {
 public:
  explicit CpuNumbers(uint64_t seed) : generator_(at::globalContext().defaultGenerator(at::kCPU)) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~CpuNumbers() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  CpuNumbers(const CpuNumbers&) = delete;
  CpuNumbers& operator=(const CpuNumbers&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

struct Argument {
  at::Tensor ours;
  at::Tensor alias;
  std::vector<int64_t> sizes;
  bool written = false;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), name_(schema_.name()) {}

  void run() {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::DisableRecordFunctionGuard unrecorded;
    const size_t count = schema_.arguments().size();
    const size_t first = stack_->size() - count;
    find_device(first);
    const Kernel kernel(device_, name_.c_str());
    std::optional<CpuNumbers> numbers;
    bool has_generator = false;
    for (size_t i = 0; i < count; ++i) {
      const c10::Argument& argument = schema_.arguments()[i];
      const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      c10::IValue& value = (*stack_)[first + i];
      replace(value, written);
      if (is_generator(argument)) {
        has_generator = true;
        std::optional<at::Generator> given;
        if (value.isGenerator()) given = value.toGenerator();
        value = at::make_generator<at::CPUGeneratorImpl>(draw_seed(given, device_));
      }
    }
    if (!has_generator && op_.hasTag(at::Tag::nondeterministic_seeded)) {
      numbers.emplace(draw_seed(std::nullopt, device_));
    }
    if (settings().blas_workspace && is_product(name_)) {
      keep_blas_workspace(kernel.moment().stream);
    }
    for (const Argument& argument : arguments_) {
      if (!argument.written) kernel.reads(argument.ours);
    }
    for (const Argument& argument : arguments_) {
      if (argument.written) kernel.writes(argument.ours);
    }
    if (waits()) synchronize(kernel.moment().stream, name_.c_str());
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    resize_written();
    bool host_result = false;
    for (size_t i = stack_->size() - schema_.returns().size(); i < stack_->size(); ++i) {
      host_result = give_back((*stack_)[i], kernel) || host_result;
    }
    if (host_result) synchronize(kernel.moment().stream, name_.c_str());
  }

 private:
  static bool is_generator(const c10::Argument& argument) {
    return argument.type()->str().find("Generator") != std::string::npos;
  }

  /// One of the few arguments that devices do not take from the host even where it is one number.
  bool is_mask(const at::Tensor& tensor) const {
    return tensor.scalar_type() == at::kBool && name_.starts_with("aten::masked_fill");
  }

  template <typename Visit>
  static void each_tensor(const c10::IValue& value, Visit visit) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const auto& item : value.toOptionalTensorVector()) {
        if (item) visit(*item);
      }
    }
  }

  void find_device(size_t first) {
    std::optional<int> device;
    const at::Tensor* host = nullptr;
    at::Tensor kept;
    for (size_t i = first; i < stack_->size(); ++i) {
      const c10::IValue& value = (*stack_)[i];
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        if (!is_ours(tensor)) {
          if ((tensor.dim() > 0 && !takes_host_tensors(name_)) || is_mask(tensor)) {
            kept = tensor;
            host = &kept;
          }
          return;
        }
        TORCH_CHECK(!device || *device == tensor.device().index(),
                    "Expected all tensors to be on the same device, but found at least two "
                    "devices, sim:",
                    *device, " and ", tensor.device(), "! (when checking ", name_, ")");
        device = tensor.device().index();
      });
      if (value.isDevice() && value.toDevice().type() == kType && !device &&
          value.toDevice().has_index()) {
        device = value.toDevice().index();
      }
    }
    device_ = device.value_or(current_device());
    TORCH_CHECK(host == nullptr || !device,
                "Expected all tensors to be on the same device, but found at least two devices, "
                "sim:",
                device_, " and cpu! (when checking ", name_, ")");
  }

  at::Tensor alias(const at::Tensor& tensor, bool written) {
    if (!is_ours(tensor)) return tensor;
    for (Argument& argument : arguments_) {
      if (!argument.ours.is_same(tensor)) continue;
      argument.written = argument.written || written;
      return argument.alias;
    }
    arguments_.push_back({tensor, alias_of(tensor), tensor.sizes().vec(), written});
    return arguments_.back().alias;
  }

  void replace(c10::IValue& value, bool written) {
    if (value.isTensor()) {
      value = alias(value.toTensor(), written);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = alias(tensor, written);
      value = c10::IValue(std::move(tensors));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& item : value.toOptionalTensorVector()) {
        tensors.push_back(item ? std::optional(alias(*item, written)) : std::nullopt);
      }
      value = c10::IValue(std::move(tensors));
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(c10::DeviceType::CPU);
    }
  }

  /// Whether the host needs to know numbers of the device to go on.
  bool waits() const {
    if (name_ == "aten::index" || name_ == "aten::_index_put_impl_") {
      return std::any_of(arguments_.begin(), arguments_.end(), [](const Argument& argument) {
        return !argument.written && argument.ours.scalar_type() == at::kBool;
      });
    }
    return op_.hasTag(at::Tag::dynamic_output_shape);
  }

  /// An out= argument that the kernel gave another size.
  void resize_written() const {
    for (const Argument& argument : arguments_) {
      const bool moved =
          argument.alias.storage().data() != host_side(argument.ours.storage().data());
      if (argument.alias.sizes() == argument.ours.sizes() && !moved) {
        if (argument.written && argument.alias.strides() != argument.ours.strides()) {
          argument.ours.unsafeGetTensorImpl()->set_sizes_and_strides(
              argument.alias.sizes(), argument.alias.strides(), argument.alias.storage_offset());
        }
        continue;
      }
      c10::StorageImpl* storage = argument.ours.storage().unsafeGetStorageImpl();
      if (moved) {
        resize_storage(*storage, argument.alias.storage().nbytes());
        if (storage->nbytes() > 0) {
          std::memcpy(host_side(storage->data()), argument.alias.storage().data(),
                      storage->nbytes());
        }
      }
      argument.ours.unsafeGetTensorImpl()->set_sizes_and_strides(
          argument.alias.sizes(), argument.alias.strides(), argument.alias.storage_offset());
    }
  }

  /// \returns whether it is a number for the host
  bool give_back(c10::IValue& value, const Kernel& kernel) const {
    if (value.isTensor()) {
      value = ours(value.toTensor(), kernel);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = ours(tensor, kernel);
      value = c10::IValue(std::move(tensors));
    } else {
      return !arguments_.empty() && !value.isNone();
    }
    return false;
  }

  at::Tensor ours(const at::Tensor& result, const Kernel& kernel) const {
    if (!result.defined() || is_ours(result)) return result;
    for (const Argument& argument : arguments_) {
      if (!result.is_same(argument.alias)) continue;
      if (argument.written) disturb(argument.alias);
      return argument.ours;
    }
    for (const Argument& argument : arguments_) {
      if (!result.is_alias_of(argument.alias)) continue;
      at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(argument.ours.storage()), argument.ours.key_set(),
          result.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                        result.storage_offset());
      return view;
    }
    disturb(result);
    return moved_to(device_, result, kernel);
  }

  /// What atomics add up in another order each time differs in its last bits.
  void disturb(const at::Tensor& result) const {
    if (!settings().atomics || !uses_atomics(name_) || !result.is_floating_point()) return;
    static thread_local std::mt19937 random{std::random_device{}()};
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(random());
    const double eps = result.scalar_type() == at::kDouble ? 2.3e-16 : 1.2e-7;
    const at::Tensor noise = at::rand(result.sizes(), generator, result.options()).sub_(0.5);
    result.mul_(noise.mul_(2 * eps).add_(1.0));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* const stack_;
  const std::string name_;
  int device_ = 0;
  std::vector<Argument> arguments_;
};

/// Those of kernels.cpp.
bool is_native(const c10::OperatorName& name) {
  static const std::set<std::string> names{"aten::empty",
                                           "aten::empty_strided",
                                           "aten::resize_",
                                           "aten::set_",
                                           "aten::_local_scalar_dense",
                                           "aten::native_dropout",
                                           "aten::_fused_sdp_choice"};
  return names.contains(name.name);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

/// Every op that the CPU has a kernel for is one kernel here too. Without that torch would build
/// some of them of others (mse_loss of mse_loss.out), as no real device does.
torch::Library& leaf_kernels() {
  static auto& library =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__,
                          static_cast<uint32_t>(__LINE__));
  return library;
}

const bool fallback_registered = [] {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || name.getNamespace() != "aten" || is_native(name) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      continue;
    }
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    leaf_kernels().impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace sim
