// The two small matmuls of adapters: `low` = A x, and updates = scale B low.
//
// `low` is summed in float, slice by slice of the inputs, and the slices are added in the tree of slices.h. Each value
// of `low` is computed by one thread, input by input, and each value of an update rank by rank. So the bits of a row
// depend neither on other rows nor on the number of threads. Rows of one slot are multiplied together, because they
// share the loads of A and of B.
#pragma once
#include <algorithm>

#include "gemm/adapter_pairs.h"
#include "gemm/shares.h"
#include "gemm/slices.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "simd/element_types.h"

namespace adapters {

using namespace simd;

constexpr long kRowsOfA = 4;               // rows of A that are multiplied together
constexpr long kRowsOfX = kRegisters / 8;  // rows of x; the sums of all pairs of rows fill half of the registers
constexpr long kExpanded = 4;              // rows that B is multiplied by together
constexpr long kAhead = 16384;             // elements of A that are prefetched ahead
constexpr long kWorthWidening = 8;         // rows of x from which A is widened once instead of for each few rows

// Entries `first` to `last` of `AdapterRows::rows`: rows with the adapter in a slot, counted from 0.
struct SlotRows {
  long slot, first, last;
};

// Find the entries of rows `begin` to `end` whose slots adapt the layer. Return the number of spans.
inline long find_spans(const AdapterRows &all, const AdapterPairs &pairs, long begin, long end, SlotRows *found) {
  long count = 0;
  for (long span = 0; span < all.spans; span++) {
    const long slot = all.slots[span] - 1;
    if (!pairs.ranks[slot]) continue;
    const int64_t *stop = all.rows + all.starts[span + 1];
    const int64_t *first = std::lower_bound(all.rows + all.starts[span], stop, begin);
    const int64_t *last = std::lower_bound(first, stop, end);
    if (first < last) found[count++] = {slot, first - all.rows, last - all.rows};
  }
  return count;
}

// Add the products of one register of inputs, of R rows of x with rows of A.
template <int R>
inline void add_products(const Vec (&x)[R], const Vec (&a)[kRowsOfA], Vec (&sums)[R][kRowsOfA]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kRowsOfA; i++) sums[r][i] = fma(x[r], a[i], sums[r][i]);
}

// Rows of A that are multiplied together, as they are stored: blocks of inputs, of `stored` rows each. Rows beyond
// `used` are the last one again.
template <class A>
struct RowsOfA {
  const A *at[kRowsOfA];
  long stored, block;

  RowsOfA(const A *first, long stored, long used, long block) : stored(stored), block(block) {
    for (long i = 0; i < kRowsOfA; i++) at[i] = first + std::min(i, used - 1) * block;
  }
};

// Add the products of a register of inputs: number `k` of x, and number `at` of the memory of A.
template <int R, class T, class A>
inline void add_register(const T *const (&x)[R], const RowsOfA<A> &a, long k, long at, Vec (&sums)[R][kRowsOfA]) {
  Vec of_x[R], of_a[kRowsOfA];
#pragma GCC unroll 4
  for (int i = 0; i < kRowsOfA; i++) of_a[i] = load(a.at[i] + at);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) of_x[r] = load(x[r] + k);
  add_products<R>(of_x, of_a, sums);
}

// Write the products of one slice of R rows of x with rows of A to `low`. Registers of inputs are added to two sums by
// turns.
template <int R, class T, class A>
inline void multiply_slice(const T *const (&x)[R], const RowsOfA<A> &a, long from, long length,
                           float (&low)[R][kRowsOfA]) {
  Vec even[R][kRowsOfA], odd[R][kRowsOfA];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kRowsOfA; i++) even[r][i] = odd[r][i] = zero();
  constexpr long kBoth = 2 * kLanes;
  const long pairs = a.block / kBoth * kBoth, first = from * a.stored, step = a.block * a.stored;
  if constexpr (R < kRowsOfX) {
    for (long k = from, at = first; k < from + length; k += a.block, at += step)
      for (long d = 0; d < pairs; d += kBoth) {
        add_register<R>(x, a, k + d, at + d, even);
        add_register<R>(x, a, k + d + kLanes, at + d + kLanes, odd);
      }
  } else {  // there are registers for one of the two sums
    for (long k = from, at = first; k < from + length; k += a.block, at += step)
      for (long d = 0; d < pairs; d += kBoth) {
        for (long line = 0; line < kBoth; line += 64 / sizeof(A))
          for (int i = 0; i < kRowsOfA; i++) prefetch_second(a.at[i] + at + d + line + kAhead);
        add_register<R>(x, a, k + d, at + d, even);
      }
    for (long k = from, at = first; k < from + length; k += a.block, at += step)
      for (long d = 0; d < pairs; d += kBoth) add_register<R>(x, a, k + d + kLanes, at + d + kLanes, odd);
  }
  for (long d = pairs; d < a.block; d += kLanes) {  // only if the slice is one block
    Vec of_x[R], of_a[kRowsOfA];
    for (int i = 0; i < kRowsOfA; i++) of_a[i] = load(a.at[i] + first + d, a.block - d);
    for (int r = 0; r < R; r++) of_x[r] = load(x[r] + from + d, a.block - d);
    add_products<R>(of_x, of_a, even);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kRowsOfA; i++) low[r][i] = sum(even[r][i] + odd[r][i]);
}

// Distances in `low`: between two rows, and between two slices of the inputs. 0: the slices are added up.
struct LowStrides {
  long row, slice;
};

// Copy `count` values, at most kRowsOfA. A copy of a constant size is a single instruction.
inline void copy_values(const float (&from)[kRowsOfA], long count, float *to) {
  if (count == kRowsOfA) std::copy_n(from, kRowsOfA, to);
  else for (long i = 0; i < count; i++) to[i] = from[i];
}

// Write the products of R rows of x with `count` rows of A, at most kRowsOfA, to `low`.
template <int R, class T, class A>
void multiply_rows(const T *const (&x)[R], const RowsOfA<A> &a, long count, const AdapterPairs &pairs, float *low,
                   LowStrides strides) {
  float pending[gemm::kPending][R][kRowsOfA];
  const long length = pairs.inputs / pairs.slices;
  for (long slice = 0; slice < pairs.slices; slice++) {
    long here = strides.slice ? 0 : gemm::pending_before(slice);
    multiply_slice<R>(x, a, slice * length, length, pending[here]);
    if (strides.slice) {
      for (int r = 0; r < R; r++) copy_values(pending[0][r], count, low + slice * strides.slice + r * strides.row);
      continue;
    }
    for (long left = slice; left & 1; left >>= 1, here--)
      for (int r = 0; r < R; r++)
        for (int i = 0; i < kRowsOfA; i++) pending[here - 1][r][i] += pending[here][r][i];
  }
  if (!strides.slice)
    for (int r = 0; r < R; r++) copy_values(pending[0][r], count, low + r * strides.row);
}

// The work of one thread at a time: the rows of one slot times a few rows of A. Row is an integer type.
template <class T, class Row>
struct ShrinkUnit {
  const AdapterPairs &pairs;
  const Row *rows;  // numbers of `count` rows of the step
  const T *x;       // row `first_row` of the step, rows `x_stride` elements apart
  long x_stride, first_row, count;
  float *low;       // of the first row, and the first rank of the part
  LowStrides strides;

  template <int R, class A>
  void multiply_some(long row, const RowsOfA<A> &a, long used, float *to) const {
    const T *of_x[R];
    for (int r = 0; r < R; r++) of_x[r] = x + (rows[row + r] - first_row) * x_stride;
    multiply_rows<R>(of_x, a, used, pairs, to + row * strides.row, strides);
  }

  template <class A>
  void multiply(const A *first, long stored, long used, float *to) const {
    const RowsOfA<A> a(first, stored, used, pairs.block);
    long row = 0;
    for (; row + kRowsOfX <= count; row += kRowsOfX) multiply_some<kRowsOfX>(row, a, used, to);
    if constexpr (kRowsOfX > 2)
      if (row + 2 <= count) multiply_some<2>(row, a, used, to), row += 2;
    if (row < count) multiply_some<1>(row, a, used, to);
  }

  // Multiply the rows by kRowsOfA rows of A from `begin` on, of part `part` of `slot`. Values beyond the rank are zero.
  void run(long slot, long part, long begin) const {
    const long held = std::min(kRowsOfA, pairs.max_rank - begin);
    const long used = std::min(held, std::max<long>(0, pairs.ranks[slot] - begin));
    float *to = low + begin;
    if (used < held)
      for (long slice = 0; slice < (strides.slice ? pairs.slices : 1); slice++)
        for (long i = 0; i < count; i++)
          std::fill_n(to + slice * strides.slice + i * strides.row + used, held - used, 0.0f);
    if (!used) return;
    const T *a =
        static_cast<const T *>(pairs.a) + ((slot * pairs.parts + part) * pairs.max_rank + begin) * pairs.inputs;
    if (sizeof(T) == sizeof(float) || count < kWorthWidening) {
      multiply(a, held, used, to);
      return;
    }
    const Arena::Mark mark = arena().mark();
    const long size = held * pairs.inputs;
    float *wide = arena().take<float>(size);
    for (long k = 0; k < size; k += kLanes) store(wide + k, load(a + k, size - k), size - k);
    multiply(wide, held, used, to);
    arena().release(mark);
  }
};

// Return the number of groups of rows of A that are multiplied together.
inline long groups_of_a(const AdapterPairs &pairs) { return (pairs.max_rank + kRowsOfA - 1) / kRowsOfA; }

// Compute A x of the rows in `spans`. x [rows, inputs], from row `first_row` of the step on. low [entries, parts,
// max_rank]: values beyond the rank of a pair are zero.
template <class T>
void shrink(const AdapterPairs &pairs, const AdapterRows &all, const SlotRows *spans, long count, const T *x,
            long first_row, float *low) {
  const long groups = groups_of_a(pairs), values = pairs.parts * pairs.max_rank;
  const Arena::Mark before = arena().mark();
  const Shares units(count * pairs.parts * groups);
  long rows = 0;
  for (long i = 0; i < count; i++) rows += spans[i].last - spans[i].first;
  const auto run = [&](long unit) {
    const SlotRows &span = spans[unit / (pairs.parts * groups)];
    const long part = unit / groups % pairs.parts;
    float *to = low + span.first * values + part * pairs.max_rank;
    const ShrinkUnit<T, int64_t> of{pairs, all.rows + span.first, x, pairs.inputs, first_row, span.last - span.first,
                                    to, {values, 0}};
    of.run(span.slot, part, unit % groups * kRowsOfA);
  };
#pragma omp parallel if (rows * values * pairs.inputs > kSerial)
  units.visit(run);
  arena().release(before);
}

// Return `low` [entries, parts, max_rank] of the entries in `spans`, times the scales of their slots. The caller
// releases the memory.
inline const float *scaled(const AdapterPairs &pairs, const AdapterRows &all, const SlotRows *spans, long count,
                           const float *low) {
  const long values = pairs.parts * pairs.max_rank;
  float *found = arena().take<float>(all.starts[all.spans] * values);
  for (long i = 0; i < count; i++)
    for (long at = spans[i].first * pairs.parts; at < spans[i].last * pairs.parts; at++) {
      const float scale = pairs.scales[spans[i].slot * pairs.parts + at % pairs.parts];
      for (long j = 0; j < pairs.max_rank; j++)
        found[at * pairs.max_rank + j] = low[at * pairs.max_rank + j] * scale;
    }
  return found;
}

// Return the panel of B of a slot that has `output`.
template <class T>
inline const T *panel_of(const AdapterPairs &pairs, long slot, long output) {
  const long before = output / pairs.panel * pairs.panel;
  return static_cast<const T *>(pairs.b) + (slot * pairs.outputs + before) * pairs.max_rank;
}

// Columns of one panel of B [rank, width], rows `stride` apart, and the memory that is read next.
template <class T>
struct ColumnsOfB {
  const T *at, *next;
  long rank, stride, width;
};

// Write the products of V registers of B's columns, from `at` on, with R rows of values. A register that is not whole
// has `left` columns. Each value is summed rank by rank, whatever R and V are.
template <int R, long V, class T>
inline void expand_registers(const ColumnsOfB<T> &b, long at, const float *low, long low_stride, float *update,
                             long stride, long left) {
  Vec sums[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) sums[r][i] = zero();
  const T *from = b.at + at, *next = b.next + at;
  for (long j = 0; j < b.rank; j++, from += b.stride, next += b.stride) {
    Vec of_b[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) of_b[i] = V == 1 ? load(from, left) : load(from + i * kLanes);
    if constexpr (V > 1)
      for (long line = 0; line < V * kLanes; line += 64 / sizeof(T)) prefetch_second(next + line);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Vec value = broadcast(low[r * low_stride + j]);
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) sums[r][i] = fma(value, of_b[i], sums[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) {
      float *to = update + r * stride + at + i * kLanes;
      V == 1 ? store(to, sums[r][i], left) : store(to, sums[r][i]);
    }
}

// Write the products of B's columns with R rows of values, `low_stride` apart, to `update`, rows `stride` apart.
template <int R, class T>
inline void expand_rows(const ColumnsOfB<T> &b, const float *low, long low_stride, float *update, long stride) {
  constexpr long kWanted = R > 2 ? kRegisters / 8 : R == 2 ? kRegisters / 4 : 8;
  constexpr long kTogether = std::min<long>(kWanted, 64 / kLanes);
  long at = 0;
  for (; at + kTogether * kLanes <= b.width; at += kTogether * kLanes)
    expand_registers<R, kTogether>(b, at, low, low_stride, update, stride, 0);
  if constexpr (kTogether > 2)
    for (; at + 2 * kLanes <= b.width; at += 2 * kLanes)
      expand_registers<R, 2>(b, at, low, low_stride, update, stride, 0);
  for (; at < b.width; at += kLanes)
    expand_registers<R, 1>(b, at, low, low_stride, update, stride, b.width - at);
}

// Write the updates of outputs `begin` to `end` of up to kExpanded rows of a slot to `update`, rows `stride` apart.
// low [rows, parts, max_rank], scaled. `next`: memory of B that is read after these outputs, and prefetched.
template <class T>
void expand(const AdapterPairs &pairs, long slot, const float *low, long rows, long begin, long end, const T *next,
            float *update, long stride) {
  const long values = pairs.parts * pairs.max_rank;
  for (long at = begin, part = 0; at < end;) {
    while (pairs.ends[part] <= at) part++;
    const long of_panel = at % pairs.panel, left = pairs.outputs - (at - of_panel);
    const long stop = std::min({end, static_cast<long>(pairs.ends[part]), at - of_panel + pairs.panel});
    const float *of_part = low + part * pairs.max_rank;
    const T *first = panel_of<T>(pairs, slot, at) + of_panel;
    const ColumnsOfB<T> columns{first, stop < end ? first + pairs.max_rank * pairs.panel : next, pairs.ranks[slot],
                                std::min(pairs.panel, left), stop - at};
    float *to = update + at - begin;
    if (rows == 4) expand_rows<4>(columns, of_part, values, to, stride);
    else if (rows == 3) expand_rows<3>(columns, of_part, values, to, stride);
    else if (rows == 2) expand_rows<2>(columns, of_part, values, to, stride);
    else expand_rows<1>(columns, of_part, values, to, stride);
    at = stop;
  }
}

}  // namespace adapters
