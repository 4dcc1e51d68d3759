#pragma once

#include "clock.hpp"

#include <ATen/core/Generator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <optional>

namespace sim {

/// Of the calling thread.
int current_device();
void set_current_device(int device);
/// The stream that the calling thread gives its work on `device`, as `stream_of` numbers them.
int current_stream(int device);

at::Generator default_generator(int device);

/// A number of the device's generator (its default one without `generator`): the seed of one
/// kernel's own.
uint64_t draw_seed(const std::optional<at::Generator>& generator, int device);

/// Gives a storage of the device other memory of `bytes`, with what it held.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

/// Waits for a stream: the host has then seen all that it did.
void synchronize(int stream, const char* kind);

}  // namespace sim
