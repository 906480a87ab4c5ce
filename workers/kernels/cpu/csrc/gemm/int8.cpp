// y = epilogue(x w^T + bias) with w = scale * (integers from -127 to 127), a scale for each output.
//
// Each row of x is also rounded to such integers, with its own scale, and the products of integers are added up
// exactly. So the order of additions does not matter: the bits of a row do not depend on the other rows, on threads or
// on the ISA level. An element of the result is (sum * scale of the output) * scale of the row, both rounded to
// float32, followed by the epilogue. If a weight has slices, each slice is rounded and multiplied like this, and the
// results are added up in a tree (slices.h).
//
// A packed weight is a sequence of panels, each: [kPanel] scales, [slices][kPanel] initial sums, [slices][inputs of a
// slice / 4][kPanel][4] weights. The initial sums cancel the offset that is added to x if the instruction takes
// unsigned integers.
#include "gemm/int8.h"

#include <omp.h>

#include <array>
#include <type_traits>
#include <utility>

#include "gemm/epilogue.h"
#include "gemm/panel_rows.h"
#include "gemm/rounded_rows.h"
#include "gemm/shares.h"
#include "runtime/arena.h"
#include "simd/int8.h"

namespace gemm {
namespace {

constexpr long kStepBytes = 4 * kPanel;

long padded(long inputs) { return (inputs + 3) / 4 * 4; }
long panel_bytes(long inputs, long slices) {
  return kPanel * (sizeof(float) + slices * (sizeof(int32_t) + padded(inputs / slices)));
}

struct Panel {
  const float *scales;   // [kPanel]
  const int32_t *first;  // [slices][kPanel]
  const uint8_t *weights;

  Panel(const void *packed, long panel, long inputs, long slices) {
    const char *at = static_cast<const char *>(packed) + panel * panel_bytes(inputs, slices);
    scales = reinterpret_cast<const float *>(at);
    first = reinterpret_cast<const int32_t *>(at + kPanel * sizeof(float));
    weights = reinterpret_cast<const uint8_t *>(first + slices * kPanel);
  }
  // Prefetch the size of the panel's head (scales and initial sums), `ahead` bytes further on. The prefetches while the
  // weights are read skip exactly these bytes.
  void fetch_head(long ahead) const {
    const char *begin = reinterpret_cast<const char *>(scales);
    fetch_weights<true>(begin + ahead, reinterpret_cast<const char *>(weights) - begin);
  }
};

// Add x w over 4 * steps inputs to low, high [R]. Return the end of these weights.
template <class Dot, int R>
inline const uint8_t *add_steps(const uint8_t *x, const uint8_t *w, long steps, Ints (&low)[R], Ints (&high)[R],
                                Fetch fetch) {
  for (long s = 0; s < steps; s++, x += 4, w += kStepBytes, fetch.from += fetch.step) {
    fetch_weights<are_read_once(R, Dot::kRows)>(fetch.from, kStepBytes);
    const typename Dot::Weight left = Dot::prepare(load_ints(w)), right = Dot::prepare(load_ints(w + 4 * kLanes));
    add_four_inputs<Dot::add>(x, left, right, low, high);
  }
  return w;
}

// Add x w over 4 * steps inputs to sums [R][kPanel]. If `first` [kPanel] is given, the sums begin with its values.
template <class Dot, int R>
void tile(const uint8_t *x, const uint8_t *w, long steps, int32_t *sums, const int32_t *first, Fetch fetch) {
  Ints low[R], high[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    const int32_t *from = first ? first : sums + r * kPanel;
    low[r] = load_ints(from);
    high[r] = load_ints(from + kLanes);
  }
  add_steps<Dot, R>(x, w, steps, low, high, fetch);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    store_ints(sums + r * kPanel, low[r]);
    store_ints(sums + r * kPanel + kLanes, high[r]);
  }
}

using Tile = void (*)(const uint8_t *x, const uint8_t *w, long steps, int32_t *sums, const int32_t *first, Fetch fetch);

template <class Dot, int... R>
constexpr auto tile_table(std::integer_sequence<int, R...>) {
  return std::array<Tile, sizeof...(R) + 1>{nullptr, tile<Dot, R + 1>...};
}
// Tiles for R rows: kIntTiles<Dot>[R].
template <class Dot>
constexpr auto kIntTiles = tile_table<Dot>(std::make_integer_sequence<int, Dot::kRows>());

// Multiply sums by the scales of their outputs, and then by the scale of their row.
inline Vec scaled(Ints sums, Vec of_outputs, Vec of_row) {
  return rounded_product(rounded_product(to_floats(sums), of_outputs), of_row);
}

template <class T, class Dot>
struct Chunk {
  const MatmulArgs &p;
  const RoundedRows<Dot::kRows, Dot::kOffset> &x;
  long first_row;
  const long ahead = fetched_ahead(x.rows, Dot::kRows);

  // Return a panel that is read from slice `slice` on.
  Panel begin_panel(long panel, long slice) const {
    const Panel at(p.weight, panel, p.inputs, p.slices);
    if (x.strips == 1 && slice == 0) at.fetch_head(ahead);
    return at;
  }

  // Compute sums [rows][kPanel] of one panel, over blocks `begin` to `end` of a slice. `first` [kPanel]: initial sums.
  void sum(const Panel &panel, long begin, long end, int32_t *sums, const int32_t *first) const {
    for (long block = begin; block < end; block++)
      for (long strip = 0; strip < x.strips; strip++)
        sum_strip(panel, block, strip, sums + x.begin(strip) * kPanel, block == begin ? first : nullptr);
  }

  // Add the contribution of one block to sums [rows of the strip][kPanel] of one strip.
  void sum_strip(const Panel &panel, long block, long strip, int32_t *sums, const int32_t *first) const {
    const long slice = x.slices.slice_of(block), in_slice = x.slices.in_slice(block) * kBlock;
    const uint8_t *w = panel.weights + (slice * padded(x.slices.length) + in_slice) * kPanel;
    const long steps = padded(x.slices.inputs_of(block)) / 4;
    const char *here = reinterpret_cast<const char *>(w);
    const Fetch next = Fetch::of_strip(here, steps * kStepBytes, kStepBytes, ahead, strip, x.strips);
    kIntTiles<Dot>[x.count(strip)](x.at(strip, block), w, steps, sums, first, next);
  }

  // Compute totals [rows][kPanel]: sums [rows][kPanel] of one slice times their scales.
  void scale(const Panel &at, long slice, const int32_t *sums, float *to) const {
    const Vec left = load(at.scales), right = load(at.scales + kLanes);
    for (long r = 0; r < x.rows; r++, to += kPanel) {
      const Vec scale = broadcast(x.scales[r * p.slices + slice]);
      store(to, scaled(load_ints(sums + r * kPanel), left, scale));
      store(to + kLanes, scaled(load_ints(sums + r * kPanel + kLanes), right, scale));
    }
  }

  // Compute the totals [rows][kPanel] of one panel and slice.
  void sum_slice(long panel, long slice, float *totals) const {
    alignas(64) int32_t sums[kMostRows * kPanel];
    const Panel at = begin_panel(panel, slice);
    const long begin = slice * x.slices.blocks;
    sum(at, begin, begin + x.slices.blocks, sums, at.first + slice * kPanel);
    scale(at, slice, sums, totals);
  }

  // Add the totals of one panel along slices `first` to `end` to `to`.
  void add_slices_to(long panel, long first, long end, const WeightedTotals &to) const {
    // Functions for R rows: kAddShortSlices[R - 1].
    static constexpr auto kAddShortSlices = short_slices_table(std::make_integer_sequence<int, Dot::kRows>());
    const Panel at = begin_panel(panel, first);
    if (x.slices.blocks == 1) {
      for (long strip = 0; strip < x.strips; strip++)
        (this->*kAddShortSlices[x.count(strip) - 1])(at, strip, first, end, to);
      return;
    }
    alignas(64) int32_t sums[Dot::kRows * kPanel];
    const Vec left = load(at.scales), right = load(at.scales + kLanes);
    for (long slice = first; slice < end; slice++) {
      const long begin = slice * x.slices.blocks;
      for (long strip = 0; strip < x.strips; strip++) {
        for (long block = begin; block < begin + x.slices.blocks; block++)
          sum_strip(at, block, strip, sums, block == begin ? at.first + slice * kPanel : nullptr);
        for (long i = 0, r = x.begin(strip); i < x.count(strip); i++, r++) {
          const Vec scale = broadcast(x.scales[r * p.slices + slice]);
          to.add(slice, r, scaled(load_ints(sums + i * kPanel), left, scale),
                 scaled(load_ints(sums + i * kPanel + kLanes), right, scale));
        }
      }
    }
  }

  // Do the same for the R rows of a strip and slices of one block. Sums stay in registers, because reading a short
  // slice takes less time than storing and loading its sums.
  template <int R>
  void add_short_slices_to(const Panel &at, long strip, long first, long end, const WeightedTotals &given) const {
    const WeightedTotals to = given;  // a local copy, so that its fields are not reloaded after each store
    const Vec left = load(at.scales), right = load(at.scales + kLanes);
    const long steps = padded(x.slices.length) / 4, bytes = (end - first) * steps * kStepBytes, row = x.begin(strip);
    const uint8_t *w = at.weights + first * steps * kStepBytes;
    const char *here = reinterpret_cast<const char *>(w);
    Fetch next = Fetch::of_strip(here, bytes, kStepBytes, ahead, strip, x.strips);
    const float *scales = x.scales + row * p.slices;
    for (long slice = first; slice < end; slice++) {
      const int32_t *from = at.first + slice * kPanel;
      Ints low[R], high[R];
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) low[r] = load_ints(from), high[r] = load_ints(from + kLanes);
      w = add_steps<Dot, R>(x.at(strip, slice), w, steps, low, high, next);
      next.from += steps * next.step;
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const Vec scale = broadcast(scales[r * p.slices + slice]);
        to.add(slice, row + r, scaled(low[r], left, scale), scaled(high[r], right, scale));
      }
    }
  }
  template <int... R>
  static constexpr auto short_slices_table(std::integer_sequence<int, R...>) {
    return std::array{&Chunk::add_short_slices_to<R + 1>...};
  }

  void finish_rows(long panel, const float *totals) const {
    for (long r = 0; r < x.rows; r++)
      finish<T>(p, first_row + r, panel, load(totals + r * kPanel), load(totals + r * kPanel + kLanes));
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

  // Split the work by blocks among threads, if there are fewer panels than threads.
  void by_blocks(long panels) const {
    static const int32_t zeros[kPanel] = {};
    const Arena::Mark mark = arena().mark();
    const long size = x.rows * kPanel;
    int32_t *sums = arena().take<int32_t>(panels * x.blocks * size);
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (long unit = 0; unit < panels * x.blocks; unit++) {
        const Panel at(p.weight, unit / x.blocks, p.inputs, p.slices);
        const long block = unit % x.blocks, slice = block / x.slices.blocks;
        sum(at, block, block + 1, sums + unit * size, block % x.slices.blocks ? zeros : at.first + slice * kPanel);
      }
      alignas(64) float totals[kPending * kMostRows * kPanel];
#pragma omp for schedule(static)
      for (long panel = 0; panel < panels; panel++) {
        const Panel at(p.weight, panel, p.inputs, p.slices);
        for (long slice = 0; slice < p.slices; slice++) {
          int32_t *total = sums + (panel * x.blocks + slice * x.slices.blocks) * size;
          for (long block = 1; block < x.slices.blocks; block++)
            for (long i = 0; i < size; i += kLanes)
              store_ints(total + i, add(load_ints(total + i), load_ints(total + block * size + i)));
          scale(at, slice, total, totals + pending_before(slice) * size);
          add_slice(totals, slice, size);
        }
        finish_rows(panel, totals);
      }
    }
    arena().release(mark);
  }
};

template <class T, class Dot>
struct Int8Rows final : PanelRows {
  using Rounded = RoundedRows<Dot::kRows, Dot::kOffset>;
  MatmulArgs p;
  Rounded x;

  Int8Rows(const MatmulArgs &args, const Rounded &of) : PanelRows(of.rows, of.strips), p(args), x(of) {
    x.packed = arena().take<uint8_t>(x.size());
    x.scales = arena().take<float>(x.rows * p.slices);
  }
  void pack(long strip, const void *from, long stride, const int32_t *row_of) override {
    x.pack_strip(strip, [&](long row) { return static_cast<const T *>(from) + row_of[row] * stride; });
  }
  void multiply(long panel, long slice, float *sums) const override {
    Chunk<T, Dot>{p, x, 0}.sum_slice(panel, slice, sums);
  }
  void multiply_add(long panel, long first, long end, const WeightedTotals &to) const override {
    Chunk<T, Dot>{p, x, 0}.add_slices_to(panel, first, end, to);
  }
};

template <class T, class Dot>
PanelRows *rows_by(const MatmulArgs &p) {
  using Rows = Int8Rows<T, Dot>;
  return new (arena().take<Rows>(1)) Rows(p, typename Rows::Rounded(p.rows, p.inputs, p.slices));
}

template <class T, class Dot>
void multiply_by(const MatmulArgs &p) {
  const long panels = (p.columns + kPanel - 1) / kPanel;
  for (long row = 0; row < p.rows; row += kMostRows) {
    RoundedRows<Dot::kRows, Dot::kOffset> x(std::min(kMostRows, p.rows - row), p.inputs, p.slices);
    const Arena::Mark mark = arena().mark();
    x.packed = arena().take<uint8_t>(x.size());
    x.scales = arena().take<float>(x.rows * p.slices);
    x.pack(static_cast<const T *>(p.x) + row * p.x_stride, p.x_stride);
    const Chunk<T, Dot> chunk{p, x, row};
    if (panels < omp_get_max_threads() && x.blocks > 1) chunk.by_blocks(panels);
    else chunk.by_panels(panels);
    arena().release(mark);
  }
}

// Pack weight [columns, inputs], rows `stride` apart, with scales [columns], into panels. The last panel and the last
// four inputs of each slice are padded with zeros.
void pack(const int8_t *weight, const float *scales, char *packed, long columns, long inputs, long stride, bool gated,
          int offset, long slices) {
  const long width = gated ? kLanes : kPanel, outputs = gated ? columns / 2 : columns;
  const long panels = (outputs + width - 1) / width, length = inputs / slices;
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < panels; panel++) {
    char *at = packed + panel * panel_bytes(inputs, slices);
    float *scale = reinterpret_cast<float *>(at);
    int32_t *first = reinterpret_cast<int32_t *>(scale + kPanel);
    int8_t *weights = reinterpret_cast<int8_t *>(first + slices * kPanel);
    for (int output = 0; output < kPanel; output++) {
      const long row = row_of(panel, output, columns, gated);
      const int8_t *from = row < 0 ? nullptr : weight + row * stride;
      scale[output] = row < 0 ? 0.0f : scales[row];
      for (long slice = 0; slice < slices; slice++) {
        int8_t *to = weights + slice * padded(length) * kPanel;
        int32_t total = 0;
        for (long k = 0; k < padded(length); k++) {
          const int8_t value = from && k < length ? from[slice * length + k] : 0;
          to[k / 4 * kStepBytes + output * 4 + k % 4] = value;
          total += value;
        }
        first[slice * kPanel + output] = -offset * total;
      }
    }
  }
}

template <class T>
void dequantise_rows(const void *packed, const int64_t *ids, T *rows, long count, long inputs) {
#pragma omp parallel for if (count >= 16)
  for (long i = 0; i < count; i++) {
    const Panel at(packed, ids[i] / kPanel, inputs, 1);
    const long output = ids[i] % kPanel;
    const int8_t *from = reinterpret_cast<const int8_t *>(at.weights) + output * 4;
    alignas(64) float values[kBlock];
    for (long begin = 0; begin < inputs; begin += kBlock) {
      const long n = std::min(kBlock, inputs - begin);
      for (long k = 0; k < n; k++) values[k] = from[(begin + k) / 4 * kStepBytes + k % 4] * at.scales[output];
      for (long k = 0; k < n; k += kLanes) store(rows + i * inputs + begin + k, load(values + k), n - k);
    }
  }
}

}  // namespace

template <class T>
void multiply_int8(const MatmulArgs &p, int kind) {
  if (kind == kInt8Dot) multiply_by<T, Dot>(p);
  else multiply_by<T, PlainDot>(p);
}

template <class T>
PanelRows *int8_panel_rows(const MatmulArgs &p, int kind) {
  return kind == kInt8Dot ? rows_by<T, Dot>(p) : rows_by<T, PlainDot>(p);
}

#define OARLOCK_MULTIPLY_INT8(T)                        \
  template void multiply_int8<T>(const MatmulArgs &, int); \
  template PanelRows *int8_panel_rows<T>(const MatmulArgs &, int);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MULTIPLY_INT8)

}  // namespace gemm

// Return the size in bytes of `packed`.
extern "C" long oarlock_int8_size(long columns, long inputs, int gated, long slices) {
  const long width = gated ? simd::kLanes : gemm::kPanel, outputs = gated ? columns / 2 : columns;
  return (outputs + width - 1) / width * gemm::panel_bytes(inputs, slices);
}

extern "C" void oarlock_int8_pack(const int8_t *weight, const float *scales, void *packed, long columns, long inputs,
                                  long stride, int gated, int kind, long slices) {
  const int offset = kind == gemm::kInt8Dot ? simd::Dot::kOffset : simd::PlainDot::kOffset;
  gemm::pack(weight, scales, static_cast<char *>(packed), columns, inputs, stride, gated != 0, offset,
             slices);
}

extern "C" void oarlock_int8_gemm(const void *x, const void *weight, const void *bias, const void *residual, void *y,
                                  long rows, long columns, long inputs, long x_stride, long y_stride, int epilogue,
                                  int type, int kind, long slices) {
  const gemm::MatmulArgs p{x, weight, bias, residual, y, rows, columns, inputs, x_stride, y_stride, epilogue, slices};
  with_type(type, [&](auto *of) { gemm::multiply_int8<std::remove_pointer_t<decltype(of)>>(p, kind); });
}

// Read rows `ids` of a packed weight (neither gated nor sliced), times their scales: [count, inputs].
extern "C" void oarlock_int8_rows(const void *packed, const int64_t *ids, void *rows, long count, long inputs, int type) {
  with_type(type, [&](auto *of) {
    gemm::dequantise_rows(packed, ids, static_cast<std::remove_pointer_t<decltype(of)> *>(rows), count, inputs);
  });
}
