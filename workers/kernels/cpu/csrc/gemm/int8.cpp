// y = epilogue(x w^T + bias) with w = scale * (whole numbers from -127 to 127), a scale for each output.
//
// Each row of x is rounded to such numbers as well, with a scale of its own, and the products of whole numbers are added
// up exactly. So no order of additions matters: the bits of a row do not depend on the other rows, on threads or on the
// level of instruction set. An element of the result is (sum * scale of the output) * scale of the row, both products
// rounded to float32, and then what the epilogue adds.
//
// A packed weight is a row of panels, each: [kPanel] scales, [kPanel] first summands, [inputs / 4][kPanel][4] weights. The
// first summands undo what is added to x where the instruction takes unsigned numbers.
#include "gemm/int8.h"

#include <omp.h>

#include <array>
#include <type_traits>
#include <utility>

#include "gemm/epilogue.h"
#include "gemm/rounded_rows.h"
#include "gemm/shares.h"
#include "runtime/arena.h"
#include "simd/int8.h"

namespace gemm {
namespace {

constexpr long kChunk = 240;           // rows whose sums of one panel stay in the caches
constexpr long kFetchAhead = 2048;     // bytes of weights fetched ahead while they are read
constexpr long kStepBytes = 4 * kPanel;

long padded(long inputs) { return (inputs + 3) / 4 * 4; }
long panel_bytes(long inputs) { return kPanel * (sizeof(float) + sizeof(int32_t) + padded(inputs)); }

struct Panel {
  const float *scales;   // [kPanel]
  const int32_t *first;  // [kPanel]
  const uint8_t *weights;

  Panel(const void *packed, long panel, long inputs) {
    const char *at = static_cast<const char *>(packed) + panel * panel_bytes(inputs);
    scales = reinterpret_cast<const float *>(at);
    first = reinterpret_cast<const int32_t *>(at + kPanel * sizeof(float));
    weights = reinterpret_cast<const uint8_t *>(first + kPanel);
  }
};

// sums [R][kPanel] += x w over 4 * steps inputs; with `first` [kPanel] they begin there.
template <class Dot, int R>
void tile(const uint8_t *x, const uint8_t *w, long steps, int32_t *sums, const int32_t *first, Fetch fetch) {
  Ints low[R], high[R];
  for (int r = 0; r < R; r++) {
    const int32_t *from = first ? first : sums + r * kPanel;
    low[r] = load_ints(from);
    high[r] = load_ints(from + kLanes);
  }
  for (long s = 0; s < steps; s++, x += 4, w += kStepBytes, fetch.from += fetch.step) {
    for (int at = 0; at < kStepBytes; at += 64) prefetch(fetch.from + at);
    const typename Dot::Weight left = Dot::prepare(load_ints(w)), right = Dot::prepare(load_ints(w + 4 * kLanes));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Ints four = broadcast_four(x + r * kRowBytes);
      low[r] = Dot::add(low[r], left, four);
      high[r] = Dot::add(high[r], right, four);
    }
  }
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
// Of R rows: kIntTiles<Dot>[R].
template <class Dot>
constexpr auto kIntTiles = tile_table<Dot>(std::make_integer_sequence<int, Dot::kRows>());

template <class T, class Dot>
struct Chunk {
  const Product &p;
  const RoundedRows<Dot::kRows, Dot::kOffset> &x;
  long first_row;

  // sums [rows][kPanel] of one panel, over blocks `begin` to `end`; `first` [kPanel] is where they begin.
  void sum(const Panel &panel, long begin, long end, int32_t *sums, const int32_t *first) const {
    for (long block = begin; block < end; block++) {
      const uint8_t *w = panel.weights + block * kBlock * kPanel;
      const long steps = padded(std::min(kBlock, p.inputs - block * kBlock)) / 4;
      const char *here = reinterpret_cast<const char *>(w);
      for (long strip = 0; strip < x.strips; strip++) {
        // While the strips compute, each of them fetches its share of the next block.
        const bool alone = x.strips == 1;
        const Fetch next{alone ? here + kFetchAhead : here + steps * kStepBytes * (x.strips + strip) / x.strips,
                         kStepBytes / x.strips};
        kIntTiles<Dot>[x.count(strip)](x.at(strip, block), w, steps, sums + x.begin(strip) * kPanel,
                                       block == begin ? first : nullptr, next);
      }
    }
  }

  void finish_rows(const Panel &at, long panel, const int32_t *sums) const {
    const Vec left = load(at.scales), right = load(at.scales + kLanes);
    for (long r = 0; r < x.rows; r++) {
      const Vec scale = broadcast(x.scales[r]);
      const Vec low = rounded_product(to_floats(load_ints(sums + r * kPanel)), left);
      const Vec high = rounded_product(to_floats(load_ints(sums + r * kPanel + kLanes)), right);
      finish<T>(p, first_row + r, panel, rounded_product(low, scale), rounded_product(high, scale));
    }
  }

  // Threads take panels.
  void by_panels(long panels) const {
    const Arena::Mark mark = arena().mark();
    const Shares shares(panels);
#pragma omp parallel
    {
      alignas(64) int32_t sums[kChunk * kPanel];
      shares.visit([&](long panel) {
        const Panel at(p.weight, panel, p.inputs);
        sum(at, 0, x.blocks, sums, at.first);
        finish_rows(at, panel, sums);
      });
    }
    arena().release(mark);
  }

  // With fewer panels than threads, threads take blocks.
  void by_blocks(long panels) const {
    static const int32_t zeros[kPanel] = {};
    const Arena::Mark mark = arena().mark();
    const long size = x.rows * kPanel;
    int32_t *sums = arena().take<int32_t>(panels * x.blocks * size);
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (long unit = 0; unit < panels * x.blocks; unit++) {
        const Panel at(p.weight, unit / x.blocks, p.inputs);
        const long block = unit % x.blocks;
        sum(at, block, block + 1, sums + unit * size, block == 0 ? at.first : zeros);
      }
#pragma omp for schedule(static)
      for (long panel = 0; panel < panels; panel++) {
        int32_t *total = sums + panel * x.blocks * size;
        for (long block = 1; block < x.blocks; block++)
          for (long i = 0; i < size; i += kLanes)
            store_ints(total + i, add(load_ints(total + i), load_ints(total + block * size + i)));
        finish_rows(Panel(p.weight, panel, p.inputs), panel, total);
      }
    }
    arena().release(mark);
  }
};

template <class T, class Dot>
void multiply_by(const Product &p) {
  const long panels = (p.columns + kPanel - 1) / kPanel;
  for (long row = 0; row < p.rows; row += kChunk) {
    RoundedRows<Dot::kRows, Dot::kOffset> x(std::min(kChunk, p.rows - row), p.inputs);
    const Arena::Mark mark = arena().mark();
    x.packed = arena().take<uint8_t>(x.size());
    x.scales = arena().take<float>(x.rows);
    x.pack(static_cast<const T *>(p.x) + row * p.x_stride, p.x_stride);
    const Chunk<T, Dot> chunk{p, x, row};
    if (panels < omp_get_max_threads() && x.blocks > 1) chunk.by_blocks(panels);
    else chunk.by_panels(panels);
    arena().release(mark);
  }
}

// The panels of weight [columns, inputs], rows `stride` apart, with scales [columns]. The last panel and the last four
// inputs are filled with zeros.
void pack(const int8_t *weight, const float *scales, char *packed, long columns, long inputs, long stride, bool gated,
          int offset) {
  const long width = gated ? kLanes : kPanel, outputs = gated ? columns / 2 : columns;
  const long panels = (outputs + width - 1) / width;
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < panels; panel++) {
    char *at = packed + panel * panel_bytes(inputs);
    float *scale = reinterpret_cast<float *>(at);
    int32_t *first = reinterpret_cast<int32_t *>(scale + kPanel);
    int8_t *to = reinterpret_cast<int8_t *>(first + kPanel);
    for (int output = 0; output < kPanel; output++) {
      const long row = row_of(panel, output, columns, gated);
      const int8_t *from = row < 0 ? nullptr : weight + row * stride;
      scale[output] = row < 0 ? 0.0f : scales[row];
      int32_t total = 0;
      for (long k = 0; k < padded(inputs); k++) {
        const int8_t value = from && k < inputs ? from[k] : 0;
        to[k / 4 * kStepBytes + output * 4 + k % 4] = value;
        total += value;
      }
      first[output] = -offset * total;
    }
  }
}

template <class T>
void dequantise_rows(const void *packed, const int64_t *ids, T *rows, long count, long inputs) {
#pragma omp parallel for if (count >= 16)
  for (long i = 0; i < count; i++) {
    const Panel at(packed, ids[i] / kPanel, inputs);
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
void multiply_int8(const Product &p, int kind) {
  if (kind == kInt8Dot) multiply_by<T, Dot>(p);
  else multiply_by<T, PlainDot>(p);
}

#define OARLOCK_MULTIPLY_INT8(T) template void multiply_int8<T>(const Product &, int);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MULTIPLY_INT8)

}  // namespace gemm

// `packed` holds so many bytes.
extern "C" long oarlock_int8_size(long columns, long inputs, int gated) {
  const long width = gated ? simd::kLanes : gemm::kPanel, outputs = gated ? columns / 2 : columns;
  return (outputs + width - 1) / width * gemm::panel_bytes(inputs);
}

extern "C" void oarlock_int8_pack(const int8_t *weight, const float *scales, void *packed, long columns, long inputs,
                                  long stride, int gated, int kind) {
  const int offset = kind == gemm::kInt8Dot ? simd::Dot::kOffset : simd::PlainDot::kOffset;
  gemm::pack(weight, scales, static_cast<char *>(packed), columns, inputs, stride, gated != 0, offset);
}

extern "C" void oarlock_int8_gemm(const void *x, const void *weight, const void *bias, const void *residual, void *y,
                                  long rows, long columns, long inputs, long x_stride, long y_stride, int epilogue,
                                  int type, int kind) {
  const gemm::Product p{x, weight, bias, residual, y, rows, columns, inputs, x_stride, y_stride, epilogue};
  with_type(type, [&](auto *of) { gemm::multiply_int8<std::remove_pointer_t<decltype(of)>>(p, kind); });
}

// Rows `ids` of a weight that was packed (not gated), times their scales: [count, inputs].
extern "C" void oarlock_int8_rows(const void *packed, const int64_t *ids, void *rows, long count, long inputs, int type) {
  with_type(type, [&](auto *of) {
    gemm::dequantise_rows(packed, ids, static_cast<std::remove_pointer_t<decltype(of)> *>(rows), count, inputs);
  });
}
