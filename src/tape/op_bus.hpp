#pragma once

#include "tape/op_facts.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <typeinfo>
#include <vector>

namespace infinitybatch::tape {

/// An op of this thread that is about to run, or has run; decoded once for all who listen.
class SeenOp {
 public:
  explicit SeenOp(const at::RecordFunction& op) noexcept : op_(op) {}

  const char* name() const { return op_.name(); }
  at::RecordScope scope() const { return op_.scope(); }
  /// Of an interpreter's stack: what was there before comes first.
  c10::ArrayRef<const c10::IValue> inputs() const { return op_.inputs(); }
  /// In `OpListener::end`, for those who hear of results.
  const std::vector<c10::IValue>& outputs() const { return op_.outputs(); }
  /// Null where it is no registered operator.
  const OpFacts* facts() const {
    if (!looked_up_) facts_ = facts_of(op_);
    looked_up_ = true;
    return facts_;
  }

 private:
  const at::RecordFunction& op_;
  mutable const OpFacts* facts_ = nullptr;
  mutable bool looked_up_ = false;
};

/// What an OpListener is told of.
struct Hears {
  bool results = false;   ///< the end of every op, with its outputs
  bool backward = false;  ///< nodes of a backward pass, too
};

class OpListener;

/// What a listener keeps of an op until its end.
struct OpContext : at::ObserverContext {
  const OpListener* whose = nullptr;
  std::unique_ptr<OpContext> next;  ///< another listener's, of the same op
};

/// Somebody who is told of each op that this thread dispatches, those inside of others too, in
/// front of it and behind it. What goes wrong in here torch would only log: listeners keep it
/// (`CallbackErrors`), and nothing is thrown.
class OpListener {
 public:
  virtual ~OpListener() = default;

  /// \returns what `end` is to get; null for nothing
  virtual std::unique_ptr<OpContext> begin(const SeenOp& op) noexcept = 0;
  /// Of ops for which `begin` has returned something, and of all with `Hears::results`.
  virtual void end(const SeenOp& /*op*/, OpContext* /*context*/) noexcept {}
};

/// The one callback by which ops of this thread are seen. Listeners are told in the order in which
/// they came; of those of one type the last one alone.
class OpBus {
 public:
  /// Tells a listener while it lives. Scopes of a thread may nest, and have to.
  ///
  /// Torch hands the callbacks of a thread on to others, and puts them back around a backward pass.
  /// So a scope registers one where the callbacks that are there now do not do, and takes back just
  /// that, in place of one callback that several scopes would change.
  class Scope {
   public:
    explicit Scope(OpListener& listener, Hears hears = {});
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    OpListener& listener_;
    std::optional<at::CallbackHandle> added_;
    std::optional<at::CallbackHandle> replaced_;
  };

  /// The listener of this type in this thread; null where there is none.
  template <typename Listener>
  static Listener* listener() noexcept {
    return static_cast<Listener*>(find(typeid(Listener)));
  }

 private:
  static OpListener* find(const std::type_info& type) noexcept;
};

}  // namespace infinitybatch::tape
