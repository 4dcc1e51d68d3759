#pragma once

#include "loss/criterion_case.hpp"

namespace infinitybatch::testing {

/// A criterion with one loss for each element.
struct ElementwiseCase {
  std::string name;
  std::function<at::Tensor(const at::Tensor& input, const at::Tensor& target)> native;
  std::function<SeparableLoss()> loss;
  /// (n, shape...) of the output and of the target
  std::vector<int64_t> output = {3, 2}, target = {3, 2};
  std::function<at::Tensor(const at::Tensor&)> of_output = nullptr;  ///< after reshaping
  std::function<at::Tensor(const at::Tensor&)> of_target = nullptr;  ///< after drawing normals
};

inline void add_elementwise(std::vector<CriterionCase>& cases, const ElementwiseCase& row) {
  cases.push_back({row.name, c10::multiply_integers(row.output),
                   [row](const at::Tensor& features) {
                     const at::Tensor output = reshaped(row.output)(features).tensor();
                     return Batch(row.of_output ? row.of_output(output) : output);
                   },
                   [row](Draw& draw) {
                     const at::Tensor target = draw.normal(row.target);
                     return Batch(row.of_target ? row.of_target(target) : target);
                   },
                   [row](const Tensors& o, const Tensors& t) {
                     // torch broadcasts by itself too, but warns of it each time.
                     const auto pair = at::broadcast_tensors({o[0], t[0]});
                     return row.native(pair[0], pair[1]);
                   },
                   [row](const at::TensorOptions&) { return row.loss(); }});
}

/// The same criterion with targets and outputs of other shapes, which broadcast within a sample.
inline void add_broadcast(std::vector<CriterionCase>& cases, ElementwiseCase row) {
  const std::string name = row.name;
  add_elementwise(cases, row);
  row.name = name + "_broadcast_targets";
  row.target = {1, 2};
  add_elementwise(cases, row);
  row.name = name + "_broadcast_outputs";
  row.output = {3, 1};
  row.target = {1, 2};
  add_elementwise(cases, row);
}

/// torch.nn.functional's weight=..., which C++ has not: losses is the criterion without a
/// reduction. Weights have the outputs' shape; targets may broadcast against both.
inline void add_weighted(std::vector<CriterionCase>& cases, const std::string& name,
                         std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> losses,
                         bool mean_over_weights, Reduction r, std::function<SeparableLoss()> loss) {
  for (bool broadcast : {false, true}) {
    const std::vector<int64_t> shape{broadcast ? 1 : 3, 2};
    cases.push_back({name + (broadcast ? "_broadcast_targets" : "") + suffix(r), 6,
                     reshaped({3, 2}),
                     [shape](Draw& draw) {
                       return Batch::tuple({draw.normal(shape), draw.uniform({3, 2}, 0.1, 3)});
                     },
                     [=](const Tensors& o, const Tensors& t) {
                       const at::Tensor weighted = losses(o[0], t[0].expand_as(o[0])).mul(t[1]);
                       if (r == Reduction::sum) return weighted.sum();
                       return mean_over_weights ? weighted.sum() / t[1].sum() : weighted.mean();
                     },
                     [loss](const at::TensorOptions&) { return loss(); }});
  }
}

inline void add_distance_to_target_cases(std::vector<CriterionCase>& cases, Reduction r) {
  using at::Tensor;
  add_broadcast(cases, {std::string("mse_loss/plain") + suffix(r),
                        [=](const Tensor& i, const Tensor& t) {
                          return F::mse_loss(i, t, with_reduction(F::MSELossFuncOptions(), r));
                        },
                        [=] { return losses::mse(r); }});
  add_broadcast(cases, {std::string("l1_loss/plain") + suffix(r),
                        [=](const Tensor& i, const Tensor& t) {
                          return F::l1_loss(i, t, with_reduction(F::L1LossFuncOptions(), r));
                        },
                        [=] { return losses::l1(r); }});
  for (double beta : {1.0, 0.4, 0.0}) {
    add_broadcast(cases, {"smooth_l1_loss/beta" + std::to_string(beta) + suffix(r),
                          [=](const Tensor& i, const Tensor& t) {
                            return F::smooth_l1_loss(
                                i, t, with_reduction(F::SmoothL1LossFuncOptions().beta(beta), r));
                          },
                          [=] { return losses::smooth_l1({beta, r}); }});
  }
  add_broadcast(cases, {std::string("huber_loss/delta") + suffix(r),
                        [=](const Tensor& i, const Tensor& t) {
                          return F::huber_loss(
                              i, t, with_reduction(F::HuberLossFuncOptions().delta(0.6), r));
                        },
                        [=] { return losses::huber({0.6, r}); }});
  const auto squared = [](const Tensor& i, const Tensor& t) { return (i - t).pow(2); };
  const auto absolute = [](const Tensor& i, const Tensor& t) { return (i - t).abs(); };
  const auto huber = [](const Tensor& i, const Tensor& t) {
    return F::huber_loss(i, t, F::HuberLossFuncOptions().delta(0.6).reduction(torch::kNone));
  };
  add_weighted(cases, "mse_loss/weighted", squared, true, r, [=] { return losses::mse(r); });
  add_weighted(cases, "l1_loss/weighted", absolute, true, r, [=] { return losses::l1(r); });
  add_weighted(cases, "huber_loss/weighted", huber, false, r,
               [=] { return losses::huber({0.6, r}); });
}

inline void add_poisson_cases(std::vector<CriterionCase>& cases, Reduction r) {
  using at::Tensor;
  for (bool log_input : {true, false}) {
    for (bool full : {true, false}) {
      ElementwiseCase row{
          std::string("poisson_nll_loss/") + (log_input ? "log" : "rate") + (full ? "_full" : "") +
              suffix(r),
          [=](const Tensor& i, const Tensor& t) {
            return F::poisson_nll_loss(
                i, t,
                with_reduction(
                    F::PoissonNLLLossFuncOptions().log_input(log_input).full(full).eps(1e-6), r));
          },
          [=] { return losses::poisson_nll({log_input, full, 1e-6, r}); }};
      if (!log_input) row.of_output = [](const Tensor& output) { return output.exp(); };
      row.of_target = [](const Tensor& target) { return target.abs().mul(3).round(); };
      add_elementwise(cases, row);
    }
  }
}

/// torch.nn.functional.gaussian_nll_loss, which C++ has not, for a variance that broadcasts.
inline at::Tensor native_gaussian(const at::Tensor& mean, const at::Tensor& target,
                                  const at::Tensor& variance, bool full, Reduction r) {
  // Below eps = 1e-2 the value is clamped, while the gradient goes on to the variance.
  const at::Tensor clamped = variance + (variance.detach().clamp_min(1e-2) - variance.detach());
  const at::Tensor losses = 0.5 * (clamped.log() + (mean - target).pow(2) / clamped);
  return reduced(full ? losses + 0.5 * std::log(2 * M_PI) : losses, r);
}

inline void add_gaussian_cases(std::vector<CriterionCase>& cases, Reduction r) {
  const auto ours = [r](bool full) {
    return [=](const at::TensorOptions&) { return losses::gaussian_nll({full, 1e-2, r}); };
  };
  // Squares of normals: some of them are below eps.
  for (bool full : {true, false}) {
    cases.push_back({std::string("gaussian_nll_loss/predicted") + (full ? "_full" : "") + suffix(r),
                     12,
                     [](const at::Tensor& features) {
                       const Batch both = several(2, {3, 2})(features);
                       return Batch::tuple({both[0], both[1].tensor().pow(2).mul(0.2)});
                     },
                     [](Draw& draw) { return Batch(draw.normal({3, 2})); },
                     [=](const Tensors& o, const Tensors& t) {
                       return native_gaussian(o[0], t[0], o[1], full, r);
                     },
                     ours(full)});
  }
  // One variance for each row of a sample, in both spellings, and one for all.
  for (bool keep : {true, false}) {
    cases.push_back(
        {std::string("gaussian_nll_loss/given_") + (keep ? "keepdim" : "short") + suffix(r), 6,
         reshaped({3, 2}),
         [keep](Draw& draw) {
           const at::Tensor variance = draw.uniform({3}, 0.001, 2);
           return Batch::tuple({draw.normal({3, 2}), keep ? variance.unsqueeze(-1) : variance});
         },
         [=](const Tensors& o, const Tensors& t) {
           return native_gaussian(o[0], t[0], keep ? t[1] : t[1].unsqueeze(-1), false, r);
         },
         ours(false)});
  }
  cases.push_back({std::string("gaussian_nll_loss/one_variance") + suffix(r), 6, reshaped({3, 2}),
                   [](Draw& draw) {
                     return Batch::tuple(
                         {draw.normal({3, 2}), Batch(at::full({}, 0.7, draw.options())).shared()});
                   },
                   [=](const Tensors& o, const Tensors& t) {
                     return native_gaussian(o[0], t[0], t[1], false, r);
                   },
                   ours(false)});
}

inline void add_kl_div_cases(std::vector<CriterionCase>& cases) {
  using at::Tensor;
  for (Reduction r : {Reduction::mean, Reduction::sum, Reduction::batchmean}) {
    for (bool log_target : {false, true}) {
      ElementwiseCase row{
          std::string("kl_div/") + (log_target ? "log_target" : "plain") + suffix(r),
          [=](const Tensor& i, const Tensor& t) {
            // F::kl_div with kMean is this and a warning.
            if (r == Reduction::mean) return at::kl_div(i, t, at::Reduction::Mean, log_target);
            auto options = F::KLDivFuncOptions().log_target(log_target);
            if (r == Reduction::sum) return F::kl_div(i, t, options.reduction(torch::kSum));
            return F::kl_div(i, t, options.reduction(torch::kBatchMean));
          },
          [=] { return losses::kl_div({log_target, r}); }};
      row.of_output = [](const Tensor& output) { return output.log_softmax(1); };
      row.of_target = [log_target](const Tensor& target) {
        return log_target ? target.log_softmax(1) : target.softmax(1);
      };
      add_broadcast(cases, row);
    }
  }
}

inline void add_regression_cases(std::vector<CriterionCase>& cases) {
  for (Reduction r : kMeanAndSum) {
    add_distance_to_target_cases(cases, r);
    add_poisson_cases(cases, r);
    add_gaussian_cases(cases, r);
  }
  add_kl_div_cases(cases);
}

}  // namespace infinitybatch::testing
