// Every way to compute a step that options or a budget choose, on rows of the table and on networks
// that need it: statistics of the whole batch, random numbers. With one thread and with two.
#include "exactness/two_passes.hpp"

namespace infinitybatch::testing::strategies {
namespace {

namespace nn = torch::nn;

using Names = std::vector<std::string>;

Options sized(int64_t micro_batch_size) {
  Options options;
  options.micro_batch_size = micro_batch_size;
  return options;
}

/// A loss that is streamed.
template <typename Strategy>
struct Streamed {
  static StepReport run(const Model& model, const SeparableLoss& loss, const Batch& inputs,
                        const Batch& targets, int64_t samples, int64_t micro_batch_size) {
    return Strategy::step(model, loss, inputs, targets, samples, sized(micro_batch_size));
  }
  static StepReport step(const Model& model, const Loss& loss, const Batch& inputs,
                         const Batch& targets, int64_t /*samples*/, Options options) {
    Strategy::set(options);
    VirtualBatch batch(model, loss, options);
    return batch.backward(inputs, targets);
  }
};

/// The same loss, of which nobody knows that it is separable.
template <typename Strategy>
struct Coupled : Strategy {
  static std::string name() { return Strategy::name() + "_coupled_loss"; }
  static Names names() { return {"replay", "rerun", "cut", "checkpoint"}; }
  static StepReport run(const Model& model, const SeparableLoss& loss, const Batch& inputs,
                        const Batch& targets, int64_t samples, int64_t micro_batch_size) {
    const auto value = [=](const Batch& outputs, const Batch& all_targets) {
      return at_once(loss, outputs, all_targets, samples);
    };
    return Strategy::step(model, losses::coupled(value), inputs, targets, samples,
                          sized(micro_batch_size));
  }
};

template <typename Strategy>
struct TwoThreads : Strategy {
  static constexpr int kThreads = 2;  // native's, too
  static std::string name() { return Strategy::name() + "_two_threads"; }
  static StepReport run(const Model& model, const SeparableLoss& loss, const Batch& inputs,
                        const Batch& targets, int64_t samples, int64_t micro_batch_size) {
    at::set_num_threads(kThreads);
    StepReport report = Strategy::run(model, loss, inputs, targets, samples, micro_batch_size);
    at::set_num_threads(1);
    return report;
  }
};

/// Cut only where a network needs it: see `BatchNorm` below.
struct Plain : Streamed<Plain> {
  static std::string name() { return "plain"; }
  static Names names() { return {"stream", "cut"}; }
  static void set(Options& /*options*/) {}
};

struct Budgeted : Streamed<Budgeted> {
  static std::string name() { return "budget"; }
  static Names names() { return {"stream", "cut", "replay"}; }
  static void set(Options& options) {
    options.micro_batch_size.reset();
    options.memory_budget = memory::Budget(memory::stats(at::kCPU).live + (64 << 20));
  }
};

struct StaticGraph : Streamed<StaticGraph> {
  static std::string name() { return "static_graph"; }
  static Names names() { return {"stream", "cut", "replay", "rerun"}; }
  /// What forward does depends on values there, or no tape can keep it.
  static bool takes(const Family& family) {
    const Names other = {"mixture_of_experts", "gradient_of_input", "checkpointed"};
    return std::count(other.begin(), other.end(), family.name) == 0;
  }
  static void set(Options& options) { options.static_graph = true; }
  /// The second step is one without user code.
  static StepReport step(const Model& model, const Loss& loss, const Batch& inputs,
                         const Batch& targets, int64_t /*samples*/, Options options) {
    set(options);
    VirtualBatch batch(model, loss, options);
    const auto state = at::globalContext().defaultGenerator(at::kCPU).get_state();
    std::vector<at::Tensor> buffers;
    for (const auto& buffer : model.buffers()) buffers.push_back(buffer.get().clone());
    batch.backward(inputs, targets);
    for (const auto& parameter : model.parameters()) {
      at::Tensor(parameter.tensor).mutable_grad().reset();
    }
    const at::NoGradGuard no_grad;
    size_t next = 0;
    for (const auto& buffer : model.buffers()) buffer.get().copy_(buffers[next++]);
    at::Generator(at::globalContext().defaultGenerator(at::kCPU)).set_state(state);
    const at::AutoGradMode grad(true);
    return batch.backward(inputs, targets);
  }
};

struct Checkpoint : Streamed<Checkpoint> {
  static std::string name() { return "checkpoint"; }
  static Names names() { return {"checkpoint", "cut"}; }
  static bool takes(const Family& family) { return StaticGraph::takes(family); }
  static void set(Options& options) { options.checkpoint_segments = 3; }
};

struct Offload : Streamed<Offload> {
  static std::string name() { return "offload"; }
  static Names names() { return {"stream", "cut", "checkpoint"}; }
  static void set(Options& options) { options.offload.when = infinitybatch::Offload::When::always; }
};

struct OffloadedCheckpoint : Streamed<OffloadedCheckpoint> {
  static std::string name() { return "offloaded_checkpoint"; }
  static Names names() { return {"checkpoint", "cut"}; }
  static bool takes(const Family& family) { return StaticGraph::takes(family); }
  static void set(Options& options) {
    Checkpoint::set(options);
    Offload::set(options);
  }
};

struct NativeNumbers : Streamed<NativeNumbers> {
  static std::string name() { return "native_numbers"; }
  static Names names() { return {"stream", "cut"}; }
  static constexpr bool draws = true;  ///< what the whole batch draws
  static bool takes(const Family& family) { return StaticGraph::takes(family); }
  static void set(Options& options) { options.match_native_rng = true; }
};

struct Normalised : FamilyModule {
  explicit Normalised(int64_t count) {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1)));
    norm = register_module("norm", nn::BatchNorm2d(4));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(4, 4, 3).padding(1)));
    last = register_module("last", nn::BatchNorm2d(nn::BatchNormOptions(4).momentum(0.3)));
    out = register_module("out", nn::Linear(4, count));
  }
  at::Tensor features(const Batch& inputs) override {
    at::Tensor hidden = norm(first(inputs.tensor())).relu();
    hidden = at::gelu(last(second(hidden))) + hidden;
    return out(hidden.mean({2, 3}));
  }
  nn::Conv2d first = nullptr, second = nullptr;
  nn::BatchNorm2d norm = nullptr, last = nullptr;
  nn::Linear out = nullptr;
};

struct Dropped : FamilyModule {
  explicit Dropped(int64_t count) {
    first = register_module("first", nn::Linear(6, 8));
    out = register_module("out", nn::Linear(8, count));
  }
  at::Tensor features(const Batch& inputs) override {
    at::Tensor hidden = at::dropout(first(inputs.tensor()).tanh(), 0.3, /*train=*/true);
    hidden = hidden + 0.1 * at::randn_like(hidden);
    return out(at::dropout(hidden, 0.2, /*train=*/true));
  }
  nn::Linear first = nullptr, out = nullptr;
};

struct Both : FamilyModule {
  explicit Both(int64_t count) : normalised(std::make_shared<Normalised>(8)) {
    register_module("normalised", normalised);
    out = register_module("out", nn::Linear(8, count));
  }
  at::Tensor features(const Batch& inputs) override {
    return out(at::dropout(normalised->features(inputs), 0.4, /*train=*/true));
  }
  std::shared_ptr<Normalised> normalised;
  nn::Linear out = nullptr;
};

const Family& own_family(const std::string& name) {
  static const std::vector<Family> all = {
      family<Normalised>("batch_norm", normal_inputs({2, 4, 4})),
      family<Dropped>("dropout", normal_inputs({6})),
      family<Both>("batch_norm_and_dropout", normal_inputs({2, 4, 4}))};
  return *std::find_if(all.begin(), all.end(),
                       [&](const Family& family) { return family.name == name; });
}

/// Gradients and, beside them, what is left in buffers.
template <typename Strategy>
class ExactWithBuffers : public ::testing::Test {
 public:
  explicit ExactWithBuffers(Pair pair) : pair_(pair) {}

  void TestBody() override {
    const auto& [family, criterion] = pair_;
    const auto subject = make_subject(*family, *criterion, at::kDouble, 11);
    start_.clear();
    for (const at::Tensor& buffer : subject->buffers()) start_.push_back(buffer.clone());
    for (const Sizes& sizes : all_sizes()) {
      SCOPED_TRACE("N=" + std::to_string(sizes.samples) +
                   ", micro_batch_size=" + std::to_string(sizes.micro_batch_size));
      const Data data = make_data(*family, *criterion, sizes.samples, at::kDouble, 23);
      const Gradients reference =
          from_start(*subject, [&] { return native(*subject, *criterion, data, false); });
      Gradients moved = reference;
      if constexpr (!requires {
                      Strategy::draws;
                    }) {  // reversed, samples would draw others' numbers
        moved = from_start(*subject,
                           [&] { return native(*subject, *criterion, reversed(data), false); });
      }
      const at::Tensor after = generator().get_state();
      const Gradients found = from_start(*subject, [&] {
        const StepReport report =
            run_strategy<Strategy>(subject, *criterion, data, sizes, at::kDouble, false);
        return gradients_of(*subject, report.loss);
      });
      if constexpr (requires { Strategy::draws; }) {
        EXPECT_TRUE(generator().get_state().equal(after)) << "left elsewhere than natively";
      }
      expect_none(excess_in_double(found, reference, moved));
    }
  }

 private:
  static at::Generator generator() { return at::globalContext().defaultGenerator(at::kCPU); }

  template <typename Run>
  Gradients from_start(Subject& subject, Run&& run) const {
    const std::vector<at::Tensor> buffers = subject.buffers();
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < buffers.size(); ++i) at::Tensor(buffers[i]).copy_(start_[i]);
    }
    torch::manual_seed(5);
    Gradients result = run();
    for (const auto& item : subject.named_buffers()) {
      result.parameters.push_back({"buffer " + item.key(), item.value().clone()});
    }
    return result;
  }

  Pair pair_;
  std::vector<at::Tensor> start_;
};

template <typename Strategy>
bool register_own(const Names& names) {
  for (const std::string& name : names) {
    for (const char* criterion : {"mse_loss/plain_mean", "cross_entropy/indices_sum"}) {
      const Pair pair{&own_family(name), &criterion_named(criterion)};
      ::testing::RegisterTest(
          (Strategy::name() + "_own").c_str(), (name + "__" + test_name(*pair.criterion)).c_str(),
          nullptr, nullptr, __FILE__, __LINE__,
          [pair]() -> ::testing::Test* { return new ExactWithBuffers<Strategy>(pair); });
    }
  }
  return true;
}

/// One in so many rows of the table, other ones for each strategy. Of those with two threads fewer:
/// where other programs are at work each op waits for its second thread.
template <typename Strategy>
bool register_rows(size_t first) {
  const TableRows rows{one_in(100), first};
  return register_exactness<Strategy>(rows) &&
         register_exactness<TwoThreads<Strategy>>({10 * rows.every, first + 20});
}

const Names kNorm = {"batch_norm"};
const Names kRandom = {"dropout", "batch_norm_and_dropout"};

const bool strategies_registered =
    register_rows<Budgeted>(1) && register_rows<StaticGraph>(3) &&
    register_rows<Coupled<StaticGraph>>(5) && register_rows<Checkpoint>(7) &&
    register_rows<Coupled<Checkpoint>>(9) && register_rows<Coupled<Offload>>(11) &&
    register_rows<OffloadedCheckpoint>(13) && register_rows<NativeNumbers>(15) &&
    register_own<Plain>(kNorm) && register_own<TwoThreads<Plain>>(kNorm) &&
    register_own<Coupled<Plain>>(kNorm) && register_own<Budgeted>(kNorm) &&
    register_own<StaticGraph>(kNorm) && register_own<TwoThreads<StaticGraph>>(kNorm) &&
    register_own<Checkpoint>(kNorm) && register_own<Offload>(kNorm) &&
    register_own<TwoThreads<Offload>>(kNorm) && register_own<OffloadedCheckpoint>(kNorm) &&
    register_own<NativeNumbers>(kRandom) && register_own<TwoThreads<NativeNumbers>>(kRandom) &&
    register_own<Coupled<NativeNumbers>>(kRandom);

}  // namespace
}  // namespace infinitybatch::testing::strategies
