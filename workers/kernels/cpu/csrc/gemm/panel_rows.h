// Rows of x as one form of weights multiplies them, where any thread computes the product with one panel of outputs by
// itself: experts have few rows each, and are multiplied side by side (experts.cpp). The sums have the bits of the form's
// own product.
#pragma once
#include "gemm/grouped.h"
#include "gemm/strips.h"
#include "simd/int8.h"

namespace gemm {

using namespace simd;

// What a tile fetches into the caches while it computes: from `from` on, `step` bytes for each step of the loop.
struct Fetch {
  const char *from;
  long step;

  // For one of the strips that read the `bytes` at `here`, `step` at a time: if it is alone what lies `ahead`, else its share
  // of what comes next.
  static Fetch of_strip(const char *here, long bytes, long step, long ahead, long strip, long strips) {
    return strips == 1 ? Fetch{here + ahead, step} : Fetch{here + bytes + bytes * strip / strips, step / strips};
  }
};

// Bytes of weights fetched ahead while one strip of rows reads them, since hardware's own fetching stops at page borders; at
// the end of the last panel that reaches beyond the weight, where fetching does nothing.
constexpr long kAhead = 8192, kAheadOnce = 6144;

// Whether a strip of `rows` rows is alone: strips are of about equal size, so two have half of the most rows each, or more.
constexpr bool are_read_once(long rows, long most_rows_of_a_strip) { return 2 * rows < most_rows_of_a_strip; }
constexpr long fetched_ahead(long rows, long most_rows_of_a_strip) {
  return are_read_once(rows, most_rows_of_a_strip) ? kAheadOnce : kAhead;
}

// Weights that are read once do not stay in the caches beyond the first level. What the rest of the server works on stays
// there then: on Zen 5 a token of Granite took 0.94 of its time in int8 and 0.92 in int4, the experts alone 0.96 to 1.00.
template <bool kOnce>
inline void fetch_weights(const char *from, long bytes) {
  for (long at = 0; at < bytes; at += 64) kOnce ? prefetch_once(from + at) : prefetch(from + at);
}

// Where the sums of a panel are added: those of row r, and a bias, times weight_of[r] to totals[row_of[r]][kPanel].
struct WeightedTotals {
  const int32_t *row_of;
  const float *weight_of;
  float *totals;  // of slice 0
  long part;      // from the totals of a slice to those of the next
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

// Made by one thread, in memory of the arena. `rows` are at most kMostRows.
class PanelRows {
 public:
  PanelRows(long rows, long strips) : rows(rows), strips(strips) {}

  // Packs the rows of one strip: row r is the one at x + row_of[r] * stride; `stride` in elements.
  virtual void pack(long strip, const void *x, long stride, const int32_t *row_of) = 0;
  // sums [rows][kPanel] of one panel along one slice of the inputs.
  virtual void multiply(long panel, long slice, float *sums) const = 0;
  // Adds the same sums, of each slice from `first` to `end`, to the totals of that slice. Forms do so strip by strip: where
  // slices are short, the sums of all rows would be read from beyond the first-level cache.
  virtual void multiply_add(long panel, long first, long end, const WeightedTotals &to) const {
    alignas(64) float sums[kMostRows * kPanel];
    for (long slice = first; slice < end; slice++) {
      multiply(panel, slice, sums);
      for (long r = 0; r < rows; r++) to.add(slice, r, load(sums + r * kPanel), load(sums + r * kPanel + kLanes));
    }
  }

  const long rows, strips;
};

// Of `product`, whose x and y are not read: T is the type of x.
template <class T>
PanelRows *dense_panel_rows(const Product &product);
template <class T>
PanelRows *int8_panel_rows(const Product &product, int kind);
template <class T>
PanelRows *grouped_panel_rows(const Product &product, int kind);
template <class T>
PanelRows *fp8_panel_rows(const Product &product);

}  // namespace gemm
