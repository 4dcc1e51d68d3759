#include <infinitybatch/step/verify.hpp>

#include <algorithm>
#include <cstdio>

namespace infinitybatch {
namespace {

std::string line(const ParameterError& parameter) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2g of %.2g allowed", parameter.error, parameter.allowed);
  return parameter.name + ": " + text;
}

std::string precision(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Double:
      return "fp64";
    case c10::ScalarType::Float:
      return "fp32";
    default:
      return c10::toString(type);
  }
}

bool all_allowed(const std::vector<ParameterError>& errors) {
  return std::all_of(errors.begin(), errors.end(),
                     [](const ParameterError& each) { return each.error <= each.allowed; });
}

const ParameterError* worst_of(const std::vector<ParameterError>& errors) {
  const auto worst = std::max_element(errors.begin(), errors.end(),
                                      [](const ParameterError& a, const ParameterError& b) {
                                        return a.error / a.allowed < b.error / b.allowed;
                                      });
  return worst == errors.end() ? nullptr : &*worst;
}

/// \param what "parameters"
std::string describe(const std::vector<ParameterError>& errors, const std::string& what) {
  const ParameterError* worst = worst_of(errors);
  std::string text = all_allowed(errors) ? "exact" : "NOT EXACT";
  text +=
      " in " + std::to_string(errors.size()) + " " + what + "; the worst is " + line(*worst) + "\n";
  constexpr int kMost = 5;
  int shown = 0;
  for (const ParameterError& parameter : errors) {
    if (!(parameter.error > parameter.allowed) || &parameter == worst) continue;
    if (++shown > kMost) return text + "  and more\n";
    text += "  " + line(parameter) + "\n";
  }
  return text;
}

std::string describe(const Comparison& comparison) {
  std::string text = precision(comparison.type) + ": ";
  text += comparison.parameters.empty() ? "no parameter has a gradient\n"
                                        : describe(comparison.parameters, "parameters");
  if (!comparison.buffers.empty()) text += "  " + describe(comparison.buffers, "buffers");
  return text;
}

}  // namespace

bool Comparison::exact() const {
  return all_allowed(parameters) && all_allowed(buffers);
}

const ParameterError* Comparison::worst() const {
  return worst_of(parameters);
}

const ParameterError* Comparison::worst_buffer() const {
  return worst_of(buffers);
}

bool VerifyReport::exact() const {
  return own.exact() && (!in_fp64 || in_fp64->exact());
}

std::string VerifyReport::explain() const {
  std::string text = "strategy " + strategy + ", " + std::to_string(rows) + " of " +
                     std::to_string(batch_size) + " samples compared with the native whole batch";
  if (rows < batch_size) text += " (native has no memory for more)";
  text += "\n";
  if (in_fp64) {
    text += describe(*in_fp64);
  } else if (!why_no_fp64.empty()) {
    text += "not run in fp64: " + why_no_fp64 + "\n";
  }
  if (!in_fp64 || own.type != in_fp64->type) text += describe(own);
  if (coupled_output) {
    text += *coupled_output + " couples samples: its rows change when other samples do, ";
    text += strategy == "cut" ? "in layers that were given the whole batch\n"
                              : "so that micro-batches see another batch than the whole\n";
  }
  return text;
}

}  // namespace infinitybatch
