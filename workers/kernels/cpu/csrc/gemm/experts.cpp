// y = for each row the sum over its experts of weight * down(activation(gate x) * (up x)), or of weight *
// down(activation(up x)) without a gate.
//
// Rows are sorted by expert. A block has up to kMostRows rows of one expert, so only weights of experts in use are
// read, and each panel once for all rows of a block. First, threads take panels of gate and up, one block after the
// other, in the order of their weights in memory. Then they take panels of outputs and add up the contributions of all
// blocks: a row's experts are added in ascending order, whichever thread takes a panel. Each matmul has the bits of its
// weight format (panel_rows.h), so the bits of a row depend only on that row, its experts and their weights.
//
// The sum over the experts is computed separately for each slice of the width, or for each group of experts if ranks
// hold whole experts. Slices or groups are added up in a tree (slices.h).
//
// Updates by adapters are added to the sums of both matmuls (expert_updates.h).
#include "gemm/experts.h"

#include <new>
#include <type_traits>

#include "gemm/epilogue.h"
#include "gemm/expert_blocks.h"
#include "gemm/expert_updates.h"
#include "gemm/panel_rows.h"
#include "gemm/shares.h"
#include "runtime/arena.h"
#include "simd/int8.h"

namespace gemm {
namespace {

// Maximum number of pairs (row, expert) that are multiplied together: in all, and per expert of the rank. So the rows
// between the two matmuls, and the totals of a panel, fit the second-level caches, and each expert has enough rows to
// be worth reading its weights.
constexpr long kMostPairs = 2048, kPairsOfExpert = 32;
// Totals that a thread adds to at a time, 512 KB. These are all panels of the thread, or several of them, so that the
// panels of each expert are read one after the other, in the order of memory, while its rows are still in the
// first-level cache. After each jump to another address, hardware prefetching must start again. Smaller values cost
// measurable time.
constexpr long kMostTotals = 1 << 17;

// The matmuls of all blocks with the weights of their experts.
struct BlockMatmuls {
  const Sorted &sorted;
  PanelRows **of;
  long *strips_before, strips = 0;  // [blocks]  number of strips in earlier blocks

  // Prepare the matmuls. T is the type of x.
  template <class T>
  BlockMatmuls(const Sorted &sorted, const Experts &e, bool is_down, const T *)
      : sorted(sorted), of(arena().take<PanelRows *>(sorted.count)), strips_before(arena().take<long>(sorted.count)) {
    for (long block = 0; block < sorted.count; block++) {
      const Expert &expert = e.experts[sorted.blocks[block].expert];
      MatmulArgs p{};
      p.weight = is_down ? expert.down : expert.gate_up;
      p.rows = sorted.blocks[block].rows;
      p.columns = is_down ? e.hidden : e.inner_columns();
      p.inputs = is_down ? e.width : e.hidden;
      p.slices = is_down ? e.slices : 1;
      of[block] = panel_rows<T>(p, is_down ? expert.down_kind : expert.gate_up_kind);
      strips_before[block] = strips;
      strips += of[block]->strips;
    }
  }

  // Pack rows of x. All threads of the parallel region call this.
  template <class T>
  void pack(const T *x, long stride, const int32_t *row_of) const {
#pragma omp for schedule(static)
    for (long strip = 0; strip < strips; strip++) {
      const long block = std::upper_bound(strips_before, strips_before + sorted.count, strip) - strips_before - 1;
      of[block]->pack(strip - strips_before[block], x, stride, row_of + sorted.blocks[block].begin);
    }
  }
};

template <class T>
struct Step {
  const Experts &e;
  const Sorted &sorted;
  const BlockMatmuls &gate_up, &down;
  const ExpertUpdates<T> &updates;
  T *gated;  // [pairs, width]
  float *y;  // [rows, hidden]
  long rows;

  // Compute one panel of gate and up for a block.
  void multiply_gate_up(long block, long panel) const {
    alignas(64) float sums[kMostRows * kPanel];
    const Sorted::Block &of = sorted.blocks[block];
    if (updates.has(block)) updates.fetch_gate_up(block, panel + 1);
    gate_up.of[block]->multiply(panel, 0, sums);
    MatmulArgs p{};
    p.bias = e.experts[of.expert].gate_up_bias;
    p.y = gated;
    p.columns = e.inner_columns();
    p.y_stride = e.width;
    p.epilogue = e.activation;
    p.alpha = e.alpha;
    p.limit = e.limit;
    if (updates.has(block)) {
      updates.add_to_gate_up(block, panel, static_cast<const T *>(p.bias), sums);
      p.bias = nullptr;
    }
    for (long r = 0; r < of.rows; r++) {
      Vec low = load(sums + r * kPanel), high = load(sums + r * kPanel + kLanes);
      if (e.weighs_inputs) {  // gate and up are linear, so their sums are scaled, which rounds less than scaling x
        const Vec weight = broadcast(sorted.weight_of[of.begin + r]);
        low = low * weight, high = high * weight;
      }
      finish<T>(p, of.begin + r, panel, low, high);
    }
  }

  long parts() const { return e.slices * e.groups; }

  // Compute panels `begin` to `end` of the outputs, for all blocks. totals [panels][parts][rows][kPanel].
  void multiply_down(long begin, long end, float *totals) const {
    const long size = rows * kPanel, of_panel = parts() * size;
    const long first_slice = std::max(0L, e.only_slice), end_slice = e.only_slice < 0 ? e.slices : e.only_slice + 1;
    std::fill(totals, totals + (end - begin) * of_panel, 0.0f);
    for (long block = 0; block < sorted.count; block++) {
      const Sorted::Block &of = sorted.blocks[block];
      const T *bias = static_cast<const T *>(e.experts[of.expert].down_bias);
      for (long panel = begin; panel < end; panel++) {
        const long left = e.hidden - panel * kPanel;
        const WeightedTotals to{sorted.row_of + of.begin, sorted.factor_of + of.begin,
                                totals + (panel - begin) * of_panel + of.expert / e.group * size, size, bias != nullptr,
                                bias ? load(bias + panel * kPanel, left) : zero(),
                                bias ? load(bias + panel * kPanel + kLanes, left - kLanes) : zero()};
        if (updates.has(block)) updates.multiply_add(*down.of[block], block, panel, first_slice, end_slice, to);
        else down.of[block]->multiply_add(panel, first_slice, end_slice, to);
      }
    }
    for (long panel = begin; panel < end; panel++, totals += of_panel) add_parts(panel, totals);
  }

  // Add up the parts of one panel and store it to y. totals [parts][rows][kPanel].
  void add_parts(long panel, float *totals) const {
    const long size = rows * kPanel, left = e.hidden - panel * kPanel;
    for (long span = 1; span < parts(); span *= 2)
      for (long part = 0; part + span < parts(); part += 2 * span)
        for (long at = 0; at < size; at += kLanes) {
          float *to = totals + part * size + at;
          store(to, load(to) + load(to + span * size));
        }
    for (long row = 0; row < rows; row++)
      for (int at = 0; at < kPanel && at < left; at += kLanes)
        store(y + row * e.hidden + panel * kPanel + at, load(totals + row * kPanel + at), left - at);
  }
};

// Compute the experts for `rows` rows, at most the number that is multiplied together. `pairs`, `slot_of` [rows]: see
// ExpertUpdates.
template <class T>
void multiply_some(const Experts &e, const T *x, long x_stride, const int32_t *ids, const float *weights, long rows,
                   long per_row, float *y, const ExpertPairs *pairs, const int32_t *slot_of) {
  const Arena::Mark mark = arena().mark();
  const Sorted sorted(e, ids, weights, rows, per_row, slot_of ? rows_by_slot(slot_of, rows) : nullptr);
  T *gated = arena().take<T>(sorted.pairs * e.width);
  const BlockMatmuls gate_up(sorted, e, false, x), down(sorted, e, true, x);
  const ExpertUpdates<T> updates(e, sorted, pairs, slot_of);
  const Step<T> step{e, sorted, gate_up, down, updates, gated, y, rows};
  const long lanes = is_gate(e.activation) ? kLanes : kPanel;  // values of the width in a panel
  const long gate_panels = (e.width + lanes - 1) / lanes, panels = (e.hidden + kPanel - 1) / kPanel;
  const long size = step.parts() * rows * kPanel, threads = omp_get_max_threads();
  const long share = (panels + threads - 1) / threads, most = std::max(1L, kMostTotals / size);
  const long turns = (share + most - 1) / most, together = (share + turns - 1) / turns;
  const Shares of_gate_up(sorted.count * gate_panels), of_down((panels + together - 1) / together);
#pragma omp parallel
  {
    updates.shrink_inputs(x, x_stride);
    gate_up.pack(x, x_stride, sorted.row_of);  // ends with a barrier
    of_gate_up.visit([&](long piece) { step.multiply_gate_up(piece / gate_panels, piece % gate_panels); });
#pragma omp barrier
    updates.shrink_gated(gated);
    down.pack(gated, e.width, sorted.own);
    // The totals are private to this thread, because cache lines that another core wrote are slow to read.
    const Arena::Mark own = arena().mark();
    float *totals = arena().take<float>(together * size);
    of_down.visit([&](long piece) {
      step.multiply_down(piece * together, std::min(panels, (piece + 1) * together), totals);
    });
    arena().release(own);
  }
  arena().release(mark);
}

}  // namespace

template <class T>
void multiply_experts(const Experts &e, const T *x, long x_stride, const int32_t *ids, const float *weights, long rows,
                      long per_row, float *y, const ExpertAdapters *adapters) {
  const Arena::Mark mark = arena().mark();
  const int32_t *slot_of = adapters ? slots_of_rows(*adapters->rows, rows) : nullptr;
  const long most = std::max(1L, std::max(kMostPairs, kPairsOfExpert * e.count) / per_row);
  for (long row = 0; row < rows; row += most)
    multiply_some(e, x + row * x_stride, x_stride, ids + row * per_row, weights + row * per_row,
                  std::min(most, rows - row), per_row, y + row * e.hidden, adapters ? adapters->pairs : nullptr,
                  slot_of ? slot_of + row : nullptr);
  arena().release(mark);
}

#define OARLOCK_MULTIPLY_EXPERTS(T)                                                                             \
  template void multiply_experts<T>(const Experts &, const T *, long, const int32_t *, const float *, long, long, \
                                    float *, const ExpertAdapters *);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MULTIPLY_EXPERTS)

}  // namespace gemm

extern "C" void oarlock_experts(const gemm::Experts *experts, const void *x, long x_stride, const int32_t *ids,
                                const float *weights, long rows, long per_row, float *y, int type,
                                const gemm::ExpertAdapters *adapters) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    gemm::multiply_experts(*experts, static_cast<const T *>(x), x_stride, ids, weights, rows, per_row, y, adapters);
  });
}
