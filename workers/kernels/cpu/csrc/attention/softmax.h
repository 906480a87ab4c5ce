// Softmax of one row of scores over a span of positions, relative to the largest score of the span.
#pragma once
#include <cstring>
#include <limits>

#include "attention/pages.h"
#include "simd/vector_math.h"

namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Return 2^y for y <= 0, and exactly 0 if the result is tiny or y is kHidden.
Vec weight(Vec y) { return simd::select(simd::less(y, simd::broadcast(-126.0f)), simd::zero(), simd::power_of_2(y)); }
float weight(float y) { return simd::first_lane(weight(simd::broadcast(y))); }

// Return 2^(y - peak). Infinite if all weights relative to `peak` vanish compared with it.
float relative_weight(float y, float peak) {
  return y <= peak ? weight(y - peak) : 1.0f / weight(peak - y);
}

// Return the largest of `count` scores, a multiple of kLanes. Four registers of maxima avoid waiting for the result of
// the previous comparison.
float largest(const float *scores, long count) {
  Vec peaks[4];
  for (Vec &some : peaks) some = simd::broadcast(kHidden);
  long i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) peaks[j] = simd::max(peaks[j], simd::load(scores + i + j * kLanes));
  for (; i < count; i += kLanes) peaks[0] = simd::max(peaks[0], simd::load(scores + i));
  return simd::largest(simd::max(simd::max(peaks[0], peaks[1]), simd::max(peaks[2], peaks[3])));
}

// Turn scores [count] of one row into weights. The row sees positions `low` to `high` of the span. value_scales
// [count], or null: multiplied into the weights after they have been added to `total`.
template <class E>
void softmax(const AttentionLayer &layer, float *scores, E *weights, const float *value_scales, long low, long high,
             long count, float *peak, float *total) {
  *peak = kHidden;
  *total = 0.0f;
  if (low >= high) {
    memset(weights, 0, count * sizeof *weights);
    return;
  }
  const long begin = low / kLanes * kLanes, end = (high + kLanes - 1) / kLanes * kLanes;
  const Vec hidden = simd::broadcast(kHidden);
  float scale = layer.scale;
  if (layer.softcap > 0) {
    const Vec cap = simd::broadcast(layer.softcap), ratio = simd::broadcast(scale / layer.softcap);
    for (long i = begin; i < end; i += kLanes)
      simd::store(scores + i, simd::tanh(simd::load(scores + i) * ratio) * cap);
    scale = 1.0f;
  }
  scale *= simd::kLog2E;  // exp(x) is 2^(x log2(e))
  if (begin < low)
    simd::store(scores + begin, simd::select(simd::first(low - begin), hidden, simd::load(scores + begin)));
  if (high < end) {
    float *last = scores + end - kLanes;
    simd::store(last, simd::select(simd::first(high - (end - kLanes)), simd::load(last), hidden));
  }
  *peak = largest(scores + begin, end - begin) * scale;
  if (*peak == kHidden) {
    memset(weights, 0, count * sizeof *weights);
    return;
  }
  const Vec scales = simd::broadcast(scale), shift = simd::broadcast(-*peak);
  Vec totals = simd::zero();
  if (begin > 0) memset(weights, 0, begin * sizeof *weights);
  for (long i = begin; i < end; i += kLanes) {
    const Vec p = weight(simd::fma(simd::load(scores + i), scales, shift));
    if (value_scales) {
      simd::store(weights + i, p * simd::load(value_scales + i));
      totals = totals + p;
      continue;
    }
    simd::store(weights + i, p);
    totals = totals + (std::is_same_v<E, float> ? p : simd::load(weights + i));  // sum of the weights as rounded
  }
  if (end < count) memset(weights + end, 0, (count - end) * sizeof *weights);
  *total = simd::sum(totals);
}

}  // namespace
