#pragma once

#include "execute/profile.hpp"
#include "plan/timings.hpp"

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/execute/plan.hpp>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch {

/// What is asked of the planner for one step.
struct Request {
  std::string signature;  ///< types and ranks of a sample's leaves, train or eval, autocast
  /// How long samples are: what is alike but for these shares plans. Of one signature always as
  /// many leaves of the same ranks.
  Dims dims;
  int64_t batch_size = 0;
  int64_t baseline_bytes = 0;  ///< live on the device when the first instruction starts
  int64_t budget_bytes = 0;
  bool penalty = false;
  bool two_pass = false;         ///< measured in a rehearsal: a coupled loss, or tapes that are cut
  int64_t segments = 0;          ///< where above 0: of cut tapes
  bool offloaded = false;        ///< what waits leaves the device, so no graph is kept there
  bool outputs_offload = false;  ///< outputs of a coupled loss and their gradients among it
  bool keeps_graphs = true;      ///< with `two_pass`: as many as fit
  bool offloads_graphs = false;  ///< with `offloaded`: all are kept, away from the device
  bool whole_loss = true;        ///< with `two_pass`: the loss is computed on the outputs of all
  /// Nothing refuses what passes the budget (accelerators): only sizes that fit by all that is
  /// known are tried, from two samples on, and blocks are rounded.
  bool measured = false;
  bool whole_batch_only = false;  ///< samples are coupled: one micro-batch of all is exact
  /// Forward fails on so many samples, and on fewer: sizes are tried from the whole batch down.
  int64_t fails_on = 0;
  bool copies_one = false;  ///< outputs of a single micro-batch are copied where others are joined
};

/// A stretch of a step: consecutive micro-batches, and what to measure while they run.
struct Piece {
  Plan plan;
  bool trace = false;  ///< record allocations (a single micro-batch)
  /// Where above 0: micro-batches of one size, each of which is timed; on accelerators this waits
  /// for the device.
  int64_t timed_cap = 0;
  bool settled = false;  ///< a whole step of a plan that is settled
};

/// What was measured while a piece ran.
struct Measurement {
  std::optional<MicroBatchTrace> trace;
  std::optional<MicroBatchProfile::Effect> whole_loss;
  std::vector<double> seconds;  ///< of each micro-batch of a timed piece
  std::vector<double> again;    ///< of these: forward once more, which a kept graph saves
  int64_t peak_bytes = 0;
  int64_t lasting_bytes = 0;  ///< live more than before, beside sums of gradients
  /// Of every micro-batch, where they need not be alike: how long its samples are. Else empty.
  std::vector<Dims> dims;
};

/// Chooses micro-batch sizes under a memory budget.
///
/// The first step with a new kind of sample is its own experiment: real micro-batches of 2 and 4
/// samples are traced, every size's peak is predicted from them, and sizes that fit are timed in
/// turn while their gradients are kept. Once every promising size has been timed often enough the
/// plan is settled: the fastest size whose predicted peak is inside the budget. Where forward runs
/// twice a size counts as what it takes beside the graphs that fit: many small ones can take less
/// than the fastest size, of which none fits twice.
///
/// Longer samples need more of everything. So a kind of sample that is shorter than one that is
/// known follows its plan, without probes: the prediction is a bound then. Only what has come back
/// often, and could be faster in larger micro-batches, gets a plan of its own. Where samples of one
/// logical batch are of unequal length, peaks are bounded from the largest measured one, scaled to
/// the longest samples that were seen.
///
/// A machine with other work on it can make a micro-batch look slower than it is, never faster. So
/// a size counts as fast as the best of its micro-batches are, which are spread over several pieces
/// and, where a step has few rows, over several steps.
class Planner {
 public:
  /// Begins a step. \throws BudgetExceeded where no size can fit
  void begin(const Request& request);

  /// The next stretch of the step; empty when all rows are done. Of a coupled loss it is the next
  /// stretch of a rehearsal instead, whose gradients are thrown away; empty as soon as enough is
  /// known.
  std::optional<Piece> next();
  /// With `Request::offloads_graphs`, after `begin`: whether what is offloaded is copied in turn,
  /// in larger micro-batches, or sizes leave room for copies beside compute.
  void copy_in_turn(bool in_turn);
  /// Where there is a rehearsal: the step itself.
  Piece two_pass();
  void observe(const Piece& piece, const Measurement& measurement);
  /// Of a loss that is computed outside of the step: what it did to live memory between the passes
  /// of `plan`. The most of what was ever seen counts.
  void saw_whole_loss(const Plan& plan, MicroBatchProfile::Effect effect);
  /// Whether that is known for plans of as many micro-batches, as far as they differ in it.
  bool foresees_whole_loss(const Plan& plan) const;

  /// Takes an out-of-memory error in the middle of a step into account: after it `begin` plans
  /// smaller. \throws BudgetExceeded where nothing smaller is left
  /// \param needed_bytes what would have been live
  /// \param in_loss      it happened in the loss of all outputs
  void ran_out_of_memory(int64_t needed_bytes, bool in_loss = false);

  /// Whether one micro-batch of the whole logical batch may be tried, where samples are coupled.
  bool whole_batch_may_fit() const;

  /// Whether the last BudgetExceeded was about the smallest plan there is, not about what stands
  /// around it.
  bool smallest_failed() const noexcept { return smallest_failed_; }

  /// True once the plan will not change any more unless memory runs out.
  bool settled() const;
  /// Whether the last plan was settled and for such a step, whatever is live now: then there is
  /// nothing to rehearse in front of it. A rehearsal need not even be prepared.
  bool settled_for(const Request& request) const;

  /// The plan for the current request as far as it is known.
  Plan plan() const;

 private:
  // Two sizes whose timelines are compared; never 1, which takes other kernels.
  static constexpr int64_t kSmallProbe = 2;
  static constexpr int64_t kLargeProbe = 4;
  // Added to the largest measured peak per sample where memory depends on the data's values.
  static constexpr double kIrregularMargin = 0.25;

  struct Knowledge {
    std::vector<MicroBatchTrace> traces;
    std::optional<MicroBatchProfile> profile;
    bool irregular = false;            // traces of different sizes tell different stories
    std::map<int64_t, int64_t> peaks;  // measured, above the baseline, by size
    Timings timings;
    int64_t largest = INT64_MAX;       // sizes above have run out of memory
    double correction = 1.0;           // measured peak / predicted peak, where that was more
    std::map<int64_t, double> ratios;  // `Request::measured`: the last, by size
    // Of whole steps, the last, above the baseline, by batch size and size. What has fit is not
    // refused by a prediction, which takes memory to grow with the size.
    std::map<std::pair<int64_t, int64_t>, int64_t> steps;
    // Since the last whole step: small sizes that ran out of memory, and the one that is tried
    // whatever is predicted (0: none).
    std::set<int64_t> failed;
    int64_t last_resort = 0;
    // Of a coupled loss:
    // Measured, by batch size and whether it was one micro-batch, whose outputs are not copied.
    std::map<std::pair<int64_t, bool>, MicroBatchProfile::Effect> whole_loss;
    int64_t most_retained = INT64_MAX;  // more have run out of memory
    int shortages = 0;                  // how often `largest` or `most_retained` fell
    int64_t calm = 0;                   // attempts since they last did
    bool in_turn = false;               // copies beside compute have; of what is offloaded
    // Of samples of unequal length in one logical batch:
    bool ragged = false;
    std::optional<Dims> lengths;      // of the first micro-batch that was seen
    double longest = 0;               // elements of a sample, the most that was seen
    std::map<int64_t, double> works;  // by size: the most elements of a sample in it
  };
  using Kind = std::pair<std::string, Dims>;

  /// Sizes to choose from, as upper ends: powers of two and the largest that fits. A logical batch
  /// is split evenly into micro-batches of at most that size, so that batches of different sizes
  /// share what was timed.
  std::vector<int64_t> candidates() const;
  int64_t size_under(int64_t cap) const;
  int64_t predicted_peak(int64_t size) const;
  /// Measured peak / predicted peak, of this size or the next smaller one that was measured.
  double correction(int64_t size) const;
  int64_t simulated_peak(int64_t size) const;
  bool fits(int64_t size) const;
  /// What a whole step of this split has taken, on top of what is live now.
  std::optional<int64_t> measured_step(int64_t size) const;
  /// Where no size is left by all that is known: a small one that has yet to fail. A prediction
  /// alone is no reason to refuse a step that can begin again.
  bool find_last_resort();
  [[noreturn]] void refuse_smallest(int64_t needed_bytes);
  /// The largest size that may fit, with more samples in each micro-batch than forward fails on.
  std::vector<int64_t> largest_candidate() const;
  [[noreturn]] void refuse_larger(int64_t needed_bytes) const;
  bool fits_here(int64_t size) const;
  std::vector<int64_t> split_rest() const;
  /// Micro-batches as they are measured.
  Plan measured_plan(std::vector<int64_t> sizes) const;
  /// Of a plan with so many micro-batches: measured with one or several, or the other of these.
  /// Without graphs that are kept.
  std::optional<MicroBatchProfile::Effect> whole_loss(size_t micro_batches) const;
  /// The same where `plan` keeps some; nothing where it is not known.
  MicroBatchProfile::Effect whole_loss_of(const Plan& plan) const;
  /// Bytes of outputs that graphs which are kept go on holding once all have been joined.
  int64_t held_beside_joined(const Plan& plan) const;
  bool knows_whole_loss(size_t micro_batches) const;
  /// What the smallest plan consists of, for people.
  std::string smallest_plan() const;
  /// The step itself, where there is a rehearsal.
  /// \param overlap of a offloaded plan: copies run while other micro-batches compute
  Plan whole_plan(int64_t size, int64_t retained, bool overlap = false) const;
  int64_t two_pass_peak(int64_t size, int64_t retained) const;
  /// Of a whole plan, as the simulator tells it.
  int64_t peak_of(const Plan& plan) const;
  /// By what was measured above what was predicted.
  int64_t corrected(int64_t peak) const;
  bool overlaps(int64_t size) const;
  int64_t most_retained(int64_t size) const;
  /// Of the samples, those whose graph a plan of this size keeps.
  double kept_share(int64_t size) const;
  double kept_share(int64_t size, int64_t retained) const;
  void observe_two_pass(const Piece& piece, const Measurement& measured);
  /// The wanted cap that was timed in the fewest pieces, of those that fit into the step's rest.
  std::optional<int64_t> cap_to_time() const;
  /// How many micro-batches of `cap` the next timed piece runs.
  int64_t timed_count(int64_t cap) const;
  void learn_times(const Piece& piece, const Measurement& measured);
  bool stays_whole(int64_t size) const;
  int64_t fastest() const;
  std::optional<int64_t> probe_size() const;
  int64_t small_probe() const;
  /// Of cut tapes, where there are rows enough, a second micro-batch tells what there is once.
  size_t probed_micro_batches() const;
  void learn(MicroBatchTrace trace);
  /// Whose knowledge the request is planned with.
  void choose_knowledge();
  /// The shortest of the longer kinds that are known well enough to plan with; null where none is.
  std::pair<const Kind, Knowledge>* longer_kind();
  bool could_gain(const Dims& longer) const;
  /// From now on this kind has knowledge of its own.
  void stop_borrowing();
  /// What a step under the plan of longer samples tells.
  void observe_borrowed(const Piece& piece, const Measurement& measured);
  void notice_lengths(const Piece& piece, const Measurement& measured);
  double ragged_peak(int64_t size) const;
  void forget_settled_plan();
  void run_short(int64_t& ceiling, int64_t to);
  bool may_try_again();
  Plan make_plan() const;
  Candidate candidate(int64_t cap) const;
  std::string reason(int64_t cap) const;

  Request request_;
  std::map<Kind, Knowledge> knowledge_;
  std::map<std::string, Knowledge> ragged_;  // by signature: lengths differ all the time
  std::map<Kind, int> borrowings_;           // steps of a kind under the plan of a longer one
  Knowledge* known_ = nullptr;
  bool borrowed_ = false;                  // `known_` is of longer samples
  double work_ratio_ = 1.0;                // elements of their samples ÷ of these
  int64_t row_ = 0;                        // rows handed to the step so far
  int64_t last_cap_ = 0;                   // of the piece that ran last, where it was timed
  std::optional<Plan> settled_plan_;       // for the current request
  mutable std::optional<Plan> full_plan_;  // the settled one with what `explain` needs
  bool smallest_failed_ = false;
  int64_t attempted_ = 0;           // the largest micro-batch of the current attempt
  int64_t attempted_retained_ = 0;  // of a coupled loss: graphs it wanted to keep
  bool attempted_overlap_ = false;  // of what is offloaded
};

}  // namespace infinitybatch
