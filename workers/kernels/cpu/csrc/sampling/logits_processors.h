// Changes that requests make to their logits before a token is chosen: bias, then penalties, then masks. The arithmetic
// is the same as in `workers/sampling/logits_processors.py`, one row at a time.
#pragma once
#include <algorithm>

#include "simd/simd.h"

namespace sampling {

// Sections of `StepMetadata`, which documents each array and its order; rows are sorted. Histories are `Entries` of
// `workers/sampling/token_histories.py`.
struct LogitsChanges {
  long num_bias;
  const int32_t *bias_rows, *bias_ids;
  const float *bias_values;
  long num_penalties;
  const int32_t *penalty_rows;
  const float *repetition, *frequency, *presence;
  const int64_t *history_firsts;  // [num_penalties]   the first entry of each row
  const int32_t *history_lengths, *history_ids, *history_counts;
  long num_masks, mask_words;
  const int32_t *mask_rows;
  const uint32_t *mask_bits;
};

// Return the `kLanes` bits from bit `at` on, with more bits above them. Words beyond the last read as zero.
inline uint32_t bits_at(const uint32_t *words, long count, long at) {
  const long word = at / 32;
  uint64_t both = word < count ? words[word] : 0;
  if (word + 1 < count) both |= static_cast<uint64_t>(words[word + 1]) << 32;
  return static_cast<uint32_t>(both >> (at % 32));
}

// Subtract infinity from every id whose bit is not set. NaN stays NaN, so that a broken row is still detected.
inline void mask_row(float *x, long width, long first_id, const uint32_t *words, long num_words) {
  using namespace simd;
  const Vec infinity = broadcast(__builtin_inff());
  for (long at = 0; at < width; at += kLanes) {
    const long count = std::min<long>(kLanes, width - at);
    const Vec value = count == kLanes ? load(x + at) : load(x + at, count);
    const Vec masked = select(from_bits(bits_at(words, num_words, first_id + at)), value, value - infinity);
    count == kLanes ? store(x + at, masked) : store(x + at, masked, count);
  }
}

// The changes of one row.
class RowChanges {
 public:
  RowChanges(const LogitsChanges &of, long row)
      : of_(of), bias_(rows_of(of.bias_rows, of.num_bias, row)),
        penalties_(rows_of(of.penalty_rows, of.num_penalties, row)), masks_(rows_of(of.mask_rows, of.num_masks, row)) {}

  bool any() const { return bias_.count || penalties_.count || masks_.count; }

  // Change x [width], the row's logits from id `first_id` on. Other ids belong to other ranks.
  void apply(float *x, long width, long first_id) const {
    for (long i = bias_.first; i < bias_.first + bias_.count; i++) {
      const long id = of_.bias_ids[i] - first_id;
      if (id >= 0 && id < width) x[id] += of_.bias_values[i];
    }
    for (long p = penalties_.first; p < penalties_.first + penalties_.count; p++) penalise(x, width, first_id, p);
    for (long i = masks_.first; i < masks_.first + masks_.count; i++)
      mask_row(x, width, first_id, of_.mask_bits + i * of_.mask_words, of_.mask_words);
  }

 private:
  struct Range {
    long first, count;
  };

  static Range rows_of(const int32_t *rows, long count, long row) {
    const auto found = std::equal_range(rows, rows + count, row);
    return {found.first - rows, found.second - found.first};
  }

  // Apply penalties in float64, rounded once. The product of a float32 and a count is exact.
  void penalise(float *x, long width, long first_id, long p) const {
    const long first = of_.history_firsts[p];
    for (long h = first; h < first + of_.history_lengths[p]; h++) {
      const long id = of_.history_ids[h] - first_id;
      if (id < 0 || id >= width) continue;
      double value = x[id];
      value = value > 0 ? value / of_.repetition[p] : value * of_.repetition[p];
      value -= static_cast<double>(of_.frequency[p]) * of_.history_counts[h];
      if (of_.history_counts[h] > 0) value -= of_.presence[p];
      x[id] = static_cast<float>(value);
    }
  }

  const LogitsChanges &of_;
  const Range bias_, penalties_, masks_;
};

}  // namespace sampling
