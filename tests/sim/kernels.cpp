// The ops that cannot be a CPU kernel over the same memory: those that make, copy, resize or read
// tensors. All others are in fallback.cpp.
#include "kernels.hpp"

#include "device.hpp"
#include "memory.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace sim {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

/// Inside of a kernel nobody looks.
struct Hidden {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::DisableRecordFunctionGuard unrecorded;
};

int index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> type,
                               std::optional<c10::Layout> /*layout*/,
                               std::optional<c10::Device> device, std::optional<bool> pinned,
                               std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(index_of(device))));
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> type, std::optional<c10::Layout> /*layout*/,
                         std::optional<c10::Device> device, std::optional<bool> /*pinned*/) {
  return empty_on(index_of(device), size, stride, c10::dtype_or_default(type));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<c10::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size || format) impl->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes =
      at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.element_size(),
                                       static_cast<size_t>(self.storage_offset()));
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes) resize_storage(*storage, bytes);
  return self;
}

// Copies ------------------------------------------------------------------------------------------

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  const Kernel kernel(to.device().index(), "copy_");
  if (from.device() != to.device()) {
    // Runs on the source's stream; both wait for each other, as peer copies of CUDA do.
    const int here = current_stream(to.device().index());
    const int there = current_stream(from.device().index());
    Order::instance().wait(here, Order::instance().clock_of(there));
    kernel.reads(from);
    kernel.writes(to);
    Order::instance().wait(there, Order::instance().clock_of(here));
  } else {
    kernel.reads(from);
    kernel.writes(to);
  }
  const Hidden hidden;
  alias_of(to).copy_(alias_of(from));
}

bool is_late(const at::Tensor& host, const at::Tensor& device, bool non_blocking) {
  return non_blocking && is_pinned(host.const_data_ptr()) && host.is_contiguous() &&
         device.is_contiguous() && host.scalar_type() == device.scalar_type() &&
         host.numel() == device.numel() && host.numel() > 0;
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const Kernel kernel(to.device().index(), "copy_");
  kernel.writes(to);
  if (is_late(from, to, non_blocking)) {
    const auto* source = static_cast<const std::byte*>(from.const_data_ptr());
    Order::instance().copy_from_pinned(kernel.moment(), source, from.nbytes());
    std::memcpy(host_side(to.const_data_ptr()), source, from.nbytes());
    return;
  }
  const Hidden hidden;
  alias_of(to).copy_(from);
  synchronize(kernel.moment().stream, "copy");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const Kernel kernel(from.device().index(), "copy_");
  kernel.reads(from);
  if (is_late(to, from, non_blocking)) {
    Order::instance().copy_to_pinned(kernel.moment(), static_cast<std::byte*>(to.data_ptr()),
                                     host_side(from.const_data_ptr()), from.nbytes());
    return;
  }
  synchronize(kernel.moment().stream, "copy");
  const Hidden hidden;
  to.copy_(alias_of(from));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  TORCH_CHECK_NOT_IMPLEMENTED(!to.is_conj() && !to.is_neg(), "a copy into a conjugate view");
  if (is_ours(from) && is_ours(to)) {
    copy_on_device(from, to);  // bytes, which say nothing of a view's bits
    const at::Tensor copied = alias_of(to);
    const Hidden hidden;
    if (from.is_conj()) copied.conj_physical_();
    if (from.is_neg()) copied.neg_();
  } else if (from.is_conj() || from.is_neg()) {
    return copy_from(from.clone(), to, non_blocking);
  } else if (is_ours(to)) {
    copy_to_device(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const Kernel kernel(self.device().index(), "item");
  kernel.reads(self);
  synchronize(kernel.moment().stream, "item");
  const Hidden hidden;
  return at::_local_scalar_dense(alias_of(self));
}

// Storages ----------------------------------------------------------------------------------------

at::Tensor& set_storage_offset_(at::Tensor& self, at::Storage source, int64_t offset,
                                c10::IntArrayRef size, c10::IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}

at::Tensor& set_storage_(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_offset_(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor_(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset_(self, source.storage(), source.storage_offset(), source.sizes(),
                             source.strides());
}

at::Tensor& set_empty_(at::Tensor& self) {
  const at::Tensor none = empty_on(self.device().index(), {0}, {1}, self.scalar_type());
  return set_tensor_(self, none);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

// Random numbers ----------------------------------------------------------------------------------

/// Fused, as on CUDA: one op that gives the mask too, and draws without an op that could be seen.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true) || p == 0.0) {
    return {input.clone(), at::ones_like(input, at::TensorOptions(at::kBool))};
  }
  const at::Tensor mask = at::empty_like(input, at::TensorOptions(at::kBool));
  {
    const at::RecordFunctionGuard unseen(/*is_enabled=*/false);
    mask.bernoulli_(1.0 - p);
  }
  const double scale = p == 1.0 ? 0.0 : 1.0 / (1.0 - p);
  return {input.mul(mask).mul_(scale), mask};
}

// Convolutions, for which torch has no CPU kernel under the name that other devices get -----------

/// What a convolution on CUDA takes while it runs. Which algorithm that is, and so how many blocks
/// there are, depends on the batch.
std::vector<c10::DataPtr> conv_workspaces(const at::Tensor& input) {
  constexpr int64_t kBytes = 512;
  std::vector<c10::DataPtr> blocks;
  if (!settings().conv_workspaces) return blocks;
  const int64_t rows = std::max<int64_t>(1, input.size(0));
  const int count = 1 + std::countr_zero(static_cast<uint64_t>(rows)) % 3;
  for (int i = 0; i < count; ++i) {
    blocks.push_back(allocator().allocate(static_cast<size_t>(kBytes * rows)));
  }
  return blocks;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  const Kernel kernel(input.device().index(), "convolution");
  const std::vector<c10::DataPtr> workspaces = conv_workspaces(input);
  const bool biased = bias && bias->defined();
  kernel.reads(input);
  kernel.reads(weight);
  if (biased) kernel.reads(*bias);
  const Hidden hidden;
  const std::optional<at::Tensor> addend = biased ? std::optional(alias_of(*bias)) : std::nullopt;
  return moved_to(input.device().index(),
                  at::convolution(alias_of(input), alias_of(weight), addend, stride, padding,
                                  dilation, transposed, output_padding, groups),
                  kernel);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  const int device = input.device().index();
  const Kernel kernel(device, "convolution_backward");
  const std::vector<c10::DataPtr> workspaces = conv_workspaces(input);
  kernel.reads(gradient);
  kernel.reads(input);
  kernel.reads(weight);
  const Hidden hidden;
  const std::array<int64_t, 1> bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  const auto [a, b, c] = at::convolution_backward(
      alias_of(gradient), alias_of(input), alias_of(weight), c10::IntArrayRef(bias), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  return {moved_to(device, a, kernel), moved_to(device, b, kernel), moved_to(device, c, kernel)};
}

int64_t sdp_choice(const at::Tensor& /*query*/, const at::Tensor& /*key*/,
                   const at::Tensor& /*value*/, const std::optional<at::Tensor>& /*mask*/,
                   double /*dropout*/, bool /*causal*/, std::optional<double> /*scale*/,
                   bool /*grouped*/) {
  return 0;  // the formula in plain ops
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset_);
  m.impl("set_.source_Storage", set_storage_);
  m.impl("set_.source_Tensor", set_tensor_);
  m.impl("set_", set_empty_);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", sdp_choice);
}

// Torch's way around the bits of conjugate views is a copy, and would come here again for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

at::Tensor alias_of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  std::byte* data = host_side(storage.data());
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(),
                     c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)),
                     c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

Kernel::Kernel(int device, const char* name)
    : before_(current_device()),
      name_(name),
      moment_(Order::instance().begin(current_stream(device))) {
  set_current_device(device);
}

Kernel::~Kernel() {
  set_current_device(before_);
}

void Kernel::use(const at::Tensor& tensor, bool write) const {
  if (tensor.has_storage() && tensor.storage().nbytes() > 0) {
    sim::use(moment_, tensor.storage().data(), write, name_);
  }
}

at::Tensor empty_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                    c10::ScalarType type) {
  const c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys, type);
}

at::Tensor moved_to(int device, const at::Tensor& result, const Kernel& kernel) {
  if (!result.defined()) return result;
  const at::Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
  at::Tensor made = empty_on(device, dense.sizes(), dense.strides(), dense.scalar_type());
  kernel.writes(made);
  if (dense.numel() > 0) {
    std::memcpy(host_side(made.const_data_ptr()), dense.const_data_ptr(), dense.nbytes());
  }
  return made;
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data =
      bytes == 0 ? c10::DataPtr(nullptr, storage.device()) : allocator().allocate(bytes);
  const Kernel kernel(storage.device().index(), "resize_");
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    use(kernel.moment(), storage.data(), false, "resize_");
    use(kernel.moment(), data.get(), true, "resize_");
    std::memcpy(host_side(data.get()), host_side(storage.data()), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

}  // namespace sim
