// The router of an MoE layer (see router.h). Scores are computed in float64, so that the rounding of the exponential
// function has no effect. workers/layers/experts.py has the same algorithm in torch operations.
#include "layer/router.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "gemm/tile.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"

namespace {

// Return whether `a` is chosen before `b`. NaN comes first, as in torch's sort.
bool is_better(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// Sort the indices from 0 to `count` by their keys, best first, as far as the first `most`.
void best_first(const float *keys, long count, long most, int32_t *order) {
  for (long i = 0; i < count; i++) order[i] = i;
  std::partial_sort(order, order + most, order + count, [&](int32_t a, int32_t b) {
    if (is_better(keys[a], keys[b])) return true;
    return !is_better(keys[b], keys[a]) && a < b;
  });
}

// Compute the softmax of the logits of `ids`, or of all logits if it is null.
void softmax(const float *logits, const int32_t *ids, long count, double *to) {
  double most = -std::numeric_limits<double>::infinity(), sum = 0.0;
  for (long i = 0; i < count; i++) most = std::max<double>(most, logits[ids ? ids[i] : i]);
  for (long i = 0; i < count; i++) sum += to[i] = std::exp(logits[ids ? ids[i] : i] - most);
  for (long i = 0; i < count; i++) to[i] /= sum;
}

// Buffers for one row.
struct RowOfScores {
  double *scores, *chosen;  // [outputs]
  float *keys, *groups;     // [outputs], [groups]
  int32_t *order;           // [outputs]
};

// Exclude the experts of all groups except the best ones.
void leave_out_groups(const Router &of, const RowOfScores &row) {
  const long size = of.outputs / of.groups;
  for (long group = 0; group < of.groups; group++) {
    const float *keys = row.keys + group * size;
    best_first(keys, size, of.best_of_group, row.order);
    row.groups[group] = keys[row.order[0]];
    if (of.best_of_group > 1) row.groups[group] += keys[row.order[1]];
  }
  best_first(row.groups, of.groups, of.groups, row.order);
  for (long i = of.top_groups; i < of.groups; i++)
    std::fill_n(row.keys + row.order[i] * size, size, -std::numeric_limits<float>::infinity());
}

// Choose experts one after the other, each with its softmax over the experts that are left and close to it.
void mix_row(const Router &of, const float *logits, const RowOfScores &row, int32_t *ids, float *weights) {
  best_first(logits, of.outputs, of.top_k, row.order);
  for (long i = 0; i < of.outputs; i++) row.scores[i] = logits[i];
  for (long n = 0; n < of.top_k; n++) {
    const double best = logits[row.order[n]];
    double sum = 0.0;
    for (long i = 0; i < of.outputs; i++) {
      const double logit = logits[i];
      const bool is_far = (best - logit) / std::max(std::abs(logit), best) > of.tolerance;
      if (!is_far) sum += std::exp(row.scores[i] - best);
    }
    row.chosen[row.order[n]] = std::exp(row.scores[row.order[n]] - best) / sum;
    row.scores[row.order[n]] = -std::numeric_limits<double>::infinity();
  }
  std::copy_n(row.order, of.top_k, ids);
  std::sort(ids, ids + of.top_k);
  for (long n = 0; n < of.top_k; n++) weights[n] = static_cast<float>(row.chosen[ids[n]] * of.scale);
}

void route_row(const Router &of, const float *logits, const RowOfScores &row, int32_t *ids, float *weights) {
  if (of.is_mixer) return mix_row(of, logits, row, ids, weights);
  // If true, scores of other experts are not needed.
  const bool of_chosen = of.is_normalised && !of.is_sigmoid && !of.correction;
  if (of.is_sigmoid)
    for (long i = 0; i < of.outputs; i++) row.scores[i] = 1.0 / (1.0 + std::exp(-static_cast<double>(logits[i])));
  else if (!of_chosen)
    softmax(logits, nullptr, of.outputs, row.scores);
  for (long i = 0; i < of.outputs; i++) {
    row.keys[i] = of.correction && !of.corrects_logits ? static_cast<float>(row.scores[i]) : logits[i];
    if (of.correction) row.keys[i] += of.correction[i];
  }
  if (of.groups > 1) leave_out_groups(of, row);
  best_first(row.keys, of.outputs, of.top_k, row.order);
  std::copy_n(row.order, of.top_k, ids);
  std::sort(ids, ids + of.top_k);
  if (of_chosen) {
    softmax(logits, ids, of.top_k, row.chosen);
  } else {
    double sum = 0.0;
    for (long i = 0; i < of.top_k; i++) sum += row.chosen[i] = row.scores[ids[i]];
    if (of.is_normalised)
      for (long i = 0; i < of.top_k; i++) row.chosen[i] /= std::max(sum, of.least_sum) + of.added_to_sum;
  }
  for (long i = 0; i < of.top_k; i++) weights[i] = static_cast<float>(row.chosen[i] * of.scale);
}

}  // namespace

template <class T>
void router_logits(const Router &of, const T *x, long stride, long rows, float *logits) {
  using namespace gemm;
  const long strips = (rows + kTileRows - 1) / kTileRows, panels = (of.outputs + kPanel - 1) / kPanel;
  const long blocks = (of.hidden + Floats::kBlock - 1) / Floats::kBlock;
  const Arena::Mark mark = arena().mark();
  float *packed = arena().take<float>(rows * blocks * kRowStride<Floats>);
  const auto begin = [&](long strip) { return rows * strip / strips; };
  const auto at = [&](long strip, long block) {
    return packed + (begin(strip) * blocks + (begin(strip + 1) - begin(strip)) * block) * kRowStride<Floats>;
  };
  // If there are fewer tasks than threads, threads take blocks, whose sums are then added in the same order.
  const long tasks = strips * panels, cuts = tasks < omp_get_max_threads() ? blocks : 1;
  float *sums = arena().take<float>(tasks * cuts * kTileRows * kPanel);
#pragma omp parallel if (rows * of.hidden * of.outputs >= ::kSerial)
  {
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
      long strip = row * strips / rows;
      while (begin(strip + 1) <= row) strip++;
      for (long block = 0; block < blocks; block++) {
        const long count = std::min(Floats::kBlock, of.hidden - block * Floats::kBlock);
        float *to = at(strip, block) + (row - begin(strip)) * kRowStride<Floats>;
        const T *from = x + row * stride + block * Floats::kBlock;
        for (long k = 0; k < count; k += kLanes) store(to + k, load(from + k, count - k));
      }
    }
#pragma omp for schedule(static)
    for (long cut = 0; cut < tasks * cuts; cut++) {
      const long strip = cut / cuts / panels, panel = cut / cuts % panels, count = begin(strip + 1) - begin(strip);
      const long first = cut % cuts * (blocks / cuts), end = first + blocks / cuts;
      const float *weight = of.weight + panel * of.hidden * kPanel;
      for (long block = first; block < end; block++) {
        const float *w = weight + block * Floats::kBlock * kPanel;
        kTiles<Floats>[count](at(strip, block), w, std::min(Floats::kBlock, of.hidden - block * Floats::kBlock),
                              sums + cut * kTileRows * kPanel, block == first,
                              {reinterpret_cast<const char *>(w) + ahead<Floats>(count), kStepBytes<Floats>});
      }
    }
#pragma omp for schedule(static)
    for (long task = 0; task < tasks; task++) {
      const long strip = task / panels, panel = task % panels;
      const float *from = sums + task * cuts * kTileRows * kPanel;
      for (long r = 0; r < begin(strip + 1) - begin(strip); r++)
        for (long i = 0; i < std::min<long>(kPanel, of.outputs - panel * kPanel); i++) {
          const long output = panel * kPanel + i;
          float total = from[r * kPanel + i];
          for (long cut = 1; cut < cuts; cut++) total += from[(cut * kTileRows + r) * kPanel + i];
          logits[(begin(strip) + r) * of.outputs + output] = total + (of.bias ? of.bias[output] : 0.0f);
        }
    }
  }
  arena().release(mark);
}

void route(const Router &of, const float *logits, long rows, int32_t *ids, float *weights) {
  const Arena::Mark mark = arena().mark();
  double *doubles = arena().take<double>(2 * rows * of.outputs);
  float *floats = arena().take<float>(rows * (of.outputs + of.groups));
  int32_t *orders = arena().take<int32_t>(rows * of.outputs);
#pragma omp parallel for if (rows > 16)
  for (long row = 0; row < rows; row++) {
    double *scores = doubles + 2 * row * of.outputs;
    float *keys = floats + row * (of.outputs + of.groups);
    const RowOfScores own{scores, scores + of.outputs, keys, keys + of.outputs, orders + row * of.outputs};
    route_row(of, logits + row * of.outputs, own, ids + row * of.top_k, weights + row * of.top_k);
  }
  arena().release(mark);
}

#define OARLOCK_ROUTER_LOGITS(T) template void router_logits<T>(const Router &, const T *, long, long, float *);
OARLOCK_FOR_EACH_TYPE(OARLOCK_ROUTER_LOGITS)

extern "C" void oarlock_router_logits(const Router *router, const void *x, long stride, long rows, float *logits, int type) {
  with_type(type, [&](auto *of) {
    router_logits<std::remove_pointer_t<decltype(of)>>(
        *router, static_cast<const std::remove_pointer_t<decltype(of)> *>(x), stride, rows, logits);
  });
}

extern "C" void oarlock_route(const Router *router, const float *logits, long rows, int32_t *ids, float *weights) {
  route(*router, logits, rows, ids, weights);
}
