// The updates of experts by the adapters of rows: scale B (A x) of gate and up, and of down.
//
// Pairs (row, expert) of one expert are sorted by slot, so that rows with the same adapter share the loads of A and of
// B. The updates of down are computed for each slice of the width, and added to the sums of the slice, so that the bits
// do not depend on the number of ranks that share the width.
#pragma once
#include <algorithm>
#include <new>

#include "gemm/expert_blocks.h"
#include "gemm/low_rank.h"
#include "gemm/panel_rows.h"

namespace gemm {

// Return the slot of each of `rows` rows, from 1 on; 0: no adapter. The caller releases the memory.
inline const int32_t *slots_of_rows(const AdapterRows &all, long rows) {
  int32_t *found = arena().take<int32_t>(rows);
  std::fill_n(found, rows, 0);
  for (long span = 0; span < all.spans; span++)
    for (long entry = all.starts[span]; entry < all.starts[span + 1]; entry++) found[all.rows[entry]] = all.slots[span];
  return found;
}

// Return the rows sorted by slot, then by row. The caller releases the memory.
inline const int32_t *rows_by_slot(const int32_t *slot_of, long rows) {
  int32_t *order = arena().take<int32_t>(rows);
  for (long row = 0; row < rows; row++) order[row] = row;
  std::sort(order, order + rows, [&](int32_t one, int32_t other) {
    return slot_of[one] != slot_of[other] ? slot_of[one] < slot_of[other] : one < other;
  });
  return order;
}

template <class T>
class ExpertUpdates {
 public:
  // `pairs` [e.count], `slot_of` [rows]: the slot of each row, from 1 on, or 0; both null if no row has an adapter. The
  // caller releases the memory.
  ExpertUpdates(const Experts &e, const Sorted &sorted, const ExpertPairs *pairs, const int32_t *slot_of)
      : e_(e), sorted_(sorted), pairs_(pairs) {
    if (slot_of) find_spans(slot_of);
    if (!count_) return;
    const AdapterPairs &like = *pairs->gate_up;  // all experts have matrices of the same sizes
    parts_ = like.parts, groups_ = adapters::groups_of_a(like);
    units_of_gate_up_ = new (arena().take<Shares>(1)) Shares(count_ * parts_ * groups_);
    units_of_down_ = new (arena().take<Shares>(1)) Shares(count_ * groups_);
    low_of_gate_up_ = arena().take<float>(adapted_ * parts_ * like.max_rank);
    low_of_down_ = arena().take<float>(adapted_ * e.slices * like.max_rank);
  }

  // Return whether a row of the block has an adapter of the block's expert.
  bool has(long block) const { return count_ && first_[block] < first_[block + 1]; }

  // Compute A x of gate and up. All threads of the parallel region call this, and wait for each other afterwards.
  void shrink_inputs(const T *x, long x_stride) const {
    if (!count_) return;
    units_of_gate_up_->visit([&](long unit) {
      const Span &span = spans_[unit / (parts_ * groups_)];
      const AdapterPairs &pairs = *pairs_[span.expert].gate_up;
      const long values = parts_ * pairs.max_rank, part = unit / groups_ % parts_;
      float *low = low_of_gate_up_ + span.low * values + part * pairs.max_rank;
      shrink({pairs, sorted_.row_of + span.begin, x, x_stride, 0, span.rows, low, {values, 0}}, span, part, unit);
    });
  }

  // Compute A x of down, for each slice, from the values between the two matmuls. All threads call this as well.
  void shrink_gated(const T *gated) const {
    if (!count_) return;
    units_of_down_->visit([&](long unit) {
      const Span &span = spans_[unit / groups_];
      const AdapterPairs &pairs = *pairs_[span.expert].down;
      const adapters::LowStrides strides{e_.slices * pairs.max_rank, pairs.max_rank};
      float *low = low_of_down_ + span.low * strides.row;
      shrink({pairs, sorted_.own + span.begin, gated, e_.width, 0, span.rows, low, strides}, span, 0, unit);
    });
  }

  // Prefetch B for a panel of gate and up, while the panel before is multiplied.
  void fetch_gate_up(long block, long panel) const {
    const AdapterPairs &pairs = *pairs_[sorted_.blocks[block].expert].gate_up;
    const long width = is_gate(e_.activation) ? kLanes : kPanel, begin = panel * width;
    for (long span = first_[block]; begin < e_.width && span < first_[block + 1]; span++)
      for (long part = 0; part < parts_; part++) fetch(pairs, spans_[span].slot, part * e_.width + begin, width);
  }

  // Add the bias and the updates to the sums of a panel of gate and up. sums [rows of the block][kPanel].
  void add_to_gate_up(long block, long panel, const T *bias, float *sums) const {
    const Sorted::Block &of = sorted_.blocks[block];
    const bool gated = is_gate(e_.activation);
    const long width = gated ? kLanes : kPanel, begin = panel * width, end = std::min(e_.width, begin + width);
    if (bias) {  // the bias of a gated weight is padded to whole panels
      const long left = gated ? kPanel : e_.width - begin;
      const Vec low = load(bias + panel * kPanel, left), high = load(bias + panel * kPanel + kLanes, left - kLanes);
      for (long r = 0; r < of.rows; r++) add_to(sums + r * kPanel, low, high);
    }
    const AdapterPairs &pairs = *pairs_[of.expert].gate_up;
    for (long i = first_[block]; i < first_[block + 1]; i++) {
      const Span &span = spans_[i];
      if (!pairs.ranks[span.slot]) continue;
      const float *low = low_of_gate_up_ + span.low * parts_ * pairs.max_rank;
      float *to = sums + (span.begin - of.begin) * kPanel;
      alignas(64) float updates[adapters::kExpanded * kPanel] = {};
      for (long row = 0; row < span.rows; row += adapters::kExpanded) {
        const long rows = std::min(adapters::kExpanded, span.rows - row);
        const float *from = low + row * parts_ * pairs.max_rank;
        expand(pairs, span.slot, from, rows, begin, end, updates);
        if (gated) expand(pairs, span.slot, from, rows, e_.width + begin, e_.width + end, updates + kLanes);
        for (long r = 0; r < rows; r++)
          add_to(to + (row + r) * kPanel, load(updates + r * kPanel), load(updates + r * kPanel + kLanes));
      }
    }
  }

  // Do the same as PanelRows::multiply_add of `x`, with the updates of the block's rows.
  void multiply_add(const PanelRows &x, long block, long panel, long first, long last, const WeightedTotals &to) const {
    const Sorted::Block &of = sorted_.blocks[block];
    const AdapterPairs &pairs = *pairs_[of.expert].down;
    const long begin = panel * kPanel, end = std::min(e_.hidden, begin + kPanel), size = e_.slices * kPanel;
    const Span *spans = spans_ + first_[block], *stop = spans_ + first_[block + 1];
    const Arena::Mark mark = arena().mark();
    float *updates = arena().take<float>((stop[-1].low + stop[-1].rows - spans->low) * size);  // [rows][slices][kPanel]
    for (const Span *span = spans; span < stop; span++) {
      float *own = updates + (span->low - spans->low) * size;
      if (end - begin < kPanel) std::fill_n(own, span->rows * size, 0.0f);
      const float *low = low_of_down_ + span->low * e_.slices * pairs.max_rank;
      for (long row = 0, rows = span->rows * e_.slices; row < rows; row += adapters::kExpanded)
        expand(pairs, span->slot, low + row * pairs.max_rank, std::min(adapters::kExpanded, rows - row), begin, end,
               own + row * kPanel);
      if (end < e_.hidden) fetch(pairs, span->slot, end, kPanel);
    }
    alignas(64) float sums[kMostRows * kPanel];
    for (long slice = first; slice < last; slice++) {
      x.multiply(panel, slice, sums);
      const Span *span = spans;
      for (long r = 0; r < of.rows; r++) {
        Vec left = load(sums + r * kPanel), right = load(sums + r * kPanel + kLanes);
        const long pair = of.begin + r;
        while (span < stop && span->begin + span->rows <= pair) span++;
        if (span < stop && span->begin <= pair && pairs.ranks[span->slot]) {
          const float *own = updates + (span->low - spans->low + pair - span->begin) * size + slice * kPanel;
          left = left + load(own), right = right + load(own + kLanes);
        }
        to.add(slice, r, left, right);
      }
    }
    arena().release(mark);
  }

 private:
  // Neighbouring pairs (row, expert) of one block whose rows have the same adapter.
  struct Span {
    long expert, slot, begin, rows;  // the slot counts from 0
    long low;                        // number of pairs with adapters before
  };

  void find_spans(const int32_t *slot_of) {
    spans_ = arena().take<Span>(sorted_.pairs);
    first_ = arena().take<long>(sorted_.count + 1);
    for (long block = 0; block < sorted_.count; block++) {
      const Sorted::Block &of = sorted_.blocks[block];
      const ExpertPairs &pairs = pairs_[of.expert];
      first_[block] = count_;
      for (long pair = of.begin; pair < of.begin + of.rows; pair++) {
        const long slot = slot_of[sorted_.row_of[pair]] - 1;
        if (slot < 0 || !(pairs.gate_up->ranks[slot] || pairs.down->ranks[slot])) continue;
        if (count_ == first_[block] || spans_[count_ - 1].slot != slot)
          spans_[count_++] = {of.expert, slot, pair, 0, adapted_};
        spans_[count_ - 1].rows++;
        adapted_++;
      }
    }
    first_[sorted_.count] = count_;
  }

  // Compute A x of a span's rows for some rows of A, and multiply it by the scale.
  void shrink(const adapters::ShrinkUnit<T, int32_t> &of, const Span &span, long part, long unit) const {
    if (!of.pairs.ranks[span.slot]) return;
    const long begin = unit % groups_ * adapters::kRowsOfA;
    const long end = std::min(begin + adapters::kRowsOfA, of.pairs.max_rank);
    of.run(span.slot, part, begin);
    const float scale = of.pairs.scales[span.slot * of.pairs.parts + part];
    for (long slice = 0; slice < (of.strides.slice ? of.pairs.slices : 1); slice++)
      for (long row = 0; row < span.rows; row++)
        for (long j = begin; j < end; j++) of.low[slice * of.strides.slice + row * of.strides.row + j] *= scale;
  }

  static void add_to(float *sums, Vec low, Vec high) {
    store(sums, load(sums) + low);
    store(sums + kLanes, load(sums + kLanes) + high);
  }

  // Compute the updates of outputs `begin` to `end` of up to kExpanded rows of `low`. updates [rows][kPanel].
  static void expand(const AdapterPairs &pairs, long slot, const float *low, long rows, long begin, long end,
                     float *updates) {
    if (!pairs.ranks[slot]) return;
    adapters::expand<T>(pairs, slot, low, rows, begin, end, adapters::panel_of<T>(pairs, slot, begin), updates, kPanel);
  }

  // Prefetch B for `width` outputs from `begin` on. Always inlined: see BlockRows::fetch.
  [[gnu::always_inline]] static void fetch(const AdapterPairs &pairs, long slot, long begin, long width) {
    if (begin * sizeof(T) % 64) return;  // the panel before has prefetched these lines
    const long of_panel = begin % pairs.panel, stride = std::min(pairs.panel, pairs.outputs - (begin - of_panel));
    const T *first = adapters::panel_of<T>(pairs, slot, begin) + of_panel;
    for (long j = 0; j < pairs.ranks[slot]; j++)
      for (long at = 0; at < width; at += 64 / sizeof(T)) prefetch_second(first + j * stride + at);
  }

  const Experts &e_;
  const Sorted &sorted_;
  const ExpertPairs *pairs_;
  long count_ = 0, adapted_ = 0;  // number of spans, and of their pairs
  long parts_ = 0, groups_ = 0;   // parts of gate and up, and groups of rows of A
  Span *spans_ = nullptr;
  long *first_ = nullptr;  // [blocks + 1]   the first span of each block
  const Shares *units_of_gate_up_ = nullptr, *units_of_down_ = nullptr;
  float *low_of_gate_up_ = nullptr;  // [adapted pairs, parts, max_rank]
  float *low_of_down_ = nullptr;     // [adapted pairs, slices, max_rank]
};

}  // namespace gemm
