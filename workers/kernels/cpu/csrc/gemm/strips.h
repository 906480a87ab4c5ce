// Strips of rows that are multiplied together. A strip has at most the rows of one tile.
#pragma once
#include <cstdint>

namespace gemm {

constexpr long kMostRows = 240;  // rows whose sums of one panel stay in the caches

// Up to kMostRows rows in strips of at most kStrip rows and about equal size. Strip offsets are precomputed: with short
// slices, dividing for each tile costs measurable time.
template <int kStrip>
struct Strips {
  static constexpr long kMostStrips = (kMostRows + kStrip - 1) / kStrip;
  const long rows, strips;

  explicit Strips(long rows) : rows(rows), strips((rows + kStrip - 1) / kStrip) {
    first_[0] = 0;
    for (long strip = 1; strip < strips; strip++) first_[strip] = rows * strip / strips;
    first_[strips] = rows;
  }
  long begin(long strip) const { return first_[strip]; }
  long count(long strip) const { return first_[strip + 1] - first_[strip]; }

 private:
  int16_t first_[kMostStrips + 1];  // the first row of each strip, and the end
};

}  // namespace gemm
