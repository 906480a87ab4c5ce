// y = epilogue(x w^T + bias) with w = scale * (e4m3 values), a scale for each group of inputs of an output.
//
// Weights are widened to float32, which is exact, and x is not rounded. A piece is at most kMostAtOnce inputs of a
// group. Its products are added up input by input in float32, and the sum times the scale is added to the sum of the
// pieces before, in the order of inputs. Slices are added up in a tree (slices.h). This order depends only on the
// weight: the bits of a row do not depend on the other rows, on their number, or on the number of threads.
//
// A packed weight begins with its header (Float8Format), followed by panels of slices of pieces. A piece is [kPanel]
// scales in float32, and [inputs][kPanel] values.
#include "gemm/fp8.h"

#include <array>
#include <type_traits>
#include <utility>

#include "gemm/epilogue.h"
#include "gemm/panel_rows.h"
#include "gemm/shares.h"
#include "gemm/slices.h"
#include "runtime/arena.h"
#include "simd/float8.h"

namespace gemm {
namespace fp8 {

using namespace simd;

constexpr long kMostAtOnce = 128;  // inputs of a piece; also in workers/quantization/groups.py

// Header of 64 bytes, so that panels begin at a cache line.
struct Float8Format {
  int64_t columns, is_gated, slices, length;  // length: inputs of a slice
  int64_t group, unused[3];                   // inputs of a group; groups restart at each slice

  long pieces_of(long inputs) const { return (inputs + kMostAtOnce - 1) / kMostAtOnce; }
  long pieces() const {  // number of pieces of a slice
    return length / group * pieces_of(group) + pieces_of(length % group);
  }
  // The first input of a piece of a slice, and the end of the piece.
  long begin(long piece) const {
    const long each = pieces_of(group);
    return piece / each * group + piece % each * kMostAtOnce;
  }
  long end(long piece) const {
    const long first = begin(piece), next_group = (first / group + 1) * group;
    return std::min({first + kMostAtOnce, next_group, static_cast<long>(length)});
  }
  long piece_at(long piece) const { return piece * kPanel * sizeof(float) + begin(piece) * kPanel; }  // offset in bytes
  long slice_bytes() const { return kPanel * (pieces() * sizeof(float) + length); }
  long panel_bytes() const { return slices * slice_bytes(); }
  long panels() const {
    const long width = is_gated ? kLanes : kPanel, outputs = is_gated ? columns / 2 : columns;
    return (outputs + width - 1) / width;
  }
  long bytes() const { return sizeof(Float8Format) + panels() * panel_bytes(); }
  const char *slice(long panel, long index) const {
    return reinterpret_cast<const char *>(this) + sizeof(Float8Format) + panel * panel_bytes() + index * slice_bytes();
  }
};
static_assert(sizeof(Float8Format) == 64);

namespace {

constexpr long kFetchAhead = 4096;         // bytes of weights prefetched ahead while one strip of rows reads them
constexpr long kSerialRows = 1 << 14;      // elements of x up to which one thread is faster than waking another
constexpr long kPieceStride = kMostAtOnce + 16;  // elements between rows of x: one cache line more than a piece

// Rows of x in float32, in strips: [strips][pieces of all slices][rows of the strip][kPieceStride].
struct FloatRows : Strips<kTileRows> {
  const Float8Format &format;
  float *packed;
  long pieces;

  FloatRows(const Float8Format &format, long rows)
      : Strips(rows), format(format), pieces(format.slices * format.pieces()) {}
  long size() const { return rows * pieces * kPieceStride; }
  float *at(long strip, long piece) const {
    return packed + (begin(strip) * pieces + count(strip) * piece) * kPieceStride;
  }

  template <class T>
  void pack(const T *x, long stride) {
#pragma omp parallel for if (size() > kSerialRows)
    for (long strip = 0; strip < strips; strip++) pack_strip(strip, [&](long row) { return x + row * stride; });
  }

  // Pack the rows of a strip. `row_at(r)` returns the address of row r of x.
  template <class RowAt>
  void pack_strip(long strip, const RowAt &row_at) {
    for (long slice = 0; slice < format.slices; slice++)
      for (long piece = 0; piece < format.pieces(); piece++)
        for (long r = 0; r < count(strip); r++) {
          const long first = format.begin(piece), length = format.end(piece) - first;
          const auto *from = row_at(begin(strip) + r) + slice * format.length + first;
          float *to = at(strip, slice * format.pieces() + piece) + r * kPieceStride;
          for (long k = 0; k < length; k += kLanes) store(to + k, load(from + k, length - k));
        }
  }
};

// Load the widened values of one piece, or widen the packed values.
inline Vec weights(const float *from) { return load(from); }
inline Vec weights(const Float8 *from) { return load_scaled(from); }

// Compute scale * (x w) over `count` inputs of one piece. Add it to sums [R][kPanel], or store it if the piece is the
// first of its slice.
template <class W, int R>
void multiply_piece(const float *x, const void *numbers, const float *scales, long count, bool is_first, float *sums,
                    const char *fetch) {
  const W *w = static_cast<const W *>(numbers);
  Vec low[R], high[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) low[r] = high[r] = zero();
  for (long k = 0; k < count; k++, w += kPanel, fetch += kPanel) {
    if (k % (64 / kPanel) == 0) prefetch(fetch);
    const Vec left = weights(w), right = weights(w + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Vec value = broadcast(x[r * kPieceStride + k]);
      low[r] = fma(left, value, low[r]);
      high[r] = fma(right, value, high[r]);
    }
  }
  const Vec wide = broadcast(kFloat8Scale);
  const Vec left = load(scales) * wide, right = load(scales + kLanes) * wide;
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    float *to = sums + r * kPanel;
    store(to, fma(low[r], left, is_first ? zero() : load(to)));
    store(to + kLanes, fma(high[r], right, is_first ? zero() : load(to + kLanes)));
  }
}

using Multiply = void (*)(const float *x, const void *numbers, const float *scales, long count, bool is_first,
                          float *sums, const char *fetch);

template <class W, int... R>
constexpr auto table(std::integer_sequence<int, R...>) {
  return std::array<Multiply, sizeof...(R) + 1>{nullptr, multiply_piece<W, R + 1>...};
}
// Functions for R rows: kMultiply<W>[R].
template <class W>
constexpr auto kMultiply = table<W>(std::make_integer_sequence<int, kTileRows>());

// Compute sums [rows][kPanel] of one panel and slice.
void sum(const FloatRows &x, long panel, long slice, float *sums) {
  const Float8Format &format = x.format;
  alignas(64) float wide[kMostAtOnce * kPanel];
  for (long piece = 0; piece < format.pieces(); piece++) {
    const char *at = format.slice(panel, slice) + format.piece_at(piece);
    const float *scales = reinterpret_cast<const float *>(at);
    const Float8 *numbers = reinterpret_cast<const Float8 *>(scales + kPanel);
    const long count = format.end(piece) - format.begin(piece), of_x = slice * format.pieces() + piece;
    if (x.strips == 1) {
      kMultiply<Float8>[x.rows](x.at(0, of_x), numbers, scales, count, piece == 0, sums, at + kFetchAhead);
      continue;
    }
    // Widening costs as much as a few rows. For several strips, it is done once.
    for (long i = 0; i < count * kPanel; i += kLanes) store(wide + i, load_scaled(numbers + i));
    for (long strip = 0; strip < x.strips; strip++)
      kMultiply<float>[x.count(strip)](x.at(strip, of_x), wide, scales, count, piece == 0, sums + x.begin(strip) * kPanel,
                                       at + kFetchAhead);
  }
}

// Compute a matmul, split by panels among threads.
template <class T>
void multiply(const MatmulArgs &p) {
  const Float8Format &format = *static_cast<const Float8Format *>(p.weight);
  for (long first = 0; first < p.rows; first += kMostRows) {
    const Arena::Mark mark = arena().mark();
    FloatRows x(format, std::min(kMostRows, p.rows - first));
    x.packed = arena().take<float>(x.size());
    x.pack(static_cast<const T *>(p.x) + first * p.x_stride, p.x_stride);
    const Shares shares(format.panels());
#pragma omp parallel
    {
      alignas(64) float sums[kPending * kMostRows * kPanel];
      const long size = x.rows * kPanel;
      shares.visit([&](long panel) {
        for (long slice = 0; slice < format.slices; slice++) {
          sum(x, panel, slice, sums + pending_before(slice) * size);
          add_slice(sums, slice, size);
        }
        for (long r = 0; r < x.rows; r++)
          finish<T>(p, first + r, panel, load(sums + r * kPanel), load(sums + r * kPanel + kLanes));
      });
    }
    arena().release(mark);
  }
}

// Pack `values` [columns, inputs] into panels, with scales [columns, scales_per_row], one scale for each `stored_group`
// inputs.
void pack(const Float8Format &format, const Float8 *values, const float *scales, long stride, long scales_per_row,
          long stored_group) {
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < format.panels(); panel++)
    for (long slice = 0; slice < format.slices; slice++)
      for (long piece = 0; piece < format.pieces(); piece++) {
        float *to = reinterpret_cast<float *>(const_cast<char *>(format.slice(panel, slice)) + format.piece_at(piece));
        Float8 *numbers = reinterpret_cast<Float8 *>(to + kPanel);
        for (int output = 0; output < kPanel; output++) {
          const long row = row_of(panel, output, format.columns, format.is_gated), at = slice * format.length;
          to[output] = row < 0 ? 0.0f : scales[row * scales_per_row + (at + format.begin(piece)) / stored_group];
          for (long k = format.begin(piece); k < format.end(piece); k++)
            numbers[(k - format.begin(piece)) * kPanel + output] = row < 0 ? Float8{} : values[row * stride + at + k];
        }
      }
}

// Read output `id` of a packed weight (not gated), times its scales, to row [inputs].
template <class T>
void read_row(const Float8Format &format, long id, T *row) {
  for (long slice = 0; slice < format.slices; slice++)
    for (long piece = 0; piece < format.pieces(); piece++) {
      const float *scales = reinterpret_cast<const float *>(format.slice(id / kPanel, slice) + format.piece_at(piece));
      const Float8 *numbers = reinterpret_cast<const Float8 *>(scales + kPanel) + id % kPanel;
      const long begin = format.begin(piece), count = format.end(piece) - begin;
      alignas(64) float values[kMostAtOnce];
      for (long k = 0; k < count; k++) values[k] = to_float(numbers[k * kPanel]) * scales[id % kPanel];
      T *to = row + slice * format.length + begin;
      for (long k = 0; k < count; k += kLanes) store(to + k, load(values + k), count - k);
    }
}

template <class T>
struct Float8Rows final : PanelRows {
  FloatRows x;

  explicit Float8Rows(const FloatRows &of) : PanelRows(of.rows, of.strips), x(of) {
    x.packed = arena().take<float>(x.size());
  }
  void pack(long strip, const void *from, long stride, const int32_t *row_of) override {
    x.pack_strip(strip, [&](long row) { return static_cast<const T *>(from) + row_of[row] * stride; });
  }
  void multiply(long panel, long slice, float *sums) const override { sum(x, panel, slice, sums); }
};

}  // namespace
}  // namespace fp8

template <class T>
PanelRows *fp8_panel_rows(const MatmulArgs &p) {
  const auto &format = *static_cast<const fp8::Float8Format *>(p.weight);
  return new (arena().take<fp8::Float8Rows<T>>(1)) fp8::Float8Rows<T>(fp8::FloatRows(format, p.rows));
}

template <class T>
void multiply_fp8(const MatmulArgs &p) {
  fp8::multiply<T>(p);
}

#define OARLOCK_MULTIPLY_FP8(T)                   \
  template void multiply_fp8<T>(const MatmulArgs &); \
  template PanelRows *fp8_panel_rows<T>(const MatmulArgs &);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MULTIPLY_FP8)

}  // namespace gemm

// Return the size in bytes of `packed`. `group`: inputs of a group within a slice, whose length is `inputs / slices`.
extern "C" long oarlock_fp8_size(long columns, long inputs, int gated, long slices, long group) {
  return gemm::fp8::Float8Format{columns, gated, slices, inputs / slices, group}.bytes();
}

// Pack a weight. `packed` begins at a cache line.
extern "C" void oarlock_fp8_pack(const simd::Float8 *values, const float *scales, void *packed, long columns, long inputs,
                                 long stride, int gated, long slices, long group, long scales_per_row, long stored_group) {
  const gemm::fp8::Float8Format format{columns, gated, slices, inputs / slices, group};
  memcpy(packed, &format, sizeof format);
  gemm::fp8::pack(*static_cast<gemm::fp8::Float8Format *>(packed), values, scales, stride, scales_per_row,
                  stored_group);
}

extern "C" void oarlock_fp8_gemm(const void *x, const void *weight, const void *bias, const void *residual, void *y,
                                 long rows, long columns, long inputs, long x_stride, long y_stride, int epilogue, int type,
                                 long slices) {
  const gemm::MatmulArgs p{x, weight, bias, residual, y, rows, columns, inputs, x_stride, y_stride, epilogue, slices};
  with_type(type, [&](auto *of) { gemm::multiply_fp8<std::remove_pointer_t<decltype(of)>>(p); });
}

// Read rows `ids` of a packed weight (not gated), times their scales: [count, inputs].
extern "C" void oarlock_fp8_rows(const void *packed, const int64_t *ids, void *rows, long count, long inputs, int type) {
  const auto &format = *static_cast<const gemm::fp8::Float8Format *>(packed);
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
#pragma omp parallel for if (count >= 16)
    for (long i = 0; i < count; i++) gemm::fp8::read_row(format, ids[i], static_cast<T *>(rows) + i * inputs);
  });
}
