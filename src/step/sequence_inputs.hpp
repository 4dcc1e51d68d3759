#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace infinitybatch {

/// Whether dimensions that are as long as a sequence are its dimension of time, or are so by chance
/// (seven features beside texts of seven tokens): batches of other lengths tell, once for all of
/// them.
class SequenceInputs {
 public:
  enum class Told : uint8_t {
    nothing,  ///< it was as long in each batch, which all had one length
    follows,  ///< it was as long in batches of two lengths
    stays,    ///< it was of another length in some batch
  };

  /// \param what   a dimension of a leaf, by the sequence it is compared with
  /// \param full   positions of that sequence in this batch
  /// \param length of the dimension
  Told meet(const std::string& what, int64_t full, int64_t length);

 private:
  struct Seen {
    int64_t full = 0;  // in the first batch
    Told told = Told::nothing;
  };
  std::mutex mutex_;
  std::map<std::string, Seen> seen_;
};

}  // namespace infinitybatch
