#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace infinitybatch {

/// Whether an operator talks to other ranks ("c10d::allreduce_").
bool is_collective(std::string_view op) noexcept;

/// Runs user code in which no collective may begin: one raises Unsupported before anything is sent.
/// Ranks split their batches as each of them likes, and repeat what each has to repeat: what one
/// sends then meets other rows of another rank, or nothing.
/// \param who runs it, for the message: "forward"
/// \param why other ranks would not answer, and the way out; nothing where it runs as natively,
///            unless what stands around it says otherwise
/// \throws Unsupported where one was refused, whatever its caller has made of that error
void without_collectives(std::string who, std::optional<std::string> why,
                         const std::function<void()>& run);

/// What this thread has begun to say to other ranks since this object was made.
class CollectivesSince {
 public:
  CollectivesSince();
  bool any() const noexcept;
  /// What failed may be done again where other ranks have heard nothing of it.
  /// \throws Unsupported
  void refuse_retry() const;

 private:
  int64_t before_;
};

}  // namespace infinitybatch
