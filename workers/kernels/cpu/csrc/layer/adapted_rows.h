// Matmuls of layers in steps in which rows have LoRA adapters: y = epilogue(x w^T + scale B (A x)).
//
// B is applied once to `low` = A x (low_rank.h): after the all-reduce, if ranks share the inputs, so that they exchange
// `max_rank` values of a row. So the bits of a row depend neither on other rows nor on the number of ranks. Rows
// without an adapter of the layer have the bits of a plain matmul, since the same sums pass through the same epilogue.
#pragma once
#include "gemm/epilogue.h"
#include "gemm/low_rank.h"
#include "gemm/panel_rows.h"
#include "layer/matmul_rows.h"

namespace adapters {

constexpr long kPanelsTogether = 8;  // panels of outputs that a thread finishes at a time; B's part stays in the cache
constexpr long kOutputs = kPanelsTogether * gemm::kPanel;
constexpr long kMostFetched = 1 << 16;  // bytes of B that are prefetched while the weight is multiplied

// Some rows of a step: those with an adapter of the layer by slot, with their scaled A x, and all others.
struct BlockRows {
  const AdapterPairs &pairs;
  const AdapterRows &all;
  long first, count;  // rows of the step
  SlotRows *spans;
  long num_spans, num_others, adapted;
  int32_t *others;   // rows without an adapter, counted from `first`
  const float *low;  // [entries, parts, max_rank]

  // The caller releases the memory.
  BlockRows(const AdapterPairs &pairs, const AdapterRows &all, long first, long count, const float *low)
      : pairs(pairs), all(all), first(first), count(count), num_others(0), adapted(0), low(low) {
    spans = arena().take<SlotRows>(all.spans);
    others = arena().take<int32_t>(count);
    auto *has_adapter = arena().take<bool>(count);
    num_spans = find_spans(all, pairs, first, first + count, spans);
    std::fill_n(has_adapter, count, false);
    for (long i = 0; i < num_spans; i++)
      for (long entry = spans[i].first; entry < spans[i].last; entry++, adapted++)
        has_adapter[all.rows[entry] - first] = true;
    for (long row = 0; row < count; row++)
      if (!has_adapter[row]) others[num_others++] = row;
  }

  // Return the memory of B that is read after outputs `begin` to `end` of span number `span`: of the next span, or of
  // the first one for the outputs from `end` on.
  template <class T>
  const T *next_of(long span, long begin, long end) const {
    if (span + 1 < num_spans) return panel_of<T>(pairs, spans[span + 1].slot, begin);
    return panel_of<T>(pairs, spans[0].slot, end < pairs.outputs ? end : begin);
  }

  // Prefetch B for outputs `begin` to `end`, if this is little: share number `share` of kPanelsTogether. A compiler may
  // remove the call of a function that only prefetches, so this one is always inlined.
  template <class T>
  [[gnu::always_inline]] void fetch(long begin, long end, long share) const {
    const long ranks = num_spans ? num_spans * pairs.ranks[spans[0].slot] : 0;
    if (static_cast<long>(ranks * (end - begin) * sizeof(T)) > kMostFetched) return;
    for (long span = 0; span < num_spans; span++)
      for (long at = begin; at < end; at += pairs.panel) {
        const T *panel = panel_of<T>(pairs, spans[span].slot, at);
        const long size = pairs.ranks[spans[span].slot] * pairs.panel, step = 64 / sizeof(T);
        for (long line = share * step; line < size; line += kPanelsTogether * step) prefetch_second(panel + line);
      }
  }

  // Call visit(row, update) for each row with the updates of outputs `begin` to `end`, and `other` outputs of the same
  // number after `kOutputs` more values (-1: none); null for rows without an adapter.
  template <class T, class Visit>
  void visit(long begin, long end, long other, const Visit &visit) const {
    alignas(64) float updates[kExpanded][2 * kOutputs];
    const long values = pairs.parts * pairs.max_rank;
    for (long row = 0; row < kExpanded; row++) std::fill_n(updates[row], 2 * kOutputs, 0.0f);
    for (long span = 0; span < num_spans; span++) {
      const SlotRows &of = spans[span];
      for (long entry = of.first; entry < of.last; entry += kExpanded) {
        const long rows = std::min(kExpanded, of.last - entry);
        const float *own = low + entry * values;
        expand<T>(pairs, of.slot, own, rows, begin, end, next_of<T>(span, begin, end), updates[0], 2 * kOutputs);
        if (other >= 0)
          expand<T>(pairs, of.slot, own, rows, other, other + end - begin,
                    next_of<T>(span, other, other + end - begin), updates[0] + kOutputs, 2 * kOutputs);
        for (long i = 0; i < rows; i++) visit(all.rows[entry + i] - first, updates[i]);
      }
    }
    for (long i = 0; i < num_others; i++) visit(others[i], static_cast<const float *>(nullptr));
  }
};

// Multiply the rows of `p`, at most gemm::kMostRows, and apply its epilogue to the sums and the updates.
template <class T>
void multiply_and_finish(const gemm::MatmulArgs &p, int kind, const BlockRows &block) {
  using gemm::kPanel;
  const bool gated = gemm::is_gate(p.epilogue);
  const long half = p.columns / 2, outputs = gated ? half : p.columns;
  const long width = gated ? kLanes : kPanel;  // outputs of a panel
  const long panels = (outputs + width - 1) / width, size = p.rows * kPanel;
  gemm::PanelRows *x = gemm::panel_rows<T>(p, kind);
  int32_t *own = arena().take<int32_t>(p.rows);
  for (long row = 0; row < p.rows; row++) own[row] = row;
#pragma omp parallel for if (p.rows * p.inputs > kSerial)
  for (long strip = 0; strip < x->strips; strip++) x->pack(strip, p.x, p.x_stride, own);
  const Shares units((panels + kPanelsTogether - 1) / kPanelsTogether);
#pragma omp parallel
  {
    const Arena::Mark mark = arena().mark();
    float *sums = arena().take<float>(kPanelsTogether * size);  // [panels of a unit][rows][kPanel]
    units.visit([&](long unit) {
      const long first = unit * kPanelsTogether, last = std::min(panels, first + kPanelsTogether);
      const long begin = first * width, end = std::min(outputs, last * width), other = gated ? half + begin : -1;
      for (long panel = first; panel < last; panel++) {
        block.fetch<T>(begin, end, panel - first);
        if (gated) block.fetch<T>(other, other + end - begin, panel - first);
        x->multiply(panel, 0, sums + (panel - first) * size);
      }
      block.visit<T>(begin, end, other, [&](long row, const float *update) {
        for (long panel = first; panel < last; panel++) {
          const float *from = sums + (panel - first) * size + row * kPanel;
          Vec one = load(from), two = load(from + kLanes);
          if (update) {
            const long at = panel * width - begin;
            one = one + load(update + at);
            two = two + load(update + at + (gated ? kOutputs : kLanes));
          }
          gemm::finish<T>(p, row, panel, one, two);
        }
      });
    });
    arena().release(mark);
  }
}

// Multiply the rows of a chunk, of which those in `spans` have adapters. The inputs of the weight are one slice.
template <class T>
void multiply_spans(const RowChunk<T> &chunk, const Operation &op, const SlotRows *spans, long count) {
  const AdaptedWeight &layer = *static_cast<const AdaptedWeight *>(op.parameters);
  const AdapterPairs &pairs = *layer.pairs;
  const AdapterRows &all = *chunk.step.adapters;
  float *sums = arena().take<float>(all.starts[all.spans] * pairs.parts * pairs.max_rank);
  shrink(pairs, all, spans, count, chunk.at(op.source), chunk.first, sums);
  const float *low = scaled(pairs, all, spans, count, sums);
  const gemm::MatmulArgs whole = matmul_of(chunk, op.source, op.target, layer.weight);
  const long y_bytes = whole.y_stride * (whole.epilogue == gemm::kFloat ? sizeof(float) : sizeof(T));
  for (long row = 0; row < chunk.rows; row += gemm::kMostRows) {
    const Arena::Mark mark = arena().mark();
    gemm::MatmulArgs p = whole;
    p.rows = std::min(gemm::kMostRows, chunk.rows - row);
    p.x = static_cast<const T *>(whole.x) + row * whole.x_stride;
    p.y = static_cast<char *>(whole.y) + row * y_bytes;
    if (p.residual) p.residual = p.y;
    multiply_and_finish<T>(p, layer.weight.kind, BlockRows(pairs, all, chunk.first + row, p.rows, low));
    arena().release(mark);
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
    adapters::multiply_spans<T>(chunk, op, spans, count);
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
  const long width = layer.weight.columns;
  const T *bias = static_cast<const T *>(layer.weight.bias);
  const float *total = chunk.step.partial + chunk.first * width;
  const bool adds = op.target == kResidual;
  T *y = chunk.at(op.target);
  const Arena::Mark mark = arena().mark();
  adapters::BlockRows block(pairs, all, chunk.first, chunk.rows, nullptr);
  block.low = adapters::scaled(pairs, all, block.spans, block.num_spans, low_sums(chunk.step, layer.weight));
  const Shares units((width + adapters::kOutputs - 1) / adapters::kOutputs);
  const auto run = [&](long unit) {
    const long begin = unit * adapters::kOutputs, end = std::min(width, begin + adapters::kOutputs);
    block.visit<T>(begin, end, -1, [&](long row, const float *update) {
      const float *from = total + row * width;
      T *to = y + row * width;
      for (long d = begin; d < end; d += kLanes) {
        Vec sum = load(from + d, end - d);
        if (bias) sum = sum + load(bias + d, end - d);
        if (update) sum = sum + load(update + d - begin);
        if (adds) sum = sum + load(to + d, end - d);
        store(to + d, sum, end - d);
      }
    });
  };
#pragma omp parallel if ((chunk.rows + block.adapted * pairs.max_rank) * width > kSerial)
  units.visit(run);
  arena().release(mark);
}
