// Matmuls of layers in steps in which rows have LoRA adapters: y = epilogue(x w^T + scale B (A x)).
//
// `low` = A x is summed in float, slice by slice, and the slices are added in the tree of slices.h. B is applied once:
// after the all-reduce, if ranks share the inputs, so that they exchange `max_rank` values of a row. Each value of `low`
// and of an update is computed by one thread, input by input and rank by rank. So the bits of a row depend neither on
// other rows nor on the number of threads or ranks. Rows without an adapter of the layer have the bits of a plain
// matmul, since the same sums pass through the same epilogue.
#pragma once
#include <algorithm>

#include "gemm/epilogue.h"
#include "gemm/slices.h"
#include "gemm/strips.h"
#include "layer/matmul_rows.h"
#include "runtime/parallel.h"

namespace adapters {

using namespace simd;

constexpr long kTogether = 4;         // rows of A that are multiplied together: they share the loads of x
constexpr long kPanelsTogether = 8;   // panels of outputs that a thread finishes at a time; B's part stays in the cache
constexpr long kOutputs = kPanelsTogether * gemm::kPanel;
constexpr long kWorthWidening = 4;    // rows of x from which A is widened once instead of for each row

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

// Rows of A that are multiplied together; the last one again if there are fewer.
template <class A>
struct RowsOfA {
  const A *at[kTogether];
};

// Write the products of one slice of a row of x with rows of A to `sums`.
template <class T, class A>
inline void multiply_slice(const T *x, const RowsOfA<A> &a, long from, long length, float *sums) {
  Vec even[kTogether], odd[kTogether];
  for (long i = 0; i < kTogether; i++) even[i] = odd[i] = zero();
  long k = 0;
  for (; k + 2 * kLanes <= length; k += 2 * kLanes) {
    const Vec one = load(x + from + k), other = load(x + from + k + kLanes);
    for (long i = 0; i < kTogether; i++) {
      even[i] = fma(one, load(a.at[i] + from + k), even[i]);
      odd[i] = fma(other, load(a.at[i] + from + k + kLanes), odd[i]);
    }
  }
  for (; k < length; k += kLanes) {
    const Vec rest = load(x + from + k, length - k);
    for (long i = 0; i < kTogether; i++) even[i] = fma(rest, load(a.at[i] + from + k, length - k), even[i]);
  }
  for (long i = 0; i < kTogether; i++) sums[i] = sum(even[i] + odd[i]);
}

// Write the products of a row of x with `count` rows of A, at most kTogether, to `low`.
template <class T, class A>
inline void multiply_row(const T *x, const RowsOfA<A> &a, long count, long inputs, long slices, float *low) {
  float pending[gemm::kPending][kTogether];
  const long length = inputs / slices;
  for (long slice = 0; slice < slices; slice++) {
    long here = gemm::pending_before(slice);
    multiply_slice(x, a, slice * length, length, pending[here]);
    for (long left = slice; left & 1; left >>= 1, here--)
      for (long i = 0; i < kTogether; i++) pending[here - 1][i] += pending[here][i];
  }
  std::copy_n(pending[0], count, low);
}

// Compute A x of the rows in `spans`. x [rows, inputs], from row `first_row` of the step on. low [entries, parts,
// max_rank]: values beyond the rank of a pair are zero.
template <class T>
void shrink(const AdapterPairs &pairs, const AdapterRows &all, const SlotRows *spans, long count, const T *x,
            long first_row, float *low) {
  const long groups = (pairs.max_rank + kTogether - 1) / kTogether, values = pairs.parts * pairs.max_rank;
  long rows = 0;
  for (long i = 0; i < count; i++) rows += spans[i].last - spans[i].first;
#pragma omp parallel for schedule(dynamic) if (rows * values * pairs.inputs > kSerial)
  for (long unit = 0; unit < count * pairs.parts * groups; unit++) {
    const SlotRows &span = spans[unit / (pairs.parts * groups)];
    const long part = unit / groups % pairs.parts, begin = unit % groups * kTogether;
    const long held = std::min(kTogether, pairs.max_rank - begin);
    const long used = std::min(held, std::max<long>(0, pairs.ranks[span.slot] - begin));
    float *to = low + part * pairs.max_rank + begin;
    if (used < held)
      for (long i = span.first; i < span.last; i++) std::fill_n(to + i * values + used, held - used, 0.0f);
    if (!used) continue;
    const T *first = static_cast<const T *>(pairs.a) +
                     ((span.slot * pairs.parts + part) * pairs.max_rank + begin) * pairs.inputs;
    RowsOfA<T> a;
    for (long i = 0; i < kTogether; i++) a.at[i] = first + std::min(i, used - 1) * pairs.inputs;
    const auto row_of = [&](long i) { return x + (all.rows[i] - first_row) * pairs.inputs; };
    if (sizeof(T) == sizeof(float) || span.last - span.first < kWorthWidening) {
      for (long i = span.first; i < span.last; i++)
        multiply_row(row_of(i), a, used, pairs.inputs, pairs.slices, to + i * values);
      continue;
    }
    const Arena::Mark mark = arena().mark();
    float *wide = arena().take<float>(kTogether * pairs.inputs);
    RowsOfA<float> widened;
    for (long i = 0; i < kTogether; i++) {
      widened.at[i] = wide + std::min(i, used - 1) * pairs.inputs;
      if (i < used)
        for (long k = 0; k < pairs.inputs; k += kLanes)
          store(wide + i * pairs.inputs + k, load(a.at[i] + k, pairs.inputs - k), pairs.inputs - k);
    }
    for (long i = span.first; i < span.last; i++)
      multiply_row(row_of(i), widened, used, pairs.inputs, pairs.slices, to + i * values);
    arena().release(mark);
  }
}

// Write the updates of outputs `begin` to `end` of a row to `update`: scale B low. low [parts, max_rank].
template <class T>
inline void expand(const AdapterPairs &pairs, long slot, const float *low, long begin, long end, float *update) {
  constexpr long kVectors = 4;
  const T *b = static_cast<const T *>(pairs.b) + slot * pairs.max_rank * pairs.outputs;
  const long rank = pairs.ranks[slot];
  long part = 0;
  for (long at = begin; at < end;) {
    while (pairs.ends[part] <= at) part++;
    const long stop = std::min<long>(end, pairs.ends[part]);
    const float scale = pairs.scales[slot * pairs.parts + part], *values = low + part * pairs.max_rank;
    for (; at < stop; at += kVectors * kLanes) {
      Vec sums[kVectors];
      for (long i = 0; i < kVectors; i++) sums[i] = zero();
      for (long j = 0; j < rank; j++) {
        const Vec value = broadcast(values[j] * scale);
        const T *from = b + j * pairs.outputs;
        for (long i = 0; i < kVectors; i++)
          if (const long d = at + i * kLanes; d < stop) sums[i] = fma(value, load(from + d, stop - d), sums[i]);
      }
      for (long i = 0; i < kVectors; i++)
        if (const long d = at + i * kLanes; d < stop) store(update + d - begin, sums[i], stop - d);
    }
    at = stop;
  }
}

// The adapter of each row of a block: its slot and its entry in `AdapterRows::rows`, or -1.
struct RowAdapter {
  long slot, entry;
};

// Find the adapters of `rows` rows. Return the number of rows that have one.
inline long find_adapters(const AdapterRows &all, const SlotRows *spans, long count, long first_row, long rows,
                          RowAdapter *found) {
  long adapted = 0;
  std::fill_n(found, rows, RowAdapter{-1, -1});
  for (long i = 0; i < count; i++)
    for (long entry = spans[i].first; entry < spans[i].last; entry++) {
      const long row = all.rows[entry] - first_row;
      if (row < 0 || row >= rows) continue;
      found[row] = {spans[i].slot, entry};
      adapted++;
    }
  return adapted;
}

// Apply the epilogue of `p` to `wide` [p.rows, stride], the sums of whole panels, and to the updates of its rows, of
// which `adapted` have an adapter.
template <class T>
void finish_sums(const gemm::MatmulArgs &p, const float *wide, long stride, const AdapterPairs &pairs, const float *low,
                 const RowAdapter *adapter_of, long adapted) {
  using gemm::kPanel;
  const bool gated = gemm::is_gate(p.epilogue);
  const long panels = stride / kPanel, values = pairs.parts * pairs.max_rank, half = p.columns / 2;
  const long width = gated ? kLanes : kPanel;  // outputs of a panel
  const long outputs = gated ? half : p.columns;
  const long units = (panels + kPanelsTogether - 1) / kPanelsTogether;
#pragma omp parallel for if ((p.rows + adapted * pairs.max_rank) * stride > kSerial)
  for (long unit = 0; unit < units; unit++) {
    alignas(64) float updates[2][kOutputs] = {};  // gated: updates of gate, and of up
    const long first = unit * kPanelsTogether, last = std::min(panels, first + kPanelsTogether);
    const long begin = first * width, end = std::min(outputs, last * width);
    for (long row = 0; row < p.rows; row++) {
      const RowAdapter &adapter = adapter_of[row];
      if (adapter.slot >= 0) {
        const float *of_row = low + adapter.entry * values;
        expand<T>(pairs, adapter.slot, of_row, begin, end, updates[0]);
        if (gated) expand<T>(pairs, adapter.slot, of_row, half + begin, half + end, updates[1]);
      }
      for (long panel = first; panel < last; panel++) {
        const float *from = wide + row * stride + panel * kPanel;
        Vec one = load(from), other = load(from + kLanes);
        if (adapter.slot >= 0) {
          const long at = panel * width - begin;
          one = one + load(updates[0] + at);
          other = other + load(gated ? updates[1] + at : updates[0] + at + kLanes);
        }
        gemm::finish<T>(p, row, panel, one, other);
      }
    }
  }
}

// Multiply the rows of a chunk, and apply the layer's epilogue to the sums and the updates.
template <class T>
void multiply_and_finish(const RowChunk<T> &chunk, const Operation &op, const SlotRows *spans, long count) {
  const AdaptedWeight &layer = *static_cast<const AdaptedWeight *>(op.parameters);
  const AdapterPairs &pairs = *layer.pairs;
  const AdapterRows &all = *chunk.step.adapters;
  float *low = arena().take<float>(all.starts[all.spans] * pairs.parts * pairs.max_rank);
  shrink(pairs, all, spans, count, chunk.at(op.source), chunk.first, low);
  const gemm::MatmulArgs whole = matmul_of(chunk, op.source, op.target, layer.weight);
  const long width = gemm::is_gate(whole.epilogue) ? kLanes : gemm::kPanel;
  const long outputs = gemm::is_gate(whole.epilogue) ? whole.columns / 2 : whole.columns;
  const long stride = (outputs + width - 1) / width * gemm::kPanel, most = std::min(chunk.rows, gemm::kMostRows);
  float *wide = arena().take<float>(most * stride);
  RowAdapter *adapter_of = arena().take<RowAdapter>(most);
  const long y_bytes = whole.y_stride * (whole.epilogue == gemm::kFloat ? sizeof(float) : sizeof(T));
  for (long row = 0; row < chunk.rows; row += most) {
    gemm::MatmulArgs sums = whole, p = whole;
    p.rows = sums.rows = std::min(most, chunk.rows - row);
    sums.x = static_cast<const T *>(whole.x) + row * whole.x_stride;
    sums.y = wide;
    sums.bias = sums.residual = nullptr;
    sums.columns = sums.y_stride = stride;
    sums.epilogue = gemm::kFloat;
    run_matmul<T>(sums, layer.weight.kind);
    p.y = static_cast<char *>(whole.y) + row * y_bytes;
    if (p.residual) p.residual = p.y;
    const long adapted = find_adapters(all, spans, count, chunk.first + row, p.rows, adapter_of);
    finish_sums<T>(p, wide, stride, pairs, low, adapter_of, adapted);
  }
}

}  // namespace adapters

// Return the memory for A x of the step's adapted rows, which are all-reduced together with `partial`.
inline float *low_sums(const LayerStep &step, const PackedWeight &weight) {
  return step.partial + step.rows * weight.columns;
}

template <class T>
void multiply_adapted(const RowChunk<T> &chunk, const Operation &op) {
  const AdaptedWeight &layer = *static_cast<const AdaptedWeight *>(op.parameters);
  const AdapterRows &all = *chunk.step.adapters;
  const Arena::Mark mark = arena().mark();
  auto *spans = arena().take<adapters::SlotRows>(all.spans);
  const long count = adapters::find_spans(all, *layer.pairs, chunk.first, chunk.first + chunk.rows, spans);
  if (op.target == kPartial) {
    adapters::shrink(*layer.pairs, all, spans, count, chunk.at(op.source), chunk.first,
                     low_sums(chunk.step, layer.weight));
    run_matmul<T>(matmul_of(chunk, op.source, op.target, layer.weight), layer.weight.kind);
  } else if (count) {
    adapters::multiply_and_finish<T>(chunk, op, spans, count);
  } else {
    run_matmul<T>(matmul_of(chunk, op.source, op.target, layer.weight), layer.weight.kind);
  }
  arena().release(mark);
}

// The sums are finished in the same order as in `finish_matmul`; an update is added after the bias.
template <class T>
void finish_adapted(const RowChunk<T> &chunk, const Operation &op) {
  using namespace simd;
  const AdaptedWeight &layer = *static_cast<const AdaptedWeight *>(op.parameters);
  const AdapterPairs &pairs = *layer.pairs;
  const AdapterRows &all = *chunk.step.adapters;
  const long width = layer.weight.columns, units = (width + adapters::kOutputs - 1) / adapters::kOutputs;
  const T *bias = static_cast<const T *>(layer.weight.bias);
  const float *total = chunk.step.partial + chunk.first * width, *low = low_sums(chunk.step, layer.weight);
  const bool adds = op.target == kResidual;
  T *y = chunk.at(op.target);
  const Arena::Mark mark = arena().mark();
  auto *spans = arena().take<adapters::SlotRows>(all.spans);
  auto *adapter_of = arena().take<adapters::RowAdapter>(chunk.rows);
  const long count = adapters::find_spans(all, pairs, chunk.first, chunk.first + chunk.rows, spans);
  const long adapted = adapters::find_adapters(all, spans, count, chunk.first, chunk.rows, adapter_of);
#pragma omp parallel for if ((chunk.rows + adapted * pairs.max_rank) * width > kSerial)
  for (long unit = 0; unit < units; unit++) {
    alignas(64) float update[adapters::kOutputs] = {};
    const long begin = unit * adapters::kOutputs, end = std::min(width, begin + adapters::kOutputs);
    for (long row = 0; row < chunk.rows; row++) {
      const adapters::RowAdapter &adapter = adapter_of[row];
      if (adapter.slot >= 0)
        adapters::expand<T>(pairs, adapter.slot, low + adapter.entry * pairs.max_rank, begin, end, update);
      const float *from = total + row * width;
      T *to = y + row * width;
      for (long d = begin; d < end; d += kLanes) {
        Vec sum = load(from + d, end - d);
        if (bias) sum = sum + load(bias + d, end - d);
        if (adapter.slot >= 0) sum = sum + load(update + d - begin);
        if (adds) sum = sum + load(to + d, end - d);
        store(to + d, sum, end - d);
      }
    }
  }
  arena().release(mark);
}
