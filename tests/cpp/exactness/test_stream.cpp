// Streaming: forward, share of the loss and backward of each micro-batch in turn.
#include "exactness/exactness.hpp"

namespace infinitybatch::testing {
namespace {

struct Stream {
  static std::string name() { return "stream"; }
  static StepReport run(const Model& model, const SeparableLoss& loss, const Batch& inputs,
                        const Batch& targets, int64_t /*samples*/, int64_t micro_batch_size) {
    Options options;
    options.micro_batch_size = micro_batch_size;
    VirtualBatch batch(model, loss, options);
    return batch.backward(inputs, targets);
  }
  static StepReport third_step(const Model& model, const SeparableLoss& loss, const Batch& inputs,
                               const Batch& targets, int64_t micro_batch_size) {
    Options options;
    options.micro_batch_size = micro_batch_size;
    VirtualBatch batch(model, loss, options);
    for (int step = 0; step < 2; ++step) batch.backward(inputs, targets);  // look at rows
    return batch.backward(inputs, targets);
  }
};

// Each criterion in each hard case once.
const bool stream_registered = register_exactness<Stream>({one_in(3), /*first=*/0});

}  // namespace
}  // namespace infinitybatch::testing
