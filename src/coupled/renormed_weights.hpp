#pragma once

#include "core/callback_errors.hpp"

#include <infinitybatch/core/model.hpp>

#include <ATen/core/TensorBody.h>
#include <c10/util/intrusive_ptr.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::tape {
class SeenOp;
}

namespace infinitybatch::coupled {

/// Memory of parameters of which some embedding scales rows.
using RenormedMemory = std::set<const c10::StorageImpl*>;

/// Parameters of which an embedding's `max_norm` scales the rows that it looks up
/// (`aten::embedding_renorm_`), while the batch comes in micro-batches.
///
/// The whole batch's forward scales each of these rows once and then reads it. So do micro-batches:
/// a row that an earlier one has scaled already is put back as it was, for scaling it again could
/// move its last bits. Every lookup sees the row that it sees natively, and in the end the weight
/// is the one that the whole batch leaves. Whoever else reads the weight would find rows that later
/// micro-batches have yet to scale: that couples the samples.
///
/// The first scaling of a parameter raises its version, later ones do not, so that graphs which
/// have saved it (`per_sample_weights`) stay valid. Holds a copy of each such parameter until
/// `commit`.
class RenormedWeights {
 public:
  void know_parameters(const std::vector<NamedParameter>& parameters);
  /// Copies the parameters among `memory` at once, where they are known to be scaled, and adds to
  /// it what is met. Call it after `know_parameters`.
  void expect(RenormedMemory* memory);

  /// Whether nothing was scaled.
  bool empty() const noexcept { return !any_; }
  /// Whether rows of `tensor` were.
  bool contains(const at::Tensor& tensor) const { return met(tensor) != nullptr; }

  /// In front of `aten::embedding_renorm_`, and after it.
  /// \return why it couples the samples; nothing where it does not
  std::optional<std::string> begin(const tape::SeenOp& op);
  void end();

  /// Whether another op is a lookup of rows that were scaled in this forward.
  bool is_lookup(const tape::SeenOp& op) const;
  /// The reason why another op couples the samples: it reads such a parameter.
  std::optional<std::string> other_read(const tape::SeenOp& op) const;

  /// A new forward.
  void forget() { looked_up_.clear(); }
  /// \throws what went wrong in `begin` and `end`
  void forget_errors() noexcept { errors_.forget(); }
  void rethrow() { errors_.rethrow(); }

  /// Parameters and their versions as they were before the first scaling, other tensors as they
  /// were; as if there had been none.
  void undo();
  /// It will not be undone: lets go of the copies.
  void commit();

 private:
  struct Weight {
    at::Tensor parameter;
    at::Tensor rows;    // its memory, under a version of its own
    at::Tensor before;  // a copy; undefined after `commit`
    at::Tensor scaled;  // for each row whether it was, bool
    bool met = false;   // else it is only expected
    double max_norm = 0;
    double norm_type = 0;
    uint32_t version_before = 0;
    std::optional<uint32_t> version_after;  // the first scaling
  };
  /// A tensor of indices, as it was.
  struct Indices {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const c10::StorageImpl* weight;
    int64_t offset;
    int64_t count;
    uint32_t version;
  };
  Weight& prepare(const at::Tensor& parameter);
  const Weight* met(const at::Tensor& tensor) const;
  std::optional<std::string> meet(const at::Tensor& weight, double max_norm, double norm_type);
  std::string meet_other(const at::Tensor& rows, const std::string& what);
  void put_aside(const at::Tensor& indices);

  std::map<const c10::StorageImpl*, at::Tensor> parameters_;
  std::map<const c10::StorageImpl*, Weight> weights_;
  bool any_ = false;                                                             // of them was met
  std::map<const c10::StorageImpl*, std::pair<at::Tensor, at::Tensor>> others_;  // and copies
  RenormedMemory* memory_ = nullptr;
  std::vector<Indices> looked_up_;  // in this forward

  // The op at work:
  Weight* at_work_ = nullptr;
  at::Tensor again_;  // indices of rows that were scaled before
  at::Tensor rows_;   // these rows
  CallbackErrors errors_;
};

}  // namespace infinitybatch::coupled
