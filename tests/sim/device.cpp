// What torch asks of a device: which one is current, streams, events, generators.
#include "device.hpp"

#include "memory.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstring>
#include <random>

namespace sim {
namespace {

thread_local int the_device = 0;
thread_local std::array<int64_t, kDevices> the_streams{};

c10::Device device_at(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : the_device;
}

c10::Stream make_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

int number_of(const c10::Stream& stream) {
  return stream_of(stream.device_index(), stream.id());
}

struct Event {
  Clock clock{};
  bool recorded = false;
  std::atomic<bool> asked{false};
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(the_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "there is no ", device);
    the_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) the_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return make_stream(index, the_streams.at(static_cast<size_t>(index)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    static std::atomic<int64_t> next{0};
    return make_stream(index_of(device), 1 + next++ % (kStreamsOfDevice - 1));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    the_streams.at(static_cast<size_t>(stream.device_index())) = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Event;
    auto& made = *static_cast<Event*>(*event);
    made.clock = Order::instance().clock_of(number_of(stream));
    made.recorded = true;
    made.asked = false;
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto* made = static_cast<Event*>(event);
    if (made != nullptr && made->recorded) Order::instance().wait(number_of(stream), made->clock);
  }
  /// Work is never over at the first question.
  bool queryEvent(void* event) const override {
    auto* made = static_cast<Event*>(event);
    if (made == nullptr || !made->recorded) return true;
    if (!made->asked.exchange(true)) return false;
    Order::instance().seen_by_host(made->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    const auto* made = static_cast<Event*>(event);
    if (made == nullptr || !made->recorded) return;
    Order::instance().count_sync("event");
    Order::instance().seen_by_host(made->clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* /*from*/, void* /*to*/, c10::DeviceIndex /*device*/) const override {
    return 0.0;
  }

  bool queryStream(const c10::Stream& stream) const override {
    Order::instance().seen_by_host(Order::instance().clock_of(number_of(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    // A thread of its own that copies waits for its own stream, and holds nobody up.
    synchronize(number_of(stream), stream.id() == 0 ? "stream" : "side stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Order::instance().count_sync("device");
    for (int id = 0; id < kStreamsOfDevice; ++id) {
      Order::instance().seen_by_host(Order::instance().clock_of(stream_of(device, id)));
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }
};

/// As on CUDA a seed and an offset are the whole state: each kernel that draws moves the offset.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kType, index),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    const auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0];
    offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::detail::empty_cpu({16}, at::kByte);  // no op that others see
    const std::array<uint64_t, 2> numbers{seed_, offset_};
    std::memcpy(state.mutable_data_ptr(), numbers.data(), 16);
    return state.getIntrusivePtr();
  }
  uint64_t draw() {
    offset_ += 4;
    uint64_t mixed = seed_ ^ (offset_ * 0x9E3779B97F4A7C15ULL);
    mixed = (mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9ULL;
    return mixed ^ (mixed >> 29);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& the_generator(int device) {
  static auto& generators =
      *new std::array<at::Generator, kDevices>{at::make_generator<Generator>(c10::DeviceIndex{0}),
                                               at::make_generator<Generator>(c10::DeviceIndex{1})};
  return generators.at(static_cast<size_t>(device));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { the_device = device; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(the_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(the_device, static_cast<int>(device)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override { return device_at(device_of(data)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return the_generator(device < 0 ? the_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool registered = [] {
  static const c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

int current_device() {
  return the_device;
}

void set_current_device(int device) {
  the_device = device;
}

int current_stream(int device) {
  return stream_of(device, the_streams.at(static_cast<size_t>(device)));
}

at::Generator default_generator(int device) {
  return the_generator(device);
}

uint64_t draw_seed(const std::optional<at::Generator>& generator, int device) {
  at::Generator used = generator && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(used.device().type() == kType,
              "Expected a 'sim' device type for generator but found '", used.device(), "'");
  const std::lock_guard<std::mutex> lock(used.mutex());
  return used.get<Generator>()->draw();
}

void synchronize(int stream, const char* kind) {
  Order::instance().count_sync(kind);
  Order::instance().seen_by_host(Order::instance().clock_of(stream));
}

}  // namespace sim
