// y = epilogue(x w^T + bias). Every weight is read once from memory for up to kMostRows rows.
//
// An output is the sum, in order, of its sums over blocks of inputs, each added input by input in float32. If a weight
// has slices, each slice is summed like this, and the slices are added up in a tree (slices.h). The order depends only
// on the number of inputs and slices, so the bits of a row do not depend on the other rows in the batch, on their
// number, or on the number of threads.
//
// Gated weights have a register of gate outputs next to a register of up outputs in each panel, so one tile has both
// factors.
#include "gemm/gemm.h"

#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "gemm/epilogue.h"
#include "gemm/panel_rows.h"
#include "gemm/shares.h"
#include "gemm/slices.h"
#include "gemm/strips.h"
#include "gemm/tile.h"
#if defined(__AMX_BF16__) || defined(OARLOCK_EMULATE_AMX)
#include "gemm/amx.h"
#endif
#include "runtime/arena.h"

namespace gemm {
namespace {

constexpr long kSerial = 1 << 14;    // elements of x up to which one thread is faster than waking another
constexpr long kFullTile = 32;       // inputs of a full AMX tile

template <class T>
struct TypeOf {
  using Tiles = Floats;
};
template <>
struct TypeOf<Float16> {
  using Tiles = Halves;
};
template <>
struct TypeOf<BFloat16> {
#if defined(__AMX_BF16__) || defined(OARLOCK_EMULATE_AMX)
  using Tiles = AmxPairs;
#else
  using Tiles = BrainPairs;
#endif
};

// Rows of x in strips: [strips][cells][rows of the strip][kRowStride]. If slices are shorter than a block, several
// share a cell, so that data which strips read again for each panel is close together.
template <class T>
struct Rows : Strips<TypeOf<T>::Tiles::kRows> {
  using S = typename TypeOf<T>::Tiles;
  using X = typename S::X;
  using Strips<S::kRows>::begin, Strips<S::kRows>::count, Strips<S::kRows>::rows, Strips<S::kRows>::strips;
  X *packed;
  Slices inputs;
  long blocks, cells;  // blocks of all slices, and cells that store them
  int shift;            // a cell has 1 << shift blocks

  Rows(long rows, const Slices &inputs) : Strips<S::kRows>(rows), inputs(inputs), blocks(inputs.all_blocks()), shift(0) {
    while (inputs.blocks == 1 && padded(inputs.length) << (shift + 1) <= S::kBlock) shift++;
    cells = (blocks + (1L << shift) - 1) >> shift;
  }
  static long padded(long inputs) { return (inputs + S::kStep - 1) / S::kStep * S::kStep; }
  long size() const { return rows * cells * kRowStride<S>; }
  X *at(long strip, long block) const {
    X *cell = packed + (begin(strip) * cells + count(strip) * (block >> shift)) * kRowStride<S>;
    return cell + (block & ((1L << shift) - 1)) * padded(inputs.length);
  }

  void pack(const T *x, long stride) {
#pragma omp parallel for if (size() > kSerial)
    for (long strip = 0; strip < strips; strip++) pack_strip(strip, [&](long row) { return x + row * stride; });
  }

  // Pack the rows of a strip. `row_at(r)` returns the address of row r of x.
  template <class RowAt>
  void pack_strip(long strip, const RowAt &row_at) {
    for (long block = 0; block < blocks; block++)
      for (long r = 0; r < count(strip); r++)
        copy(row_at(begin(strip) + r) + inputs.first_input(block), inputs.inputs_of(block),
             at(strip, block) + r * kRowStride<S>);
  }

  static void copy(const T *from, long elements, X *to) {
    if constexpr (sizeof(X) == sizeof(T)) {
      memcpy(to, from, elements * sizeof(X));
    } else {
      long k = 0;
      for (; k + kLanes <= elements; k += kLanes) store(to + k, load(from + k));
      if (k < elements) store(to + k, load(from + k, elements - k));  // the rest of the register is zero
    }
    if (elements % S::kStep) memset(to + elements, 0, sizeof(X));  // the other half of the last pair
  }
};

// Widen `count` inputs of a packed weight to [count][kPanel].
void widen(const BFloat16 *from, long count, float *to) {
  for (long k = 0; k < count; k += 2, from += 2 * kPanel, to += 2 * kPanel)
    for (int half = 0; half < 2; half++) {
      const Pairs pairs = load_pairs(from + half * 2 * kLanes);
      store(to + half * kLanes, lower(pairs));
      store(to + kPanel + half * kLanes, upper(pairs));
    }
}
void widen(const Float16 *from, long count, float *to) {
  for (long at = 0; at < count * kPanel; at += kLanes) store(to + at, load(from + at));
}
void widen(const float *, long, float *) {}

template <class T>
struct Chunk {
  using S = typename TypeOf<T>::Tiles;
  const MatmulArgs &p;
  const Rows<T> &x;
  long first_row;

  const T *weights(long panel, long block) const {
    const long slice = x.inputs.slice_of(block), in_slice = x.inputs.in_slice(block) * x.inputs.block;
    const long slices = panel * p.slices + slice;
    return static_cast<const T *>(p.weight) + (slices * x.padded(x.inputs.length) + in_slice) * kPanel;
  }

  // Compute totals [rows][kPanel] of one panel, over blocks `begin` to `end` of one slice.
  void sum(long panel, long begin, long end, float *totals) const {
    // Widening costs as much as two rows. If there is only one strip, it happens in registers.
    constexpr bool kWidens = sizeof(T) != sizeof(typename S::X);
    alignas(64) float wide[kWidens ? S::kBlock * kPanel : 1];
    for (long block = begin; block < end; block++) {
      const bool first = block == begin;
      const T *w = weights(panel, block);
      const long count = x.padded(x.inputs.inputs_of(block));
      const char *here = reinterpret_cast<const char *>(w);
      if (x.strips == 1) {
        kTiles<S>[x.rows](x.at(0, block), w, count, totals, first, {here + ahead<S>(x.rows), kStepBytes<S>});
        continue;
      }
      if (kWidens) widen(w, count, wide);
      constexpr long kBytes = kWidens ? kPanel * sizeof(T) : kStepBytes<S>;
      const long steps = kWidens ? count : count / S::kStep;
      for (long strip = 0; strip < x.strips; strip++) {
        const Fetch next = Fetch::of_strip(here, steps * kBytes, kBytes, 0, strip, x.strips);
        float *to = totals + x.begin(strip) * kPanel;
        if constexpr (kWidens) kTiles<Widened>[x.count(strip)](x.at(strip, block), wide, count, to, first, next);
        else kTiles<S>[x.count(strip)](x.at(strip, block), w, count, to, first, next);
      }
    }
  }

  void finish_rows(long panel, const float *totals) const {
    for (long r = 0; r < x.rows; r++)
      finish<T>(p, first_row + r, panel, load(totals + r * kPanel), load(totals + r * kPanel + kLanes));
  }

  // Compute sums [rows][kPanel] of one panel and slice.
  void sum_slice(long panel, long slice, float *sums) const {
    sum(panel, slice * x.inputs.blocks, (slice + 1) * x.inputs.blocks, sums);
  }

  // Add the sums of one panel along slices `first` to `end` to the totals, strip by strip. The weights are not widened
  // in advance.
  void add_slices_to(long panel, long first, long end, const WeightedTotals &to) const {
    if constexpr (kSumsInRegisters<S>)
      if (x.inputs.blocks == 1) return add_short_slices_to(panel, first, end, to);
    for (long slice = first; slice < end; slice++)
      for (long strip = 0; strip < x.strips; strip++) add_slice_to(panel, slice, strip, to);
  }

  // Do the same for slices of one block. The prefetches of each strip are computed once for all slices.
  void add_short_slices_to(long panel, long first, long end, const WeightedTotals &to) const {
    const long count = x.padded(x.inputs.length), bytes = count / S::kStep * kStepBytes<S>;
    const char *here = reinterpret_cast<const char *>(weights(panel, first));
    Fetch next[Rows<T>::kMostStrips];
    for (long strip = 0; strip < x.strips; strip++)
      next[strip] = Fetch::of_strip(here, bytes, kStepBytes<S>, ahead<S>(x.rows), strip, x.strips);
    for (long slice = first; slice < end; slice++, here += bytes)
      for (long strip = 0; strip < x.strips; strip++) {
        kAddTiles<S>[x.count(strip)](x.at(strip, slice), here, count, next[strip], to, slice, x.begin(strip));
        next[strip].from += bytes;
      }
  }

  void add_slice_to(long panel, long slice, long strip, const WeightedTotals &to) const {
    alignas(64) float sums[S::kRows * kPanel];
    const long begin = slice * x.inputs.blocks, row = x.begin(strip), rows = x.count(strip);
    for (long block = begin; block < begin + x.inputs.blocks; block++) {
      const T *w = weights(panel, block);
      const long count = x.padded(x.inputs.inputs_of(block));
      const char *here = reinterpret_cast<const char *>(w);
      const long bytes = count / S::kStep * kStepBytes<S>;
      const Fetch next = Fetch::of_strip(here, bytes, kStepBytes<S>, ahead<S>(x.rows), strip, x.strips);
      kTiles<S>[rows](x.at(strip, block), w, count, sums, block == begin, next);
    }
    for (long r = 0; r < rows; r++) to.add(slice, row + r, load(sums + r * kPanel), load(sums + r * kPanel + kLanes));
  }

  // Split the work by panels among threads.
  void by_panels(long panels) const {
    const Arena::Mark mark = arena().mark();
    const Shares shares(panels);
#pragma omp parallel
    {
      alignas(64) float totals[kPending * kMostRows * kPanel];
      const long size = x.rows * kPanel;
      shares.visit([&](long panel) {
        for (long slice = 0; slice < p.slices; slice++) {
          sum_slice(panel, slice, totals + pending_before(slice) * size);
          add_slice(totals, slice, size);
        }
        finish_rows(panel, totals);
      });
    }
    arena().release(mark);
  }

  // Split the work by blocks among threads, if there are fewer panels than threads. The sums of blocks are added in the
  // same order.
  void by_blocks(long panels) const {
    const Arena::Mark mark = arena().mark();
    const long size = x.rows * kPanel;
    float *sums = arena().take<float>(panels * x.blocks * size);
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (long unit = 0; unit < panels * x.blocks; unit++) {
        const long block = unit % x.blocks;
        sum(unit / x.blocks, block, block + 1, sums + unit * size);
      }
#pragma omp for schedule(static)
      for (long panel = 0; panel < panels; panel++) {
        float *totals = sums + panel * x.blocks * size;
        const auto add = [&](long to, long from) {
          for (long at = 0; at < size; at += kLanes)
            store(totals + to * size + at, load(totals + to * size + at) + load(totals + from * size + at));
        };
        for (long block = 0; block < x.blocks; block++)
          if (block % x.inputs.blocks) add(block / x.inputs.blocks * x.inputs.blocks, block);
        for (long span = x.inputs.blocks; span < x.blocks; span *= 2)
          for (long block = 0; block < x.blocks; block += 2 * span) add(block, block + span);
        finish_rows(panel, totals);
      }
    }
    arena().release(mark);
  }
};

template <class T>
Slices slices_of(const MatmulArgs &p) {
  return Slices(p.inputs, p.slices, TypeOf<T>::Tiles::kBlock).even(kFullTile);
}

template <class T>
struct DenseRows final : PanelRows {
  MatmulArgs p;
  Rows<T> x;

  DenseRows(const MatmulArgs &args, const Rows<T> &of) : PanelRows(of.rows, of.strips), p(args), x(of) {
    x.packed = arena().take<typename Rows<T>::X>(x.size());
  }
  void pack(long strip, const void *from, long stride, const int32_t *row_of) override {
    x.pack_strip(strip, [&](long row) { return static_cast<const T *>(from) + row_of[row] * stride; });
  }
  void multiply(long panel, long slice, float *sums) const override { Chunk<T>{p, x, 0}.sum_slice(panel, slice, sums); }
  void multiply_add(long panel, long first, long end, const WeightedTotals &to) const override {
    if (strips > 1 && sizeof(T) != sizeof(typename Rows<T>::X)) PanelRows::multiply_add(panel, first, end, to);
    else Chunk<T>{p, x, 0}.add_slices_to(panel, first, end, to);
  }
};

}  // namespace

template <class T>
PanelRows *dense_panel_rows(const MatmulArgs &p) {
  return new (arena().take<DenseRows<T>>(1)) DenseRows<T>(p, Rows<T>(p.rows, slices_of<T>(p)));
}

template <class T>
void multiply(const MatmulArgs &p) {
  const long columns_per_panel = kPanel;
  const long panels = (p.columns + columns_per_panel - 1) / columns_per_panel;
  const Slices inputs = slices_of<T>(p);
  for (long row = 0; row < p.rows; row += kMostRows) {
    Rows<T> x(std::min(kMostRows, p.rows - row), inputs);
    const Arena::Mark mark = arena().mark();
    x.packed = arena().take<typename Rows<T>::X>(x.size());
    x.pack(static_cast<const T *>(p.x) + row * p.x_stride, p.x_stride);
    const Chunk<T> chunk{p, x, row};
    if (panels < omp_get_max_threads() && x.blocks > 1) chunk.by_blocks(panels);
    else chunk.by_panels(panels);
    arena().release(mark);
  }
}

#define OARLOCK_MULTIPLY(T)                   \
  template void multiply<T>(const MatmulArgs &); \
  template PanelRows *dense_panel_rows<T>(const MatmulArgs &);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MULTIPLY)

}  // namespace gemm

extern "C" void oarlock_gemm(const void *x, const void *weight, const void *bias, const void *residual, void *y, long rows,
                             long columns, long inputs, long x_stride, long y_stride, int epilogue, int type,
                             long slices) {
  const gemm::MatmulArgs p{x, weight, bias, residual, y, rows, columns, inputs, x_stride, y_stride, epilogue, slices};
  with_type(type, [&](auto *of) { gemm::multiply<std::remove_pointer_t<decltype(of)>>(p); });
}
