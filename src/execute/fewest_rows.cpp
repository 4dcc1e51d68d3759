#include "execute/fewest_rows.hpp"

#include "core/out_of_memory.hpp"
#include "coupled/row_errors.hpp"

#include <infinitybatch/core/errors.hpp>

#include <stdexcept>
#include <typeinfo>

namespace infinitybatch {
namespace {

/// Of exactly one of these classes: those of the user's own may be signals.
template <typename... Classes>
bool is_one_of(const std::exception& error) {
  return ((typeid(error) == typeid(Classes)) || ...);
}

}  // namespace

bool FewestRows::may_be_of_few(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return false;
  } catch (const std::logic_error& own) {
    if (!is_one_of<std::logic_error, std::invalid_argument, std::domain_error, std::length_error,
                   std::out_of_range>(own)) {
      return false;
    }
  } catch (const std::runtime_error& own) {
    if (!is_one_of<std::runtime_error, std::range_error>(own)) return false;
  } catch (...) {
  }
  return !is_out_of_memory(error) && coupled::may_be_of_rows(error);
}

}  // namespace infinitybatch
