// Rows of x rounded to integers from -127 to 127, each row with its own scale, for weights of few bits. Each slice of a
// row has its own scale, too (slices.h), so the result does not depend on which rank has which slices.
//
// The integers are stored kOffset higher, for instructions that take unsigned integers.
#pragma once
#include <algorithm>

#include "gemm/slices.h"
#include "gemm/strips.h"
#include "simd/element_types.h"
#include "simd/int8.h"

namespace gemm {

using namespace simd;

constexpr long kBlock = 1024;            // inputs per block: their weights for one panel fit in the first-level cache
// Bytes between rows of x. Without the extra cache line, rows would share few cache sets.
constexpr long kRowBytes = kBlock + 64;
constexpr long kSerialRows = 1 << 14;    // elements of x up to which one thread is faster than waking another
// If no magnitude is larger, the row is rounded to zeros, because its scale has no inverse.
constexpr float kSmallest = 1e-30f;

// Rows of x in strips: [strips][cells][rows of the strip][kRowBytes]. Each block has one cell. If slices are shorter
// than a block, several share a cell, so that data which is read again for each panel is close together.
template <int kStrip, int kOffset>
struct RoundedRows : Strips<kStrip> {
  using Strips<kStrip>::begin, Strips<kStrip>::count, Strips<kStrip>::rows, Strips<kStrip>::strips;
  uint8_t *packed;
  float *scales;  // [rows][slices]
  long inputs;
  Slices slices;
  long blocks, cells;  // blocks of all slices, and cells that store them
  int shift;            // a cell has 1 << shift blocks

  RoundedRows(long rows, long inputs, long slices = 1)
      : Strips<kStrip>(rows), inputs(inputs), slices(inputs, slices, kBlock),
        blocks(this->slices.all_blocks()), shift(0) {
    while (this->slices.blocks == 1 && padded(this->slices.length) << (shift + 1) <= kBlock) shift++;
    cells = (blocks + (1L << shift) - 1) >> shift;
  }
  static long padded(long inputs) { return (inputs + 63) / 64 * 64; }  // whole cache lines
  long size() const { return rows * cells * kRowBytes; }
  uint8_t *at(long strip, long block) const {
    uint8_t *cell = packed + (begin(strip) * cells + count(strip) * (block >> shift)) * kRowBytes;
    return cell + (block & ((1L << shift) - 1)) * padded(slices.length);
  }

  template <class T>
  void pack(const T *x, long stride) {
#pragma omp parallel for if (size() > kSerialRows)
    for (long strip = 0; strip < strips; strip++) pack_strip(strip, [&](long row) { return x + row * stride; });
  }

  // Pack the rows of a strip. `row_at(r)` returns the address of row r of x.
  template <class RowAt>
  void pack_strip(long strip, const RowAt &row_at) {
    for (long r = 0; r < count(strip); r++)
      for (long slice = 0; slice < slices.count; slice++)
        pack_row(row_at(begin(strip) + r) + slice * slices.length, strip, r, slice);
  }

  // Round and pack x [inputs of a slice].
  template <class T>
  void pack_row(const T *x, long strip, long r, long slice) {
    Vec most = zero(), broken = zero();  // broken: NaN if an element is NaN or infinite, else 0
    for (long k = 0; k < slices.length; k += kLanes) {
      const Vec value = load(x + k, slices.length - k);
      most = max(most, abs(value));
      broken = fma(value, zero(), broken);
    }
    const float size = largest(most);
    const Vec inverse = broadcast(size > kSmallest ? 127.0f / size : 0.0f);
    scales[(begin(strip) + r) * slices.count + slice] = size / 127.0f + sum(broken);
    for (long block = 0; block < slices.blocks; block++) {
      uint8_t *to = at(strip, slice * slices.blocks + block) + r * kRowBytes;
      const T *from = x + block * kBlock;
      const long count = slices.inputs_of(block);
      for (long k = 0; k < count; k += kLanes) store_bytes(to + k, load(from + k, count - k) * inverse, kOffset);
    }
  }
};

// Compute sums [R] = kAdd(sums, weights, inputs) with the next four inputs of each row, for two registers of outputs.
template <auto kAdd, int R, class Weight>
inline void add_four_inputs(const uint8_t *x, Weight left, Weight right, Ints (&low)[R], Ints (&high)[R]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    const Ints four = broadcast_four(x + r * kRowBytes);
    low[r] = kAdd(low[r], left, four);
    high[r] = kAdd(high[r], right, four);
  }
}

}  // namespace gemm
