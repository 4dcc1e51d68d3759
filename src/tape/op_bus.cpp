#include "tape/op_bus.hpp"

#include <c10/util/Exception.h>

#include <cstddef>
#include <unordered_set>
#include <utility>

namespace infinitybatch::tape {
namespace {

class Bus {
 public:
  /// Room for one more, so that `add` cannot fail.
  void prepare() { listeners_.reserve(listeners_.size() + 1); }

  void add(OpListener& listener, Hears hears) noexcept {
    size_t covers = kNobody;
    for (size_t i = 0; i < listeners_.size(); ++i) {
      const Entry& entry = listeners_[i];
      if (!entry.covered && typeid(*entry.listener) == typeid(listener)) covers = i;
    }
    listeners_.push_back({&listener, hears, covers, /*covered=*/false});
    if (covers != kNobody) listeners_[covers].covered = true;
    results_ = this->hears().results;
  }

  void remove(const OpListener& listener) noexcept {
    TORCH_INTERNAL_ASSERT(!listeners_.empty() && listeners_.back().listener == &listener);
    const size_t covered = listeners_.back().covers;
    listeners_.pop_back();
    if (covered != kNobody) listeners_[covered].covered = false;
    results_ = hears().results;
  }

  OpListener* find(const std::type_info& type) const noexcept {
    for (size_t i = listeners_.size(); i-- > 0;) {
      if (typeid(*listeners_[i].listener) == type) return listeners_[i].listener;
    }
    return nullptr;
  }

  /// What all of them together are told of.
  Hears hears() const noexcept {
    Hears all;
    for (const Entry& entry : listeners_) {
      all.results = all.results || entry.hears.results;
      all.backward = all.backward || entry.hears.backward;
    }
    return all;
  }

  std::unique_ptr<OpContext> begin(const at::RecordFunction& record) noexcept {
    const SeenOp op(record);
    std::unique_ptr<OpContext> all;
    for (const Entry& entry : listeners_) {
      if (!hears(entry, op)) continue;
      std::unique_ptr<OpContext> context = entry.listener->begin(op);
      if (!context) continue;
      context->whose = entry.listener;
      context->next = std::move(all);
      all = std::move(context);
    }
    return all;
  }

  void end(const at::RecordFunction& record, OpContext* all) noexcept {
    if (all == nullptr && !results_) return;
    const SeenOp op(record);
    for (const Entry& entry : listeners_) {
      OpContext* context = all;
      while (context != nullptr && context->whose != entry.listener) context = context->next.get();
      if (context == nullptr && !entry.hears.results) continue;
      if (hears(entry, op)) entry.listener->end(op, context);
    }
  }

 private:
  static constexpr size_t kNobody = static_cast<size_t>(-1);
  struct Entry {
    OpListener* listener;
    Hears hears;
    size_t covers;  // whom it keeps from hearing
    bool covered;
  };

  static bool hears(const Entry& entry, const SeenOp& op) {
    return !entry.covered &&
           (entry.hears.backward || op.scope() != at::RecordScope::BACKWARD_FUNCTION);
  }

  std::vector<Entry> listeners_;
  bool results_ = false;  // somebody hears of the end of every op
};

thread_local Bus bus;

std::unique_ptr<at::ObserverContext> on_op(const at::RecordFunction& op) {
  return bus.begin(op);
}

void after_op(const at::RecordFunction& op, at::ObserverContext* context) {
  // Nobody else makes contexts for this callback.
  bus.end(op, static_cast<OpContext*>(context));
}

struct Registered {
  at::CallbackHandle handle;
  Hears hears;
};

/// The callback that calls the bus in this thread now; nothing where none does.
std::optional<Registered> registered() {
  std::optional<Registered> found;
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (!entry.enabled_ || entry.callback_.start() != &on_op) continue;
    found = {entry.handle_,
             {.results = entry.callback_.needsOutputs(),
              .backward = entry.callback_.checkScope(at::RecordScope::BACKWARD_FUNCTION)}};
  }
  return found;
}

}  // namespace

OpBus::Scope::Scope(OpListener& listener, Hears hears) : listener_(listener) {
  Bus& bus = tape::bus;  // looked up once
  Hears wanted = bus.hears();
  wanted.results = wanted.results || hears.results;
  wanted.backward = wanted.backward || hears.backward;
  const std::optional<Registered> here = registered();
  // Results and backward passes are asked of torch only where somebody hears of them: that costs.
  const bool enough = here && (here->hears.results || !wanted.results) &&
                      (here->hears.backward || !wanted.backward);
  bus.prepare();
  if (!enough) {
    using Scopes = std::unordered_set<at::RecordScope, std::hash<at::RecordScope>>;
    static const Scopes forward{at::RecordScope::FUNCTION};
    static const Scopes both{at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION};
    added_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_op, &after_op)
                                            .needsInputs(true)
                                            .needsOutputs(wanted.results)
                                            .scopes(wanted.backward ? both : forward));
    if (here) {
      replaced_ = here->handle;
      at::disableCallback(*replaced_);
    }
  }
  bus.add(listener, hears);
}

OpBus::Scope::~Scope() {
  bus.remove(listener_);
  if (added_) at::removeCallback(*added_);
  if (replaced_) at::reenableCallback(*replaced_);
}

OpListener* OpBus::find(const std::type_info& type) noexcept {
  return bus.find(type);
}

}  // namespace infinitybatch::tape
