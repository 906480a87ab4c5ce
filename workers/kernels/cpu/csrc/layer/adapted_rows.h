// Matmuls of layers in steps in which rows have LoRA adapters: y = epilogue(x w^T + scale B (A x)).
//
// B is applied once to `low` = A x (low_rank.h): after the all-reduce, if ranks share the inputs, so that they exchange
// `max_rank` values of a row. So the bits of a row depend neither on other rows nor on the number of ranks. Rows
// without an adapter of the layer have the bits of a plain matmul, since the same sums pass through the same epilogue.
#pragma once
#include "gemm/epilogue.h"
#include "gemm/strips.h"
#include "layer/low_rank.h"
#include "layer/matmul_rows.h"

namespace adapters {

constexpr long kPanelsTogether = 8;  // panels of outputs that a thread finishes at a time; B's part stays in the cache
constexpr long kOutputs = kPanelsTogether * gemm::kPanel;

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

// Apply the epilogue of `p` to `wide` [p.rows, stride], the sums of whole panels, and to the updates of its rows.
template <class T>
void finish_sums(const gemm::MatmulArgs &p, const float *wide, long stride, const BlockRows &block) {
  using gemm::kPanel;
  const bool gated = gemm::is_gate(p.epilogue);
  const long panels = stride / kPanel, half = p.columns / 2;
  const long width = gated ? kLanes : kPanel;  // outputs of a panel
  const long outputs = gated ? half : p.columns;
  const Shares units((panels + kPanelsTogether - 1) / kPanelsTogether);
  const auto run = [&](long unit) {
    const long first = unit * kPanelsTogether, last = std::min(panels, first + kPanelsTogether);
    const long begin = first * width, end = std::min(outputs, last * width), other = gated ? half + begin : -1;
    block.visit<T>(begin, end, other, [&](long row, const float *update) {
      for (long panel = first; panel < last; panel++) {
        const float *from = wide + row * stride + panel * kPanel;
        Vec one = load(from), two = load(from + kLanes);
        if (update) {
          const long at = panel * width - begin;
          one = one + load(update + at);
          two = two + load(update + at + (gated ? kOutputs : kLanes));
        }
        gemm::finish<T>(p, row, panel, one, two);
      }
    });
  };
#pragma omp parallel if ((p.rows + block.adapted * block.pairs.max_rank) * stride > kSerial)
  units.visit(run);
}

// Multiply the rows of a chunk, and apply the layer's epilogue to the sums and the updates.
template <class T>
void multiply_and_finish(const RowChunk<T> &chunk, const Operation &op, const SlotRows *spans, long count) {
  const AdaptedWeight &layer = *static_cast<const AdaptedWeight *>(op.parameters);
  const AdapterPairs &pairs = *layer.pairs;
  const AdapterRows &all = *chunk.step.adapters;
  float *sums_of_a = arena().take<float>(all.starts[all.spans] * pairs.parts * pairs.max_rank);
  shrink(pairs, all, spans, count, chunk.at(op.source), chunk.first, sums_of_a);
  const float *low = scaled(pairs, all, spans, count, sums_of_a);
  const gemm::MatmulArgs whole = matmul_of(chunk, op.source, op.target, layer.weight);
  const long width = gemm::is_gate(whole.epilogue) ? kLanes : gemm::kPanel;
  const long outputs = gemm::is_gate(whole.epilogue) ? whole.columns / 2 : whole.columns;
  const long stride = (outputs + width - 1) / width * gemm::kPanel, most = std::min(chunk.rows, gemm::kMostRows);
  float *wide = arena().take<float>(most * stride);
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
    const Arena::Mark mark = arena().mark();
    finish_sums<T>(p, wide, stride, BlockRows(pairs, all, chunk.first + row, p.rows, low));
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
