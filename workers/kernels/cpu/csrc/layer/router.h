// The router of an MoE layer: logits in float32, and the experts of each row.
#pragma once
#include <cmath>

#include "simd/element_types.h"

// Parameters of a router. Logits of a row are added up in the same order for any other rows, so its experts depend only
// on that row.
struct Router {
  const float *weight;      // [panels][hidden][kPanel], outputs padded with zeros
  const float *bias;        // [outputs]; or null
  const float *correction;  // [outputs]  added to scores when experts are chosen, but not to their weights; or null
  long outputs, hidden;
  long top_k, groups, top_groups, best_of_group;
  int is_sigmoid;       // scores are sigmoids of logits, otherwise softmax
  int is_normalised;    // the weights of a row add up to 1, before `scale`
  int corrects_logits;  // the correction is added to logits instead of scores
  int is_mixer;         // an expert's weight is its softmax over the experts that are left and close to it
  double least_sum, added_to_sum, scale;
  double tolerance;  // is_mixer: largest difference of close logits, as a part of the larger absolute value
};

// Compute logits [rows, outputs] of x [rows, hidden], rows `stride` elements apart.
template <class T>
void router_logits(const Router &router, const T *x, long stride, long rows, float *logits);

// Choose ids [rows, top_k], ascending in each row, and their weights. If experts are equally good, the first is chosen.
void route(const Router &router, const float *logits, long rows, int32_t *ids, float *weights);

// Return the score of a logit, computed as in `route`.
inline float sigmoid_of(float logit) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logit)))); }
