#include "tape/modes.hpp"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <optional>

namespace infinitybatch::tape {
namespace {

/// One switch of at::Context that user code may turn in the middle of a forward.
struct Switch {
  bool (*get)(const at::Context&);
  void (*set)(at::Context&, bool);
};

#define INFINITYBATCH_SWITCH(getter, setter)                      \
  Switch {                                                        \
    [](const at::Context& context) { return context.getter(); },  \
        [](at::Context& context, bool on) { context.setter(on); } \
  }

constexpr std::array kSwitches{
    INFINITYBATCH_SWITCH(userEnabledFlashSDP, setSDPUseFlash),
    INFINITYBATCH_SWITCH(userEnabledMemEfficientSDP, setSDPUseMemEfficient),
    INFINITYBATCH_SWITCH(userEnabledMathSDP, setSDPUseMath),
    INFINITYBATCH_SWITCH(userEnabledCuDNNSDP, setSDPUseCuDNN),
    INFINITYBATCH_SWITCH(userEnabledOverrideableSDP, setSDPUseOverrideable),
    INFINITYBATCH_SWITCH(userEnabledCuDNN, setUserEnabledCuDNN),
    INFINITYBATCH_SWITCH(userEnabledMkldnn, setUserEnabledMkldnn),
    INFINITYBATCH_SWITCH(userEnabledNNPACK, setUserEnabledNNPACK),
    INFINITYBATCH_SWITCH(benchmarkCuDNN, setBenchmarkCuDNN),
    INFINITYBATCH_SWITCH(deterministicCuDNN, setDeterministicCuDNN),
    INFINITYBATCH_SWITCH(deterministicMkldnn, setDeterministicMkldnn),
    INFINITYBATCH_SWITCH(deterministicFillUninitializedMemory,
                         setDeterministicFillUninitializedMemory),
};
#undef INFINITYBATCH_SWITCH
constexpr uint32_t kDeterministic = 1U << kSwitches.size();
constexpr uint32_t kDeterministicWarnsOnly = kDeterministic << 1;

uint32_t ask_switches(const at::Context& context) {
  uint32_t bits = 0;
  for (size_t i = 0; i < kSwitches.size(); ++i) {
    if (kSwitches[i].get(context)) bits |= 1U << i;
  }
  if (context.deterministicAlgorithms()) bits |= kDeterministic;
  if (context.deterministicAlgorithmsWarnOnly()) bits |= kDeterministicWarnsOnly;
  return bits;
}

/// The switches when the context's memory last looked different to this thread.
///
/// They are asked for in front of every op, which fourteen calls into LibTorch made the dearest
/// part of recording one; all that they tell lies in the context itself, so that none has been
/// turned while no byte of it has changed. (Settings that it keeps elsewhere, in maps, are no
/// switches.)
struct LastSwitches {
  alignas(at::Context) std::array<std::byte, sizeof(at::Context)> context{};
  uint32_t bits = 0;
  bool known = false;
};

uint32_t read_switches() {
  thread_local LastSwitches last;
  const at::Context& context = at::globalContext();
  if (!last.known || std::memcmp(last.context.data(), &context, sizeof(context)) != 0) {
    // The copy is asked, not the context: another thread that turns a switch meanwhile, and back,
    // would leave the bytes of one moment with the switches of another. Each getter reads one bool.
    std::memcpy(last.context.data(), static_cast<const void*>(&context), sizeof(context));
    last.bits = ask_switches(*reinterpret_cast<const at::Context*>(last.context.data()));
    last.known = true;
  }
  return last.bits;
}

void write_switches(uint32_t bits) {
  at::Context& context = at::globalContext();
  const uint32_t changed = read_switches() ^ bits;
  if (changed == 0) return;
  for (size_t i = 0; i < kSwitches.size(); ++i) {
    if ((changed >> i & 1U) != 0) kSwitches[i].set(context, (bits >> i & 1U) != 0);
  }
  if ((changed & (kDeterministic | kDeterministicWarnsOnly)) != 0) {
    context.setDeterministicAlgorithms((bits & kDeterministic) != 0,
                                       (bits & kDeterministicWarnsOnly) != 0);
  }
}

std::optional<at::DeviceType> accelerator() {
  static const std::optional<at::DeviceType> type = at::getAccelerator(/*checked=*/false);
  return type;
}

const c10::DispatchKeySet& interceptors() {
  static const c10::DispatchKeySet keys{
      c10::DispatchKey::Python,
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
      c10::DispatchKey::FuncTorchDynamicLayerBackMode,
      c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::FuncTorchBatched,
      c10::DispatchKey::Functionalize,
      c10::DispatchKey::PreDispatch,
  };
  return keys;
}

}  // namespace

bool Modes::operator==(const Modes& other) const {
  return included == other.included && excluded == other.excluded && grad_mode == other.grad_mode &&
         inference_mode == other.inference_mode && forward_grad_mode == other.forward_grad_mode &&
         view_replay == other.view_replay && autocast_cache == other.autocast_cache &&
         in_autocast == other.in_autocast && autocast_on_cpu == other.autocast_on_cpu &&
         autocast_on_accelerator == other.autocast_on_accelerator &&
         default_type == other.default_type && switches == other.switches;
}

Modes Modes::current() {
  Modes modes;
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  modes.included = keys.included_;
  modes.excluded = keys.excluded_;
  const c10::AutogradState& state = c10::AutogradState::get_tls_state();
  modes.grad_mode = state.get_grad_mode();
  modes.inference_mode = state.get_inference_mode();
  modes.forward_grad_mode = state.get_fw_grad_mode();
  modes.view_replay = state.get_view_replay_enabled();
  modes.autocast_cache = at::autocast::is_autocast_cache_enabled();
  modes.in_autocast = at::autocast::increment_nesting() > 1;
  at::autocast::decrement_nesting();
  modes.autocast_on_cpu = at::autocast::get_autocast_dtype(at::kCPU);
  if (const auto type = accelerator()) {
    modes.autocast_on_accelerator = at::autocast::get_autocast_dtype(*type);
  }
  modes.default_type = c10::get_default_dtype_as_scalartype();
  modes.switches = read_switches();
  return modes;
}

void Modes::apply() const {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = included;
  keys.excluded_ = excluded;
  // A dispatch mode that has ended since, around forward alone, is nobody whom ops could be sent
  // to.
  if (!c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    keys.included_ = keys.included_ - c10::python_ks;
  }
  c10::impl::_force_tls_local_dispatch_key_set(keys);
  c10::AutogradState state = c10::AutogradState::get_tls_state();
  state.set_grad_mode(grad_mode);
  state.set_inference_mode(inference_mode);
  state.set_fw_grad_mode(forward_grad_mode);
  state.set_view_replay_enabled(view_replay);
  c10::AutogradState::set_tls_state(std::move(state));
  at::autocast::set_autocast_cache_enabled(autocast_cache);
  at::autocast::set_autocast_dtype(at::kCPU, autocast_on_cpu);
  if (const auto type = accelerator()) {
    at::autocast::set_autocast_dtype(*type, autocast_on_accelerator);
  }
  if (default_type != c10::get_default_dtype_as_scalartype()) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_type));
  }
  write_switches(switches);
}

bool Modes::intercepted() const {
  return !(included & interceptors()).empty();
}

}  // namespace infinitybatch::tape
