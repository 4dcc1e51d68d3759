// The whole table again under losses of which nobody knows that they are separable: recorded and
// replayed, with no, half and all graphs retained, and by a wrapped model under the user's own
// loss.
#include "exactness/two_passes.hpp"

namespace infinitybatch::testing {
namespace {

// Different rows of the table for each. Not whether memory falls: what tapes and random states
// occupy is more than these tiny models' activations.
const bool two_passes_registered =
    register_exactness<Replay<Retained::none>>({one_in(10), /*first=*/0}) &&
    register_exactness<Replay<Retained::some>>({one_in(10), /*first=*/2}) &&
    register_exactness<Replay<Retained::all>>({one_in(10), /*first=*/4}) &&
    register_exactness<Wrapping>({one_in(10), /*first=*/6});

}  // namespace
}  // namespace infinitybatch::testing
