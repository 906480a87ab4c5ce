// Rows of x packed for one weight format, so that any single thread can multiply them by one panel of outputs. Experts
// have few rows each and are multiplied at the same time (experts.cpp). The sums have the same bits as the format's own
// matmul.
#pragma once
#include "gemm/grouped.h"
#include "gemm/strips.h"
#include "simd/int8.h"

namespace gemm {

using namespace simd;

// The weights that a tile prefetches while it computes: from `from` on, `step` bytes for each step of the loop.
struct Fetch {
  const char *from;
  long step;

  // Return the prefetches for one of the strips that read `bytes` bytes at `here`, `step` at a time. A single strip
  // prefetches the weights `ahead` bytes further on. Otherwise each strip prefetches its share of the weights that come
  // next.
  static Fetch of_strip(const char *here, long bytes, long step, long ahead, long strip, long strips) {
    return strips == 1 ? Fetch{here + ahead, step} : Fetch{here + bytes + bytes * strip / strips, step / strips};
  }
};

// Distance in bytes of the weights that are prefetched while one strip of rows reads them, because hardware prefetching
// stops at page boundaries. At the end of the last panel, this reaches beyond the weight, where prefetching has no
// effect.
constexpr long kAhead = 8192, kAheadOnce = 6144;

// Return whether a strip of `rows` rows is the only one. Strips have about equal size, so if there are two or more,
// each has at least half of the maximum.
constexpr bool are_read_once(long rows, long most_rows_of_a_strip) { return 2 * rows < most_rows_of_a_strip; }
constexpr long fetched_ahead(long rows, long most_rows_of_a_strip) {
  return are_read_once(rows, most_rows_of_a_strip) ? kAheadOnce : kAhead;
}

// Prefetch weights. Weights that are read once bypass the caches beyond the first level, so that the working set of the
// rest of the server stays there. This makes decoding measurably faster.
template <bool kOnce>
inline void fetch_weights(const char *from, long bytes) {
  for (long at = 0; at < bytes; at += 64) kOnce ? prefetch_once(from + at) : prefetch(from + at);
}

// Totals to which the sums of a panel are added: the sums of row r, and a bias, times weight_of[r], are added to
// totals[row_of[r]][kPanel].
struct WeightedTotals {
  const int32_t *row_of;
  const float *weight_of;
  float *totals;  // totals of slice 0
  long part;      // distance between the totals of two slices
  bool has_bias;
  Vec low, high;  // the bias, which is added to the sums of slice 0

  void add(long slice, long r, Vec left, Vec right) const {
    if (has_bias && slice == 0) left = left + low, right = right + high;
    const Vec weight = broadcast(weight_of[r]);
    float *to = totals + slice * part + row_of[r] * kPanel;
    store(to, load(to) + rounded_product(left, weight));
    store(to + kLanes, load(to + kLanes) + rounded_product(right, weight));
  }
};

// Rows of x packed for one weight. The object is made by one thread, in memory of the arena. At most kMostRows `rows`.
class PanelRows {
 public:
  PanelRows(long rows, long strips) : rows(rows), strips(strips) {}

  // Pack the rows of one strip. Row r is read from x + row_of[r] * stride; `stride` in elements.
  virtual void pack(long strip, const void *x, long stride, const int32_t *row_of) = 0;
  // Compute sums [rows][kPanel] of one panel along one slice of the inputs.
  virtual void multiply(long panel, long slice, float *sums) const = 0;
  // Add the same sums, for each slice from `first` to `end`, to the totals of that slice. Most weight formats override
  // this to work strip by strip: with short slices, the sums of all rows would not fit the first-level cache.
  virtual void multiply_add(long panel, long first, long end, const WeightedTotals &to) const {
    alignas(64) float sums[kMostRows * kPanel];
    for (long slice = first; slice < end; slice++) {
      multiply(panel, slice, sums);
      for (long r = 0; r < rows; r++) to.add(slice, r, load(sums + r * kPanel), load(sums + r * kPanel + kLanes));
    }
  }

  const long rows, strips;
};

// Return the rows for the weight of `args`, whose x and y are not read. T is the type of x.
template <class T>
PanelRows *dense_panel_rows(const MatmulArgs &args);
template <class T>
PanelRows *int8_panel_rows(const MatmulArgs &args, int kind);
template <class T>
PanelRows *grouped_panel_rows(const MatmulArgs &args, int kind);
template <class T>
PanelRows *fp8_panel_rows(const MatmulArgs &args);

// Return the rows for a weight of any kind. The caller releases the memory.
template <class T>
PanelRows *panel_rows(const MatmulArgs &args, int kind) {
  if (kind == kDense) return dense_panel_rows<T>(args);
  if (kind == kInt8 || kind == kInt8Dot) return int8_panel_rows<T>(args, kind);
  if (kind == kFloat8) return fp8_panel_rows<T>(args);
  return grouped_panel_rows<T>(args, kind);
}

}  // namespace gemm
