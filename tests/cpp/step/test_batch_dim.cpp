// Options::batch_dim, and outputs that flatten time and batch.
#include "step/support.hpp"

#include "core/sample_rows.hpp"
#include "step/mark_batch.hpp"

#include <infinitybatch/step/batch_dim.hpp>

namespace infinitybatch::testing {
namespace {

constexpr int64_t kTime = 5, kSamples = 7, kWords = 6;

Options of_size_and_dim(int64_t micro_batch_size, BatchDim dim) {
  Options options = of_size(micro_batch_size);
  options.batch_dim = std::move(dim);
  return options;
}

/// A recurrent network over [time, batch, features], whose scores are flattened.
struct Tagger : nn::Module {
  Tagger() {
    torch::manual_seed(3);
    rnn = register_module("rnn", nn::GRU(nn::GRUOptions(4, 3).num_layers(2)));
    head = register_module("head", nn::Linear(3, kWords));
    to(at::kDouble);
  }
  Batch forward(const Batch& inputs) {
    const bool pair = !inputs.is_tensor();
    const at::Tensor x = pair ? inputs[0].tensor() : inputs.tensor();
    auto [states, last] = rnn(x, pair ? inputs[1].tensor() : at::Tensor());
    const at::Tensor scores = head(states).view({-1, kWords});
    return pair ? Batch::tuple({scores, last}) : Batch(scores);
  }
  nn::GRU rnn = nullptr;
  nn::Linear head = nullptr;
};

struct TimeFirst {
  std::shared_ptr<Tagger> net = std::make_shared<Tagger>();
  at::Tensor x = at::randn({kTime, kSamples, 4}, at::kDouble);
  at::Tensor state = at::randn({2, kSamples, 3}, at::kDouble);
  at::Tensor labels = at::randint(kWords, {kTime * kSamples}, at::kLong);
};

TEST(BatchDimOption, FlattenedOutputsMeetFlattenedTargets) {
  const TimeFirst task;
  const at::Tensor loss = at::cross_entropy_loss(task.net->forward(task.x).tensor(), task.labels);
  const auto wanted = torch::autograd::grad({loss}, task.net->parameters());
  const auto whole = [](const Batch& outputs, const Batch& targets) {
    return at::cross_entropy_loss(outputs.tensor(), targets.tensor());
  };
  for (const int64_t size : {1, 2, 3, 7}) {
    for (const Loss& each : {Loss(losses::cross_entropy()), Loss(losses::coupled(whole))}) {
      VirtualBatch batch(task.net, each, of_size_and_dim(size, 1));
      for (int step = 0; step < 2; ++step) {
        task.net->zero_grad();
        EXPECT_LE(error(batch.backward(task.x, task.labels).loss, loss), 1e-12);
        expect_gradients(*task.net, wanted);
      }
    }
  }
}

TEST(BatchDimOption, WrapGivesNativeOrderAndSplitsStates) {
  const TimeFirst task;
  const Batch inputs = Batch::tuple({task.x, task.state});
  const Batch native = task.net->forward(inputs);
  const auto loss = [&](const Batch& outputs) {
    const at::Tensor scores = outputs[0].tensor();
    const at::Tensor weights = at::arange(scores.size(0), at::kDouble).sin().unsqueeze(1);
    return at::cross_entropy_loss(scores * weights, task.labels) + outputs[1].tensor().exp().sum();
  };
  const auto wanted = torch::autograd::grad({loss(native)}, task.net->parameters());
  for (const BatchDim& dim : {BatchDim(1), BatchDim{{"0", 1}, {"1", 1}}}) {
    for (const int64_t size : {1, 2, 3, 7}) {
      const Wrap wrapped(task.net, of_size_and_dim(size, dim));
      const Batch outputs = wrapped.forward(inputs);
      EXPECT_LE(error(outputs[0].tensor(), native[0].tensor()), 1e-14);
      EXPECT_LE(error(outputs[1].tensor(), native[1].tensor()), 1e-14);
      task.net->zero_grad();
      loss(outputs).backward();
      expect_gradients(*task.net, wanted);
    }
  }
}

TEST(BatchDimOption, VerifyAndEvaluationTakeIt) {
  const TimeFirst task;
  const Options options = of_size_and_dim(3, 1);
  EXPECT_TRUE(verify(task.net, losses::cross_entropy(), task.x, task.labels, options).exact());
  Evaluation evaluation(task.net, losses::cross_entropy(), options);
  evaluation.add(task.x, task.labels);
  const at::NoGradGuard no_grad;
  const at::Tensor loss = at::cross_entropy_loss(task.net->forward(task.x).tensor(), task.labels);
  EXPECT_NEAR(evaluation.loss(), loss.item<double>(), 1e-12);
}

TEST(BatchDimOption, SourcesMarkTheirRows) {
  const TimeFirst task;
  VirtualBatch batch(task.net, losses::cross_entropy(), of_size_and_dim(3, 1));
  const BatchSource inputs = BatchSource::from(Batch(task.x).with_batch_dim(1), "inputs");
  expect_says(message_of<InvalidArgument>([&] { batch.backward(inputs, inputs); }),
              "rows.with_batch_dim(1)");
}

TEST(BatchDimOption, RefusesDimensionsThatAreNone) {
  expect_says(message_of<InvalidArgument>([] { BatchDim(-1); }), "batch_dim is -1");
  expect_says(message_of<InvalidArgument>([] { BatchDim({{"x", -2}}); }), "batch_dim is -2");
}

/// Along which dimension each leaf of (x, other) is split, with one number for all.
int64_t dim_of(const at::Tensor& other, const BatchDim& dim = 1) {
  return mark_inputs(Batch::tuple({at::zeros({kTime, kSamples, 4}), other}), dim)
      .leaves()[1]
      .batch_dim;
}

TEST(MarkInputs, OneNumberIsForTensorsThatHaveTheBatchThere) {
  EXPECT_EQ(dim_of(at::zeros({2, kSamples, 3})), 1);
  EXPECT_EQ(dim_of(at::zeros({kSamples})), 0);
  EXPECT_EQ(dim_of(at::zeros({kTime, kTime})), Leaf::kShared);
  EXPECT_EQ(dim_of(at::zeros({4})), Leaf::kShared);
  EXPECT_EQ(dim_of(at::zeros({kSamples, kSamples}, at::kLong)), 1);  // words, not a mask
  const std::vector<std::vector<int64_t>> unclear{
      {kSamples, kSamples}, {kSamples, 4}, {kTime * kSamples, 4}};
  for (const std::vector<int64_t>& sizes : unclear) {
    EXPECT_THROW(dim_of(at::zeros(sizes)), BatchError) << at::IntArrayRef(sizes);
  }
}

TEST(MarkInputs, MarksOfTheOwnerStay) {
  const Batch inputs = Batch::tuple({at::zeros({kTime, kSamples}),
                                     Batch(at::zeros({kSamples, kSamples})).with_batch_dim(0),
                                     Batch(at::zeros({2, kSamples})).shared()});
  const Batch marked = mark_inputs(inputs, 1);
  EXPECT_EQ(marked.leaves()[0].batch_dim, 1);
  EXPECT_EQ(marked.leaves()[1].batch_dim, 0);
  EXPECT_EQ(marked.leaves()[2].batch_dim, Leaf::kShared);
}

TEST(MarkInputs, ByArgumentOthersHaveTheirSamplesFirst) {
  const Batch inputs =
      Batch::dict({{"words", at::zeros({kTime, kSamples})},
                   {"states", Batch::tuple({at::zeros({2, kSamples}), at::zeros({2, kSamples})})},
                   {"lengths", at::zeros({kSamples})}});
  const Batch marked = mark_inputs(inputs, {{"words", 1}, {"states", 1}});
  std::vector<int64_t> dims;
  for (const Leaf& leaf : marked.leaves()) dims.push_back(leaf.batch_dim);
  EXPECT_EQ(dims, (std::vector<int64_t>{1, 1, 1, 0}));
}

// What is flattened is sliced, joined and exchanged as what it was flattened from.
TEST(SampleRows, OfSeveralPlacesAreThoseBeforeTheyWereFlattened) {
  const at::Tensor apart = at::arange(kTime * kSamples * 2).view({kTime, kSamples, 2});
  for (const bool interleaved : {true, false}) {
    Leaf leaf;
    const at::Tensor first = interleaved ? apart : apart.transpose(0, 1);
    leaf.tensor = first.reshape({-1, 2});
    leaf.places = kTime;
    leaf.interleaved = interleaved;
    const at::Tensor rows = rows_of(leaf.tensor, leaf, {2, 5});
    EXPECT_TRUE(rows.equal(first.narrow(interleaved ? 1 : 0, 2, 3).reshape({-1, 2})));
    const Batch batch({leaf}, Structure::leaf());
    EXPECT_EQ(batch_size(batch, "targets"), kSamples);
    EXPECT_EQ(batch_size(infinitybatch::rows(batch, 2, 5), "targets"), 3);
  }
}

}  // namespace
}  // namespace infinitybatch::testing
