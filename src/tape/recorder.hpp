#pragma once

#include "tape/frontiers.hpp"
#include "tape/op_bus.hpp"
#include "tape/tape.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

namespace infinitybatch::tape {

/// Records what one call of a model does.
///
///     Recorder recorder(inputs, buffers, devices);
///     Batch outputs = recorder.run([&] { return model(inputs); });
///     Tape tape = recorder.finish(outputs);
///
/// The model runs in the caller's grad mode, so that it takes the way it takes natively. Only the
/// outermost dispatched calls are kept. What a tape cannot see is noticed by provenance: each value
/// remembers its graph node, output number, `requires_grad`, storage and version; where one of them
/// differs at its next use somebody changed it outside of the dispatcher, and the tape is opaque.
/// So do autograd functions, hooks set in forward, compiled regions, saved-tensor hooks, functorch,
/// dispatch modes, tensor subclasses, other streams, and memory of the recording that comes back
/// under another tensor. Records this thread only.
class Recorder {
 public:
  /// \param buffers the model's: tapes may write into them
  /// \param devices whose default generators the model may draw from, beside the CPU's
  Recorder(const Batch& inputs, const std::vector<at::Tensor>& buffers,
           const std::vector<at::Device>& devices);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Records ops of this thread while it lives. Scopes may be nested: each sees what runs inside.
  class Scope {
   public:
    explicit Scope(Recorder& recorder);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    class Program& program_;
    class Program* outer_ = nullptr;
    std::optional<OpBus::Scope> listening_;
  };

  template <typename Call>
  auto run(Call&& call) {
    auto result = recorded(call);
    rethrow();
    return result;
  }

  /// \throws what went wrong while recording (out of memory): ops may be missing from the tape
  void rethrow();

  /// Where somebody has a copy of what `found` gives for a buffer, the tape shares it; undefined
  /// where nobody has. Call it before `run`.
  void borrow(std::function<at::Tensor(const at::Tensor& buffer)> found);

  /// Storages of parameters that somebody puts back when forward has written them: it may run
  /// again. Call it before `run`.
  using Storages = std::unordered_set<const c10::StorageImpl*>;
  void leave_parameters(std::shared_ptr<const Storages> parameters);

  /// Changes the results of ops that `which` picks, as soon as they are there: what forward does
  /// next must not depend on their values. Call it before `run`.
  void disturb(std::function<bool(const Tape&, const Op&)> which);

  /// For a tape that is played on other rows later: notes what user code sees of values, which
  /// has to be the same there (witness.hpp). Call it before `run`.
  void witness();

  /// For a forward whose graph would not fit: graph nodes let go of what they save as soon as their
  /// op has run, and what each op costs is noted (`Tape::costs`). Outputs carry the graph that they
  /// carry natively, hooks included, but it cannot run backward. Call it before `run`.
  void lighten(at::Device device);

  /// Keeps what waits at the cuts of an earlier recording of the same program, as long as ops and
  /// values are those of that program; where they differ all is let go of, and this is a light
  /// recording like the first one. Call it before `run`, with `lighten`.
  /// \param tail    behind the last cut graph nodes keep what they save again: that part of the
  ///                graph can run backward to the cut, if the frontiers say so afterwards
  /// \param reached called at each cut, in the middle of forward, with its number; with -1 where
  ///                the program turns out to be another one
  void keep(FrontierGuide guide, bool tail,
            std::function<void(const Frontiers&, int32_t cut)> reached);
  /// What was kept, after `finish`.
  Frontiers take_frontiers();

  /// Call it once, outside of the scope, while `outputs` still carry their graph.
  /// \param trimmed without it the tape keeps ops whose results nothing needs; see `trim`
  /// \throws what went wrong while recording (out of memory)
  Tape finish(const Batch& outputs, bool trimmed = true);

 private:
  template <typename Call>
  auto recorded(Call& call) {
    const Scope recording(*this);
    return call();
  }

  std::shared_ptr<class Program> program_;
};

}  // namespace infinitybatch::tape
