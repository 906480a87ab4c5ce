// Execution of the branches of a decoder's layers (see layer.h).
#include "layer/layer.h"

#include <algorithm>
#include <type_traits>

#include "elementwise/layer_norm.h"
#include "elementwise/norm.h"
#include "elementwise/rotary.h"
#include "runtime/arena.h"
#include "simd/int8.h"

namespace {

constexpr long kWidestHead = 256;

// A chunk of rows of a step, and the scratch memory of the branch that runs on them.
template <class T>
struct Turn {
  const LayerStep &step;
  T *scratch[2];
  long first, rows;

  T *at(int place) const {
    if (place >= kScratch) return scratch[place - kScratch];
    void *all = place == kResidual ? step.hidden : step.kept[place - kKept];
    return static_cast<T *>(all) + first * step.width;
  }
};

template <class T>
void norm_rows(const Turn<T> &turn, const Operation &op) {
  const Norm &norm = *static_cast<const Norm *>(op.of);
  const T *x = turn.at(op.from);
  T *y = turn.at(op.to);
  if (norm.is_layer_norm) layer_norm(x, norm.scale, norm.shift, y, turn.rows, norm.width, norm.eps);
  else rms_norm(x, norm.scale, y, turn.rows, 1, norm.width, norm.width, norm.eps);
}

template <class T>
void multiply(const Turn<T> &turn, const Operation &op) {
  const PackedWeight &w = *static_cast<const PackedWeight *>(op.of);
  const bool gated = w.epilogue == gemm::kSiluGate || w.epilogue == gemm::kGeluTanhGate;
  const long y_stride = gated ? w.columns / 2 : w.columns;
  gemm::Product p{turn.at(op.from), w.weight, w.bias, nullptr, nullptr, turn.rows, w.columns, w.inputs, w.inputs,
                  y_stride, w.epilogue, w.slices};
  if (op.to == kPartial) {
    p.y = turn.step.partial + turn.first * w.columns;
    p.bias = nullptr;
  } else {
    p.y = turn.at(op.to);
  }
  if (op.to == kResidual) {
    p.residual = p.y;  // each element is read once, just before it is written
    p.epilogue = gemm::kAdd;
  }
  if (w.kind == gemm::kDense) gemm::multiply<T>(p);
  else if (w.kind == gemm::kInt8 || w.kind == gemm::kInt8Dot) gemm::multiply_int8<T>(p, w.kind);
  else if (w.kind == gemm::kFloat8) gemm::multiply_fp8<T>(p);
  else gemm::multiply_grouped<T>(p, w.kind);
}

template <class T>
int turn_heads(const Turn<T> &turn, const Operation &op) {
  const HeadsAndPages &layer = *static_cast<const HeadsAndPages *>(op.of);
  const AttentionLayer &a = *layer.attention;
  const long width = a.head_dim, heads = a.heads + a.kv_heads, stride = (heads + a.kv_heads) * width;
  const RotaryRows none{nullptr, 0};
  const RotaryRows &rotary = layer.rotary < 0 ? none : turn.step.rotary[layer.rotary];
  const long half = rotary.width / 2;
  T *qkv = turn.at(op.to);
  const Arena::Mark mark = arena().mark();
  float *squares = nullptr;
  if (const HeadsOfRank *of = layer.of_rows) {
    squares = arena().take<float>(turn.rows * of->all());
    squares_of_heads(*of, qkv, squares, turn.rows, width, stride);
    const int missing = turn.step.group ? all_reduce(*turn.step.group, squares, turn.rows * of->all()) : kAllCame;
    if (missing != kAllCame) return missing;
  }
#pragma omp parallel for if (turn.rows * heads * width > kSerial)
  for (long row = 0; row < turn.rows; row++) {
    const float *cos = rotary.rows + turn.step.positions[turn.first + row] * rotary.width, *sin = cos + half;
    const auto rotated = [&](const auto *x, T *y) {
      if (layer.interleaved) rotate_neighbours<kWidestHead>(x, cos, sin, y, width, half);
      else rotate_head(x, cos, sin, y, width, half);
    };
    float factors[2];
    if (squares) row_factors(*layer.of_rows, squares + row * layer.of_rows->all(), width, layer.eps, factors);
    for (long head = 0; head < heads; head++) {
      T *x = qkv + row * stride + head * width;
      if (!layer.head_norm) {
        rotated(x, x);
        continue;
      }
      alignas(64) float normed[kWidestHead];
      const float *scale = layer.head_norm + head * width;
      if (squares) scale_row(x, factors[head >= a.heads], scale, normed, width);
      else rms_norm_row(x, scale, normed, width, layer.eps);
      rotated(normed, x);
    }
  }
  arena().release(mark);
  return kAllCame;
}

template <class T>
void attend_rows(const Turn<T> &turn, const Operation &op) {
  const HeadsAndPages &layer = *static_cast<const HeadsAndPages *>(op.of);
  const AttentionLayer &a = *layer.attention;
  const long mixed_width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim, stride = mixed_width + 2 * kv_width;
  const T *qkv = turn.at(op.from), *k = qkv + mixed_width, *v = k + kv_width;
  const NewRows<T> rows{k, stride, v, stride, turn.step.slots, turn.rows};
  attend<T>(*turn.step.attention, a, qkv, stride, turn.at(op.to), mixed_width, layer.k_pages, layer.v_pages,
            layer.sinks, &rows);
}

template <class T>
void take_total(const Turn<T> &turn, const Operation &op) {
  using namespace simd;
  const PackedWeight &w = *static_cast<const PackedWeight *>(op.of);
  const long width = w.columns;
  const T *bias = static_cast<const T *>(w.bias);
  const float *total = turn.step.partial + turn.first * width;
  const bool adds = op.to == kResidual;
  T *y = turn.at(op.to);
#pragma omp parallel for if (turn.rows * width > kSerial)
  for (long row = 0; row < turn.rows; row++) {
    const float *from = total + row * width;
    T *to = y + row * width;
    for (long d = 0; d < width; d += kLanes) {  // same order as in a single rank's epilogue
      Vec sum = load(from + d, width - d);
      if (bias) sum = sum + load(bias + d, width - d);
      if (adds) sum = sum + load(to + d, width - d);
      store(to + d, sum, width - d);
    }
  }
}

template <class T>
void add_rows(const Turn<T> &turn, const Operation &op) {
  using namespace simd;
  const Addition &addition = *static_cast<const Addition *>(op.of);
  const long width = addition.width;
  const Vec scale = broadcast(addition.scale);
  T *x = turn.at(op.from), *hidden = turn.at(kResidual);
#pragma omp parallel for if (turn.rows * width > kSerial)
  for (long row = 0; row < turn.rows; row++) {
    T *from = x + row * width, *to = hidden + row * width;
    if (const Norm *norm = addition.norm) {
      if (norm->is_layer_norm) layer_norm_row(from, norm->scale, norm->shift, from, width, norm->eps);
      else rms_norm_row(from, norm->scale, from, width, norm->eps);
    }
    for (long d = 0; d < width; d += kLanes)
      store(to + d, load(to + d, width - d) + rounded_product(load(from + d, width - d), scale), width - d);
  }
}

template <class T>
void mix(const Turn<T> &turn, const Operation &op) {
  const Mixture &of = *static_cast<const Mixture *>(op.of);
  const Router &router = *of.router;
  const long rows = turn.rows;
  const T *x = turn.at(op.from);
  const Arena::Mark mark = arena().mark();
  float *logits = arena().take<float>(rows * router.outputs), *weights = arena().take<float>(rows * router.top_k);
  int32_t *ids = arena().take<int32_t>(rows * router.top_k);
  router_logits(router, x, router.hidden, rows, logits);
  route(router, logits, rows, ids, weights);
  gemm::multiply_experts(*of.routed, x, router.hidden, ids, weights, rows, router.top_k, turn.step.partial);
  if (of.shared) {
    std::fill_n(ids, rows, 0);
    if (of.shared_gate) router_logits(*of.shared_gate, x, router.hidden, rows, weights);
    for (long row = 0; row < rows; row++) weights[row] = of.shared_gate ? sigmoid_of(weights[row]) : 1.0f;
    float *sums = turn.step.partial + rows * router.hidden;
    gemm::multiply_experts(*of.shared, x, router.hidden, ids, weights, rows, 1, sums);
  }
  arena().release(mark);
}

template <class T>
void take_mix_total(const Turn<T> &turn, const Operation &op) {
  using namespace simd;
  const Mixture &of = *static_cast<const Mixture *>(op.of);
  const long width = of.router->hidden;
  const bool adds = op.to == kResidual;
  T *y = turn.at(op.to);
#pragma omp parallel for if (turn.rows * width > kSerial)
  for (long row = 0; row < turn.rows; row++) {
    const float *from = turn.step.partial + row * width, *shared = from + turn.rows * width;
    T *to = y + row * width;
    for (long d = 0; d < width; d += kLanes) {
      Vec sum = load(from + d, width - d);
      if (of.shared) sum = sum + load(shared + d, width - d);
      if (adds) sum = sum + load(to + d, width - d);
      store(to + d, sum, width - d);
    }
  }
}

// Run one operation. Return kAllCame, or the rank that did not reach an all-reduce in time.
template <class T>
int run_operation(const Turn<T> &turn, const Operation &op) {
  switch (op.kind) {
    case kNormRows: norm_rows(turn, op); break;
    case kMultiply: multiply(turn, op); break;
    case kTurnHeads: return turn_heads(turn, op);
    case kAttend: attend_rows(turn, op); break;
    case kTotal: take_total(turn, op); break;
    case kMix: mix(turn, op); break;
    case kMixTotal: take_mix_total(turn, op); break;
    case kAddRows: add_rows(turn, op); break;
  }
  return kAllCame;
}

// Run operations `first` to `last` of a branch, on at most `rows_at_once` rows at a time.
template <class T>
int run(const Branch &branch, const LayerStep &step, long first, long last) {
  const long most = branch.rows_at_once ? std::min(branch.rows_at_once, step.rows) : step.rows;
  const Arena::Mark mark = arena().mark();
  T *scratch[2];
  for (int i = 0; i < 2; i++) scratch[i] = branch.widths[i] ? arena().take<T>(most * branch.widths[i]) : nullptr;
  int missing = kAllCame;
  for (long row = 0; row < step.rows; row += most) {
    const Turn<T> turn{step, {scratch[0], scratch[1]}, row, std::min(most, step.rows - row)};
    for (long i = first; i < last && missing == kAllCame; i++) missing = run_operation(turn, branch.operations[i]);
  }
  arena().release(mark);
  return missing;
}

template <class T>
int run_branches(const Branch *branches, long first, long last, const LayerStep &step) {
  for (const Branch *branch = branches + first; branch < branches + last; branch++) {
    if (const int missing = run<T>(*branch, step, 0, branch->before_sum); missing != kAllCame) return missing;
    if (branch->before_sum == branch->count || !step.group) continue;
    const int missing = all_reduce(*step.group, step.partial, branch->sums * step.rows * step.width);
    if (missing != kAllCame) return missing;
    run<T>(*branch, step, branch->before_sum, branch->count);
  }
  return kAllCame;
}

}  // namespace

int oarlock_run_branches(const Branch *branches, long first, long last, const LayerStep *step) {
  int missing = kAllCame;
  with_type(step->type, [&](auto *of) {
    missing = run_branches<std::remove_pointer_t<decltype(of)>>(branches, first, last, *step);
  });
  return missing;
}

void oarlock_finish_branch(const Branch *branch, const LayerStep *step) {
  with_type(step->type, [&](auto *of) {
    run<std::remove_pointer_t<decltype(of)>>(*branch, *step, branch->before_sum, branch->count);
  });
}
