// y = epilogue(x w^T + bias) with w in the format of grouped_format.h.
//
// Each row of x is rounded to integers from -127 to 127, with a scale for each slice. The products of a group are added
// up exactly. The sum, plus the zero point times the sum of the row's integers, times the group's scale, is rounded to
// float32 and added to the sum of the groups before, in the order of inputs for any rows, threads and tiles. So the
// bits of a row depend only on that row, at every ISA level. The sum of a slice times its output's factor and times the
// row's scale is rounded to float32. Slices are added up in a tree (slices.h), and the epilogue follows.
#include "gemm/grouped.h"

#include "gemm/epilogue.h"
#include "gemm/grouped_tile.h"
#include "gemm/panel_rows.h"
#include "gemm/shares.h"
#include "gemm/slices.h"
#include "runtime/arena.h"

namespace gemm {
namespace grouped {
namespace {

constexpr long kUnpackedRows = 4;   // number of rows from which unpacking 4-bit values first is faster
static_assert(kBlock % 32 == 0, "a block has whole groups");

template <class Dot>
using Rows = RoundedRows<kStrip<Dot>, 0>;

// For each group of each row of x: the sum of its integers, and the initial sum of the matmul. [rows][groups of all
// slices].
template <class Dot>
struct GroupSums {
  const PackedFormat &format;
  long stride;
  int32_t *starts;
  float *totals;  // null if the weight has no zero points

  GroupSums(const PackedFormat &format, long rows)
      : format(format), stride(format.slices * format.groups()), starts(arena().take<int32_t>(rows * stride)),
        totals(format.has_zeros ? arena().take<float>(rows * stride) : nullptr) {}

  long at(long row, long block, const Slices &slices) const {
    return row * stride + slices.slice_of(block) * format.groups() + slices.in_slice(block) * (kBlock / format.group);
  }

  void compute(const Rows<Dot> &x) {
#pragma omp parallel for if (x.size() > kSerialRows)
    for (long strip = 0; strip < x.strips; strip++) compute_strip(x, strip);
  }

  void compute_strip(const Rows<Dot> &x, long strip) {
    const int base = base_of<Dot>(format);
    for (long r = 0; r < x.count(strip); r++)
      for (long block = 0; block < x.blocks; block++) {
        const long count = x.slices.inputs_of(block), groups = format.groups_of(count);
        uint8_t *row = x.at(strip, block) + r * kRowBytes;
        memset(row + count, 0, groups * format.group - count);
        if (format.group == 32) compute_groups<32>(row, groups, base, at(x.begin(strip) + r, block, x.slices));
        else compute_groups<16>(row, groups, base, at(x.begin(strip) + r, block, x.slices));
      }
  }

  template <int kGroup>
  void compute_groups(const uint8_t *row, long groups, int base, long first) {
    for (long group = 0; group < groups; group++) {
      int32_t total = 0;
      for (int k = 0; k < kGroup; k++) total += static_cast<int8_t>(row[group * kGroup + k]);
      starts[first + group] = -base * total;
      if (totals) totals[first + group] = total;
    }
  }
};

// A weight and the rows that it multiplies.
template <class Dot>
struct Operands {
  const PackedFormat &format;
  const Rows<Dot> &x;
  const GroupSums<Dot> &of;
  const Tiles tiles = tiles_for<Dot>(format);
  const long group_bytes = format.group_bytes(), values_at = format.values_at(), slice_bytes = format.slice_bytes();
  const long panel_bytes = format.panel_bytes();
  const bool unpacks = tiles.unpacked && x.rows >= kUnpackedRows;

  // Compute the sums of one panel along the slices `first` to `end`, times their scales. With `to`, add them to its
  // totals. Without it, store the sums of a single slice to sums [rows][kPanel]. If slices have several blocks, `sums`
  // also holds the intermediate sums.
  void multiply(long panel, long first, long end, float *sums, const WeightedTotals *to) const {
    const char *factors = reinterpret_cast<const char *>(&format + 1) + panel * panel_bytes;
    const char *from = factors + kPanel * sizeof(float) + first * slice_bytes;
    const long blocks = x.slices.blocks, in_cell = 1L << x.shift;
    for (long block = first * blocks, next; block < end * blocks; block = next) {
      next = std::min(end * blocks, (block | (in_cell - 1)) + 1);  // blocks that share a cell
      const long slice = x.slices.slice_of(block), sums_at = of.at(0, block, x.slices);
      Tile t;
      t.scales = from;
      t.values = from + values_at;
      t.scales_step = t.values_step = group_bytes;
      t.slices = next - block;
      t.groups = format.groups_of(x.slices.inputs_of(block));
      t.slice_bytes = x.padded(x.slices.length);
      t.is_first = x.slices.in_slice(block) == 0;
      t.factors = x.slices.in_slice(next - 1) == blocks - 1 ? reinterpret_cast<const float *>(factors) : nullptr;
      t.row_scales = x.scales + slice;
      t.scales_stride = format.slices;
      t.starts = of.starts + sums_at;
      t.totals = of.totals ? of.totals + sums_at : nullptr;
      t.stride = of.stride;
      t.sums = sums;
      t.to = to;
      t.slice = slice;
      from += t.slices * t.groups * group_bytes;
      if (unpacks) multiply_unpacked(t, block, from);
      else multiply_strips(tiles.packed, t, block, from);
    }
  }

  void multiply_unpacked(Tile &t, long block, const char *next) const {
    alignas(64) char values[kBlock * kPanel];
    tiles.unpack(t.values, group_bytes, t.slices * t.groups, values);
    t.values = values;
    t.values_step = format.group * kPanel;
    multiply_strips(tiles.unpacked, t, block, next);
  }

  // Multiply all strips. `next`: the weights after those of the tile; each strip prefetches its share of them. The tile
  // is updated in place for each strip, because a copy would wait until the earlier stores to it have reached the
  // cache.
  void multiply_strips(const MultiplyTile *multiply, Tile &t, long block, const char *next) const {
    const int32_t *starts = t.starts;
    const float *totals = t.totals, *row_scales = t.row_scales;
    float *sums = t.sums;
    for (long strip = 0; strip < x.strips; strip++) {
      const long row = x.begin(strip);
      t.x = x.at(strip, block);
      t.starts = starts + row * t.stride;
      t.totals = totals ? totals + row * t.stride : nullptr;
      t.sums = sums + row * kPanel;
      t.row_scales = row_scales + row * t.scales_stride;
      t.row = row;
      const long ahead = fetched_ahead(x.rows, kStrip<Dot>);
      t.fetch = Fetch::of_strip(t.scales, next - t.scales, group_bytes, ahead, strip, x.strips);
      multiply[x.count(strip)](t);
    }
  }
};

// Copy a row of x with its inputs in the order of the packed weight, and zeros if there is no input.
template <class T>
void move_in_order(const T *x, const int32_t *order, long count, T *moved) {
  for (long k = 0; k < count; k++) moved[k] = order[k] < 0 ? T{} : x[order[k]];
}

template <class T>
const T *in_order(const T *x, long stride, long rows, const int32_t *order, long count) {
  T *moved = arena().take<T>(rows * count);
#pragma omp parallel for if (rows * count > kSerialRows)
  for (long row = 0; row < rows; row++) move_in_order(x + row * stride, order, count, moved + row * count);
  return moved;
}

// Split the work by panels among threads. Sums of groups are not cut, so that their order stays the same.
template <class T, class Dot>
void multiply(const MatmulArgs &p) {
  const PackedFormat &format = *static_cast<const PackedFormat *>(p.weight);
  const long inputs = format.slices * format.length;
  for (long first = 0; first < p.rows; first += kMostRows) {
    const Arena::Mark mark = arena().mark();
    Rows<Dot> x(std::min(kMostRows, p.rows - first), inputs, format.slices);
    const T *from = static_cast<const T *>(p.x) + first * p.x_stride;
    const int32_t *order = format.order();
    if (order) from = in_order(from, p.x_stride, x.rows, order, inputs);
    x.packed = arena().take<uint8_t>(x.size());
    x.scales = arena().take<float>(x.rows * format.slices);
    x.pack(from, order ? inputs : p.x_stride);
    GroupSums<Dot> of(format, x.rows);
    of.compute(x);
    const Operands<Dot> operands{format, x, of};
    const Shares shares(format.panels());
#pragma omp parallel
    {
      alignas(64) float sums[kPending * kMostRows * kPanel];
      shares.visit([&](long panel) {
        for (long slice = 0; slice < format.slices; slice++) {
          operands.multiply(panel, slice, slice + 1, sums + pending_before(slice) * x.rows * kPanel, nullptr);
          add_slice(sums, slice, x.rows * kPanel);
        }
        for (long r = 0; r < x.rows; r++)
          finish<T>(p, first + r, panel, load(sums + r * kPanel), load(sums + r * kPanel + kLanes));
      });
    }
    arena().release(mark);
  }
}

template <class T, class Dot>
struct GroupedRows final : PanelRows {
  const PackedFormat &format;
  const long inputs;
  Rows<Dot> x;
  GroupSums<Dot> of;
  const Operands<Dot> operands{format, x, of};
  T *moved;  // [rows][inputs]  rows in the weight's own order, if it has any; or null

  GroupedRows(const PackedFormat &format, const Rows<Dot> &rows)
      : PanelRows(rows.rows, rows.strips), format(format), inputs(format.slices * format.length), x(rows),
        of(format, rows.rows) {
    x.packed = arena().take<uint8_t>(x.size());
    x.scales = arena().take<float>(x.rows * format.slices);
    moved = format.order() ? arena().take<T>(x.rows * inputs) : nullptr;
  }
  void pack(long strip, const void *from, long stride, const int32_t *row_of) override {
    x.pack_strip(strip, [&](long row) {
      const T *there = static_cast<const T *>(from) + row_of[row] * stride;
      if (!moved) return there;
      move_in_order(there, format.order(), inputs, moved + row * inputs);
      return static_cast<const T *>(moved + row * inputs);
    });
    of.compute_strip(x, strip);
  }
  void multiply(long panel, long slice, float *sums) const override {
    operands.multiply(panel, slice, slice + 1, sums, nullptr);
  }
  void multiply_add(long panel, long first, long end, const WeightedTotals &to) const override {
    alignas(64) float sums[kMostRows * kPanel];
    operands.multiply(panel, first, end, sums, &to);
  }
};

template <class T, class Dot>
PanelRows *rows_by(const MatmulArgs &p) {
  const PackedFormat &format = *static_cast<const PackedFormat *>(p.weight);
  const Rows<Dot> rows(p.rows, format.slices * format.length, format.slices);
  return new (arena().take<GroupedRows<T, Dot>>(1)) GroupedRows<T, Dot>(format, rows);
}

}  // namespace
}  // namespace grouped

template <class T>
PanelRows *grouped_panel_rows(const MatmulArgs &p, int kind) {
  return kind == kGroupedDot ? grouped::rows_by<T, Dot>(p) : grouped::rows_by<T, PlainDot>(p);
}

template <class T>
void multiply_grouped(const MatmulArgs &p, int kind) {
  if (kind == kGroupedDot) grouped::multiply<T, Dot>(p);
  else grouped::multiply<T, PlainDot>(p);
}

#define OARLOCK_MULTIPLY_GROUPED(T)                        \
  template void multiply_grouped<T>(const MatmulArgs &, int); \
  template PanelRows *grouped_panel_rows<T>(const MatmulArgs &, int);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MULTIPLY_GROUPED)

}  // namespace gemm

extern "C" void oarlock_grouped_gemm(const void *x, const void *weight, const void *bias, const void *residual, void *y,
                                     long rows, long columns, long inputs, long x_stride, long y_stride, int epilogue,
                                     int type, int kind, long slices) {
  const gemm::MatmulArgs p{x, weight, bias, residual, y, rows, columns, inputs, x_stride, y_stride, epilogue, slices};
  with_type(type, [&](auto *of) { gemm::multiply_grouped<std::remove_pointer_t<decltype(of)>>(p, kind); });
}
