#include "core/exception_text.hpp"

#include <c10/util/Exception.h>

namespace infinitybatch {

std::string first_line_of(const std::exception_ptr& error) {
  std::string text = "an exception";
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& torch) {
    text = torch.what_without_backtrace();
  } catch (const std::exception& other) {
    text = other.what();
  } catch (...) {
  }
  return text.substr(0, text.find('\n'));
}

}  // namespace infinitybatch
