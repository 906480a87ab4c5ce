// Rows that are multiplied together, in strips of as many as one tile takes.
#pragma once
#include <cstdint>

namespace gemm {

constexpr long kMostRows = 240;  // rows whose sums of one panel stay in the caches

// Up to kMostRows rows in strips of at most kStrip and of about equal size. Where each begins is found out once, as a tile of a
// short slice takes no longer than a few divisions: the second product of 128 rows of Granite, in bfloat16 on Zen 5, takes
// 0.91 of the time of finding it out for each tile.
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
  int16_t first_[kMostStrips + 1];  // the row with which each strip begins, and the end
};

}  // namespace gemm
