#include "execute/stand_ins.hpp"

#include "coupled/draw_laws.hpp"
#include "execute/buffer_rule.hpp"
#include "execute/findings.hpp"
#include "tape/modes.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>

namespace infinitybatch {

void refuse_to_cut(const std::string& op, const std::string& why) {
  throw CouplingError(
      op, op + " couples the samples of a batch, and " + why +
              "; make the budget large enough for one micro-batch, put the layer into eval mode, "
              "or accept another gradient with batch_coupling=\"per_micro_batch\"");
}

void StandIns::meet(const std::shared_ptr<const Recorded>& recorded) {
  if (first_) return agree(*recorded);
  first_ = recorded;
  const tape::Tape& tape = recorded->tape;
  coupled::DrawLaws& laws = findings_.draw_laws;
  const bool known = problem_.match_native_rng && laws.fit(tape);
  auto law = known ? laws.laws.begin() : std::vector<coupled::DrawLaw>::iterator();
  for (size_t s = 1; s < recorded->stretches.size(); ++s) {
    const tape::Op& op = recorded->first_op(recorded->stretches[s]);
    ops_.push_back(
        coupled::draws_for_all(tape, op)
            ? coupled::draw_stand_in(tape, op, known ? &*law++ : nullptr, numbers_.streams())
            : coupled::stand_in(tape, op));
  }
}

void StandIns::forget() {
  first_.reset();
  ops_.clear();
}

void StandIns::agree(const Recorded& here) const {
  const Recorded& first = *first_;
  const size_t count = std::max(here.stretches.size(), first.stretches.size());
  for (size_t s = 1; s < count; ++s) {
    const auto op = [s](const Recorded& of) -> const tape::Op& {
      return of.first_op(of.stretches[s]);
    };
    const auto name = [&](const Recorded& of) {
      return s < of.stretches.size() ? op(of).facts->name() : std::string("none");
    };
    const auto has_gradients = [&](const Recorded& of) {
      return of.tape.modes[op(of).modes].grad_mode;
    };
    const bool both = name(here) != "none" && name(first) != "none";
    if (both && coupled::same_layer(first.tape, op(first), here.tape, op(here))) {
      const bool draws = coupled::draws_for_all(first.tape, op(first));
      if (draws || has_gradients(here) == has_gradients(first)) continue;
      refuse_to_cut(name(here),
                    "it runs without gradients (torch.no_grad) for some micro-batches and with "
                    "them for others, which forward of the whole batch decides once");
    }
    refuse_to_cut(name(first) == "none" ? name(here) : name(first),
                  "micro-batches do not run the same layers that see the whole batch (number " +
                      std::to_string(s) + " is " + name(first) + " in the first and " +
                      (name(here) == name(first) ? "another " : "") + name(here) + " in another)");
  }
}

void StandIns::combine(int64_t stretch, BufferRule& buffers) {
  const int64_t segment = first_->stretches[static_cast<size_t>(stretch)];
  const tape::ModesGuard modes;
  first_->tape.modes[first_->first_op(segment).modes].apply();
  before(stretch).combine(settled_);
  for (const coupled::SettledBuffers::Entry& entry : settled_.entries()) {
    buffers.settle(entry.buffer, entry.value);
  }
}

void StandIns::begin_backward(bool keep) {
  for (const auto& op : ops_) op->begin_backward(keep);
}

}  // namespace infinitybatch
