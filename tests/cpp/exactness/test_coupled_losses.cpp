// Losses that compare samples with each other, on every family: ours against the native whole
// batch.
#include "exactness/two_passes.hpp"

#include <ATen/ATen.h>

namespace infinitybatch::testing {
namespace {

/// A coupled loss as a row of the criterion table, and a parameter of its own where it has one.
struct CoupledCase {
  CriterionCase row;
  at::Tensor own;
};

/// Two towers; the temperature is learnt.
CoupledCase info_nce() {
  CoupledCase result;
  result.own = at::full({}, 1.3, at::kDouble).requires_grad_();
  result.row.name = "info_nce";
  result.row.features = 8;
  result.row.head = several(2, {4});
  result.row.targets = [](Draw&) { return Batch::tuple({}); };
  result.row.native = [own = result.own](const Tensors& outputs, const Tensors&) {
    const at::Tensor a = F::normalize(outputs[0], F::NormalizeFuncOptions().dim(1));
    const at::Tensor b = F::normalize(outputs[1], F::NormalizeFuncOptions().dim(1));
    const at::Tensor logits = a.mm(b.t()) * own.exp();
    const at::Tensor labels = at::arange(a.size(0), at::kLong);
    return (at::cross_entropy_loss(logits, labels) + at::cross_entropy_loss(logits.t(), labels)) /
           2;
  };
  return result;
}

/// Triplets of each sample with its farthest positive and its nearest negative.
CoupledCase batch_hard() {
  CoupledCase result;
  result.row.name = "batch_hard";
  result.row.features = 5;
  result.row.head = reshaped({5});
  result.row.targets = [](Draw& draw) { return Batch(draw.integers(0, 2, {})); };
  result.row.native = [](const Tensors& outputs, const Tensors& targets) {
    const at::Tensor squares = outputs[0].square().sum(1);
    const at::Tensor distance =
        squares.unsqueeze(1) + squares.unsqueeze(0) - 2 * outputs[0].mm(outputs[0].t());
    const at::Tensor same = targets[0].unsqueeze(1) == targets[0].unsqueeze(0);
    const at::Tensor positive = distance.masked_fill(~same, -1e9).amax(1);
    const at::Tensor negative = distance.masked_fill(same, 1e9).amin(1);
    return at::softplus(positive - negative).mean();
  };
  return result;
}

/// Every pair of samples that one ranks above the other.
CoupledCase ranking() {
  CoupledCase result;
  result.row.name = "ranking";
  result.row.features = 1;
  result.row.head = reshaped({});
  result.row.targets = [](Draw& draw) { return Batch(draw.normal({})); };
  result.row.native = [](const Tensors& outputs, const Tensors& targets) {
    const at::Tensor above = (targets[0].unsqueeze(1) > targets[0].unsqueeze(0)).to(at::kDouble);
    const at::Tensor pairs = at::softplus(outputs[0].unsqueeze(0) - outputs[0].unsqueeze(1));
    return (pairs * above).sum() / above.sum().clamp_min(1);
  };
  return result;
}

/// Of nobody's library: it leaves one output alone, and has a term on the spread of another.
CoupledCase own() {
  CoupledCase result;
  result.row.name = "own";
  result.row.features = 6;
  result.row.head = several(3, {2});
  result.row.targets = [](Draw& draw) { return Batch(draw.normal({2})); };
  result.row.native = [](const Tensors& outputs, const Tensors& targets) {
    const at::Tensor balance = outputs[0].softmax(1).mean(0);
    return (outputs[0] - targets[0]).pow(2).mean() + (balance * balance.log()).sum() +
           outputs[2].var(0, /*unbiased=*/false).sum();
  };
  return result;
}

const std::vector<CoupledCase>& cases() {
  static const std::vector<CoupledCase> all = {info_nce(), batch_hard(), ranking(), own()};
  return all;
}

template <typename Strategy>
class ExactCoupled : public ::testing::Test {
 public:
  ExactCoupled(const Family& family, const CoupledCase& coupled)
      : family_(family), case_(coupled) {}

  void TestBody() override {
    const auto subject = make_subject(family_, case_.row, at::kDouble, 11);
    for (const Sizes& sizes : all_sizes()) {
      SCOPED_TRACE("N=" + std::to_string(sizes.samples) +
                   ", micro_batch_size=" + std::to_string(sizes.micro_batch_size));
      const Data data = make_data(family_, case_.row, sizes.samples, at::kDouble, 23);
      const Gradients reference =
          with_own([&] { return native(*subject, case_.row, data, false); });
      const Gradients moved =
          with_own([&] { return native(*subject, case_.row, backwards(data), false); });
      subject->drop_gradients();
      subject->take_forwards();
      const Gradients found = with_own([&] {
        const StepReport report = Strategy::run(Model(subject), loss(), data.inputs, data.targets,
                                                sizes.samples, sizes.micro_batch_size);
        expect_cost<Strategy>(*subject, report, sizes);
        return gradients_of(*subject, report.loss);
      });
      expect_none(excess_in_double(found, reference, moved));
    }
  }

 private:
  CoupledLoss loss() const {
    return losses::coupled([native = case_.row.native](const Batch& outputs, const Batch& targets) {
      return native(outputs.tensors(), targets.tensors());
    });
  }

  /// All losses here are the same whatever the order of the samples; without inputs and targets of
  /// N = 1 there is nothing to reverse.
  static Data backwards(const Data& data) { return reversed(data); }

  /// Gradients of the model, and that of the loss's own parameter beside them.
  template <typename Run>
  Gradients with_own(Run&& run) const {
    at::Tensor own = case_.own;
    if (own.defined()) own.mutable_grad().reset();
    Gradients result = run();
    if (own.defined()) result.parameters.push_back({"own", own.grad().clone()});
    return result;
  }

  const Family& family_;
  const CoupledCase& case_;
};

template <typename Strategy>
bool register_coupled(size_t first) {
  size_t row = 0;
  const size_t every = one_in(5);
  for (const Family& family : families()) {
    if (family.autocast) continue;  // which leaves float64 alone
    for (const CoupledCase& coupled : cases()) {
      if (row++ % every != first % every) continue;
      const std::string suite = Strategy::name() + "_coupled";
      const std::string name = family.name + "__" + coupled.row.name;
      ::testing::RegisterTest(suite.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                              [&family, &coupled]() -> ::testing::Test* {
                                return new ExactCoupled<Strategy>(family, coupled);
                              });
    }
  }
  return true;
}

const bool registered = register_coupled<Replay<Retained::none>>(0) &&
                        register_coupled<Replay<Retained::some>>(1) &&
                        register_coupled<Replay<Retained::all>>(2) && register_coupled<Wrapping>(3);

}  // namespace
}  // namespace infinitybatch::testing
