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
      const adapters::LowStrides strides{pairs.max_rank, adapted_ * pairs.max_rank};
      float *low = low_of_down_ + span.low * pairs.max_rank;
      shrink({pairs, sorted_.own + span.begin, gated, e_.width, 0, span.rows, low, strides}, span, 0, unit);
    });
  }

  // Add the bias and the updates to the sums of a panel of gate and up. sums [rows of the block][kPanel].
  void add_to_gate_up(long block, long panel, const T *bias, float *sums) const {
    const Sorted::Block &of = sorted_.blocks[block];
    const bool gated = is_gate(e_.activation);
    const long width = gated ? kLanes : kPanel, begin = panel * width, end = std::min(e_.width, begin + width);
    if (bias) {  // the bias of a gated weight is padded to whole panels
      const long left = gated ? kPanel : e_.width - begin;
      const Vec low = load(bias + panel * kPanel, left), high = load(bias + panel * kPanel + kLanes, left - kLanes);
      for (long r = 0; r < of.rows; r++) {
        float *to = sums + r * kPanel;
        store(to, load(to) + low);
        store(to + kLanes, load(to + kLanes) + high);
      }
    }
    const AdapterPairs &pairs = *pairs_[of.expert].gate_up;
    for (const Span *span = spans_ + first_[block]; span < spans_ + first_[block + 1]; span++) {
      const float *low = low_of_gate_up_ + span->low * pairs.parts * pairs.max_rank;
      float *to = sums + (span->begin - of.begin) * kPanel;
      add(pairs, *span, low, begin, end, to);
      if (gated) add(pairs, *span, low, e_.width + begin, e_.width + end, to + kLanes);
    }
  }

  // Do the same as PanelRows::multiply_add of `x`, with the updates of the block's rows.
  void multiply_add(const PanelRows &x, long block, long panel, long first, long last, const WeightedTotals &to) const {
    alignas(64) float sums[kMostRows * kPanel];
    const Sorted::Block &of = sorted_.blocks[block];
    const AdapterPairs &pairs = *pairs_[of.expert].down;
    const long begin = panel * kPanel, end = std::min(e_.hidden, begin + kPanel);
    for (long slice = first; slice < last; slice++) {
      x.multiply(panel, slice, sums);
      for (const Span *span = spans_ + first_[block]; span < spans_ + first_[block + 1]; span++)
        add(pairs, *span, low_of_down_ + (slice * adapted_ + span->low) * pairs.max_rank, begin, end,
            sums + (span->begin - of.begin) * kPanel);
      for (long r = 0; r < of.rows; r++) to.add(slice, r, load(sums + r * kPanel), load(sums + r * kPanel + kLanes));
    }
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

  // Add the updates of outputs `begin` to `end` to the sums of a span's rows, kPanel apart.
  void add(const AdapterPairs &pairs, const Span &span, const float *low, long begin, long end, float *sums) const {
    if (!pairs.ranks[span.slot]) return;
    alignas(64) float updates[adapters::kExpanded][kPanel] = {};
    const long values = pairs.parts * pairs.max_rank;
    const T *next = adapters::panel_of<T>(pairs, span.slot, begin);
    for (long row = 0; row < span.rows; row += adapters::kExpanded) {
      const long rows = std::min(adapters::kExpanded, span.rows - row);
      adapters::expand<T>(pairs, span.slot, low + row * values, rows, begin, end, next, updates[0], kPanel);
      for (long i = 0; i < rows; i++)
        for (long at = 0; at < end - begin; at += kLanes) {
          float *to = sums + (row + i) * kPanel + at;
          store(to, load(to) + load(updates[i] + at));
        }
    }
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
  float *low_of_down_ = nullptr;     // [slices, adapted pairs, max_rank]
};

}  // namespace gemm
