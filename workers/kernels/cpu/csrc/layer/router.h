// The router of a mixture of experts: logits in float32, and the experts that a row is sent to.
#pragma once
#include <cmath>

#include "simd/element_types.h"

// Every row of logits is added up in the same order whatever the other rows, so its experts depend on that row alone.
struct Router {
  const float *weight;      // [panels][hidden][kPanel], outputs filled up with zeros
  const float *bias;        // [outputs]; or null
  const float *correction;  // [outputs]  added to scores where experts are chosen, and not to weights; or null
  long outputs, hidden;
  long top_k, groups, top_groups;
  int is_sigmoid;     // the scores of logits; else softmax
  int is_normalised;  // the weights of a row add up to 1, before `scale`
  double least_sum, scale;
};

// logits [rows, outputs] of x [rows, hidden], rows `stride` elements apart.
template <class T>
void router_logits(const Router &router, const T *x, long stride, long rows, float *logits);

// ids [rows, top_k], ascending in each row, and their weights. Of experts that are equally good the first is chosen.
void route(const Router &router, const float *logits, long rows, int32_t *ids, float *weights);

// As `route` scores a logit.
inline float sigmoid_of(float logit) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logit)))); }
