// Rows of x as one form of weights multiplies them, where any thread computes the product with one panel of outputs by
// itself: experts have few rows each, and are multiplied side by side (experts.cpp). The sums have the bits of the form's
// own product.
#pragma once
#include "gemm/grouped.h"

namespace gemm {

// Made by one thread, in memory of the arena. `rows` are at most kMostPanelRows.
class PanelRows {
 public:
  PanelRows(long rows, long strips) : rows(rows), strips(strips) {}

  // Packs the rows of one strip: row r is the one at x + row_of[r] * stride; `stride` in elements.
  virtual void pack(long strip, const void *x, long stride, const int32_t *row_of) = 0;
  // sums [rows][kPanel] of one panel along one slice of the inputs.
  virtual void multiply(long panel, long slice, float *sums) const = 0;

  const long rows, strips;
};

constexpr long kMostPanelRows = 240;

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
