#include "core/unwatched.hpp"

#include <utility>

namespace infinitybatch {

using c10::impl::TorchDispatchModeTLS;

Unwatched::Unwatched()
    : keys_(c10::impl::tls_local_dispatch_key_set()), modes_(TorchDispatchModeTLS::get_state()) {
  // Takes the keys away, too, by which ops reach the modes.
  TorchDispatchModeTLS::set_state({});
}

Unwatched::~Unwatched() {
  TorchDispatchModeTLS::set_state(std::move(modes_));
  // As they were found: code that a mode runs is not seen by it.
  c10::impl::_force_tls_local_dispatch_key_set(keys_);
}

}  // namespace infinitybatch
