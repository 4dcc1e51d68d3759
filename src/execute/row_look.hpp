#pragma once

#include "core/row_range.hpp"
#include "execute/gradient_look.hpp"
#include "execute/moved_values.hpp"
#include "execute/rows_seen.hpp"
#include "memory/high_water.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/errors.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// What one forward gave that left nothing behind.
struct TrialOutputs {
  Batch outputs;                               ///< detached
  std::map<std::string, std::string> foreign;  ///< where foreign random generators stand after it
  bool strayed = false;  ///< numbers were drawn that nobody has fixed: shapes alone tell anything
};

/// Where so many rows of a batch are looked at: a few places, evenly.
std::vector<int64_t> places_of_looks(int64_t batch_size, int64_t rows);

/// Under the budget not as many samples could be looked at as tell whether forward or backward
/// combines them. A smaller plan would not help.
class NoRoomToLook : public BudgetExceeded {
 public:
  /// \param backward whether it is gradients that could not be compared, of two samples
  NoRoomToLook(int64_t needed, int64_t limit, int64_t samples, bool backward);
};

/// A look on an accelerator has taken more than it foresaw: it passed the budget, or the device had
/// no more. The next one takes less.
struct LookedTooFar {
  int64_t rows;  ///< side by side
};

/// The same rows, split otherwise, must give the same rows of outputs: forward on more rows than a
/// micro-batch has is compared with forward on some of these alone. Finds whatever depends on the
/// other samples, on how many there are, or on where a sample stands among them, by whatever means
/// (ops, numbers on the host, branches, opaque code), as far as these rows show it.
struct RowLook {
  int64_t batch_size = 0;
  int64_t rows = 0;      ///< of the smallest micro-batch
  bool singles = false;  ///< whether the first ones are of one sample
  bool sorted = false;   ///< by length: the first ones need more memory than others
  bool again = false;    ///< so few were compared before
  at::Device device = at::kCPU;
  /// The most bytes that may be live meanwhile: the look takes as many rows as fit. On the CPU a
  /// limit is enforced; on accelerators what few rows took says how many that are.
  std::optional<int64_t> peak;
  int64_t most = 0;            ///< on an accelerator: rows side by side, see `RowsSeen::most`
  bool few = false;            ///< whether hardly more rows than a micro-batch's may be loaded
  bool joins = false;          ///< whether outputs of micro-batches become those of the batch
  std::vector<bool> compared;  ///< which leaves of the outputs matter; empty: all
  std::vector<int64_t> dims;   ///< what is known of them; see `RowsSeen::dims`
  std::function<Batch(const std::vector<Rows>&)> load;  ///< side by side
  /// Forward, with `coupled::FixedOps` and the same random state each time, undone. Nothing where
  /// what it gave cannot be compared.
  /// \param rounded see `RoundedOps`; 0: as it rounds
  std::function<std::optional<TrialOutputs>(const Batch& inputs, int64_t rows, uint32_t rounded)>
      run;
  /// Parameters at other values while forward runs, unless it fails there, or gives numbers that
  /// are not finite. Not `again`: somebody else may read them meanwhile, and behind the first steps
  /// they have values of their own. Null where they stay.
  MovedValues* moved = nullptr;
  std::optional<GradientLook> gradients;  ///< where going back runs code of the user's

  struct Seen {
    std::optional<std::string> differs;  ///< what, for people
    std::vector<int64_t> dims;           ///< along which samples lie in each leaf; -1: nobody knows
    bool backward = false;               ///< gradients differ, and outputs do not
    bool listed = false;                 ///< see `values_per_sample`
    bool compared = false;               ///< some rows with others
    int64_t grown = 0;  ///< on an accelerator: so many rows were seen, more than surely fit
  };
  /// Whether rows differ: nothing where all rows are the same, or nobody can tell: forward
  /// refuses other numbers of rows, or it draws numbers that cannot be fixed.
  /// \throws NoRoomToLook where a memory limit leaves room for no comparison at all
  /// \throws what the device throws where it has no room for one
  Seen find() const;

  mutable bool goes_back = false;  ///< whether what runs, or has failed, is `gradients`

 private:
  Seen find_on_accelerator() const;
};

/// Watches the peak of a step after which rows are looked at; not on the CPU where torch uses
/// another allocator than this library's.
void watch_peak(std::optional<memory::HighWater>& peak, at::Device device);
/// `RowLook::peak`: all that a budget allows; where none counts, the step's own peak, and at least
/// 256 KiB more than is live now (on accelerators 16 MiB), so that small models are looked at as a
/// whole.
int64_t room_for_a_look(int64_t peak, at::Device device);

/// \param seen   where `RowLook::find` found a difference
/// \param before what was known before this step
/// \param inputs one row of them
CouplingError rows_differ(const RowLook::Seen& seen, int64_t batch_size, const RowsSeen& before,
                          const Batch& inputs);

}  // namespace infinitybatch
