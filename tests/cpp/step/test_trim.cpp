// Options::trim and Options::micro_batch_tokens.
#include "step/support.hpp"

#include "step/sorted_batch.hpp"

#include <infinitybatch/step/trim_padding.hpp>

namespace infinitybatch::testing {
namespace {

constexpr int64_t kVocabulary = 11, kPositions = 9;

Trimming::Sequence of_lengths(std::vector<int64_t> lengths) {
  Trimming::Sequence sequence;
  sequence.full = kPositions;
  sequence.lengths = std::move(lengths);
  return sequence;
}

TEST(Packed, RowsTimesTheLongestStaysInside) {
  const std::vector<Trimming::Sequence> one{of_lengths({9, 5, 4, 4, 2, 1, 1})};
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(packed(one, 10, std::nullopt), (Sizes{1, 2, 2, 2}));
  EXPECT_EQ(packed(one, 3, std::nullopt), (Sizes{1, 1, 1, 1, 1, 2}));
  EXPECT_EQ(packed(one, 1000, std::nullopt), (Sizes{7}));
  EXPECT_EQ(packed(one, 1000, 3), (Sizes{3, 3, 1}));
  EXPECT_EQ(packed(one, std::nullopt, 5), (Sizes{5, 2}));
}

TEST(Packed, SequencesThatArePaddedApartCountTogether) {
  // The longest of one need not be that of the other.
  const std::vector<Trimming::Sequence> two{of_lengths({6, 1, 1}), of_lengths({1, 5, 1})};
  EXPECT_EQ(packed(two, 22, std::nullopt), (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(packed(two, 21, std::nullopt), (std::vector<int64_t>{1, 2}));
}

/// The mean of what stands at real positions.
struct Reader : nn::Module {
  Reader() {
    torch::manual_seed(3);
    embed = register_module("embed", nn::Embedding(kVocabulary, 4));
    head = register_module("head", nn::Linear(4, 3));
    to(at::kDouble);
  }
  Batch forward(const Batch& inputs) {
    const at::Tensor mask = inputs["mask"].tensor().unsqueeze(-1).to(at::kDouble);
    const at::Tensor hidden = head(embed(inputs["ids"].tensor())).tanh();
    return at::sum(hidden * mask, 1) / mask.sum(1);
  }
  nn::Embedding embed = nullptr;
  nn::Linear head = nullptr;
};

struct Texts {
  std::shared_ptr<Reader> net = std::make_shared<Reader>();
  at::Tensor lengths = at::tensor({3, 9, 1, 2, 2, 7, 4}, at::kLong);
  at::Tensor mask = at::arange(kPositions).lt(lengths.unsqueeze(1)).to(at::kLong);
  at::Tensor ids = at::randint(1, kVocabulary, {7, kPositions}, at::kLong) * mask;
  Batch inputs = Batch::dict({{"ids", ids}, {"mask", mask}});
};

Options trimmed(int64_t tokens) {
  Options options;
  options.micro_batch_tokens = tokens;
  options.trim.push_back({.mask = {"mask"}});
  return options;
}

at::Tensor in_order(const at::Tensor& vectors) {
  return (vectors * at::arange(1, 8, at::kDouble).unsqueeze(1)).sum(1).square().mean();
}

TEST(Trim, LossesSeeTheCallersOrder) {
  const Texts task;
  const at::Tensor loss = in_order(task.net->forward(task.inputs).tensor());
  const auto wanted = torch::autograd::grad({loss}, task.net->parameters());
  const auto whole = [](const Batch& outputs, const Batch&) { return in_order(outputs.tensor()); };
  VirtualBatch batch(task.net, losses::coupled(whole), trimmed(10));
  const StepReport report = batch.backward(task.inputs, Batch());
  EXPECT_EQ(report.micro_batch_sizes, (std::vector<int64_t>{1, 1, 2, 3}));
  EXPECT_LE(error(report.loss, loss), 1e-12);
  expect_gradients(*task.net, wanted);
}

TEST(Trim, WrapGivesTheCallersOrder) {
  const Texts task;
  const at::Tensor native = task.net->forward(task.inputs).tensor();
  const auto wanted = torch::autograd::grad({in_order(native)}, task.net->parameters());
  const Wrap wrapped(task.net, trimmed(10));
  const at::Tensor outputs = wrapped.forward(task.inputs).tensor();
  EXPECT_LE(error(outputs, native), 1e-12);
  task.net->zero_grad();
  in_order(outputs).backward();
  expect_gradients(*task.net, wanted);
}

TEST(Trim, LengthsByAFunction) {
  const Texts task;
  const at::Tensor native = task.net->forward(task.inputs).tensor();
  Options options = trimmed(10);
  options.trim = {{.lengths = [](const Batch& inputs) { return inputs["mask"].tensor().sum(1); }}};
  EXPECT_LE(error(Wrap(task.net, options).forward(task.inputs).tensor(), native), 1e-12);
}

TEST(Trim, TokensNeedLengths) {
  Options options = trimmed(10);
  options.trim.clear();
  EXPECT_THROW(Wrap(Texts().net, options), InvalidArgument);
}

}  // namespace
}  // namespace infinitybatch::testing
