#pragma once

#include "loss/criterion_case.hpp"

namespace infinitybatch::testing {

inline void add_pair_cases(std::vector<CriterionCase>& cases, Reduction r) {
  const auto signs = [](std::vector<int64_t> shape) {
    return [shape](Draw& draw) { return Batch(draw.signs(shape)); };
  };
  cases.push_back(
      {std::string("hinge_embedding_loss/margin") + suffix(r), 3, reshaped({3}), signs({3}),
       [=](const Tensors& o, const Tensors& t) {
         return F::hinge_embedding_loss(
             o[0], t[0], with_reduction(F::HingeEmbeddingLossFuncOptions().margin(0.7), r));
       },
       [=](const at::TensorOptions&) { return losses::hinge_embedding({0.7, r}); }});
  cases.push_back(
      {std::string("cosine_embedding_loss/margin") + suffix(r), 8, several(2, {4}), signs({}),
       [=](const Tensors& o, const Tensors& t) {
         return F::cosine_embedding_loss(
             o[0], o[1], t[0], with_reduction(F::CosineEmbeddingLossFuncOptions().margin(0.1), r));
       },
       [=](const at::TensorOptions&) { return losses::cosine_embedding({0.1, r}); }});
  // The second embedding is a target: only the order counts.
  cases.push_back({std::string("cosine_embedding_loss/embedding_in_targets") + suffix(r), 4,
                   reshaped({4}),
                   [](Draw& draw) { return Batch::tuple({draw.normal({4}), draw.signs({})}); },
                   [=](const Tensors& o, const Tensors& t) {
                     return F::cosine_embedding_loss(
                         o[0], t[0], t[1], with_reduction(F::CosineEmbeddingLossFuncOptions(), r));
                   },
                   [=](const at::TensorOptions&) { return losses::cosine_embedding({0, r}); }});
  for (bool broadcast : {false, true}) {
    cases.push_back(
        {std::string("margin_ranking_loss/") + (broadcast ? "broadcast" : "plain") + suffix(r), 12,
         several(2, {3, 2}),
         signs(broadcast ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{3, 2}),
         [=](const Tensors& o, const Tensors& t) {
           return F::margin_ranking_loss(
               o[0], o[1], t[0], with_reduction(F::MarginRankingLossFuncOptions().margin(0.3), r));
         },
         [=](const at::TensorOptions&) { return losses::margin_ranking({0.3, r}); }});
  }
}

inline void add_triplet_cases(std::vector<CriterionCase>& cases, Reduction r) {
  struct Triplet {
    const char* name;
    std::vector<int64_t> shape;
    double p;
    bool swap;
  };
  const auto no_targets = [](Draw&) { return Batch(); };
  for (const Triplet& row : {Triplet{"plain", {4}, 2, false}, Triplet{"p1_swap", {4}, 1, true},
                             Triplet{"sequence", {3, 4}, 2, true}}) {
    const int64_t features = 3 * c10::multiply_integers(row.shape);
    cases.push_back(
        {std::string("triplet_margin_loss/") + row.name + suffix(r), features,
         several(3, row.shape), no_targets,
         [=](const Tensors& o, const Tensors&) {
           return F::triplet_margin_loss(
               o[0], o[1], o[2],
               with_reduction(
                   F::TripletMarginLossFuncOptions().margin(1.5).p(row.p).eps(1e-5).swap(row.swap),
                   r));
         },
         [=](const at::TensorOptions&) {
           return losses::triplet_margin({1.5, row.p, 1e-5, row.swap, r});
         }});
  }
  const auto cosine = [](const at::Tensor& a, const at::Tensor& b) {
    return 1 - at::cosine_similarity(a, b, -1);
  };
  for (bool swap : {false, true}) {
    cases.push_back({std::string("triplet_margin_with_distance_loss/cosine") +
                         (swap ? "_swap" : "") + suffix(r),
                     24, several(3, {2, 4}), no_targets,
                     [=](const Tensors& o, const Tensors&) {
                       return F::triplet_margin_with_distance_loss(
                           o[0], o[1], o[2],
                           with_reduction(F::TripletMarginWithDistanceLossFuncOptions()
                                              .distance_function(cosine)
                                              .margin(0.4)
                                              .swap(swap),
                                          r));
                     },
                     [=](const at::TensorOptions&) {
                       return losses::triplet_margin_with_distance({cosine, 0.4, swap, r});
                     }});
  }
  // Anchors from the model, the others given.
  cases.push_back(
      {std::string("triplet_margin_with_distance_loss/default_given_targets") + suffix(r), 4,
       reshaped({4}), [](Draw& draw) { return Batch::tuple({draw.normal({4}), draw.normal({4})}); },
       [=](const Tensors& o, const Tensors& t) {
         return F::triplet_margin_with_distance_loss(
             o[0], t[0], t[1], with_reduction(F::TripletMarginWithDistanceLossFuncOptions(), r));
       },
       [=](const at::TensorOptions&) {
         return losses::triplet_margin_with_distance({nullptr, 1.0, false, r});
       }});
}

inline void add_distance_cases(std::vector<CriterionCase>& cases) {
  for (Reduction r : kMeanAndSum) {
    add_pair_cases(cases, r);
    add_triplet_cases(cases, r);
  }
}

}  // namespace infinitybatch::testing
