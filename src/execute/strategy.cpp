#include "execute/strategy.hpp"

namespace infinitybatch {

std::string Strategy::text() const {
  std::string text = cuts == Cuts::none     ? "whole micro-batches"
                     : cuts == Cuts::memory ? "cut for memory"
                     : cuts == Cuts::both   ? "cut at whole-batch ops and for memory"
                                            : "cut at whole-batch ops";
  if (kept) text += ", boundary activations between some of them computed again";
  if (reuses_tapes) text += ", tapes used again";
  if (!replays()) text += ", second forwards run the user's code";
  if (offloads()) text += ", offloads boundary activations";
  if (offloads_graphs()) text += " and graphs";
  return text;
}

}  // namespace infinitybatch
