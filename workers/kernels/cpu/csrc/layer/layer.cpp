// Execution of the branches of a decoder's layers (see layer.h).
#include "layer/layer.h"

#include <algorithm>
#include <type_traits>

#include "elementwise/heads.h"
#include "elementwise/layer_norm.h"
#include "elementwise/norm.h"
#include "elementwise/rotary.h"
#include "layer/adapted_rows.h"
#include "layer/head_rows.h"
#include "layer/latent_rows.h"
#include "layer/matmul_rows.h"
#include "layer/recurrent_rows.h"
#include "layer/row_chunk.h"
#include "runtime/arena.h"

namespace {

template <class T>
void apply_norm(const Norm &norm, const T *x, T *y, long rows) {
  if (norm.is_layer_norm) layer_norm(x, norm.scale, norm.shift, y, rows, norm.width, norm.eps);
  else rms_norm(x, norm.scale, y, rows, 1, norm.width, norm.width, norm.eps);
}

template <class T>
void norm_rows(const RowChunk<T> &chunk, const Operation &op) {
  apply_norm(*static_cast<const Norm *>(op.parameters), chunk.at(op.source), chunk.at(op.target), chunk.rows);
}

template <class T>
void multiply(const RowChunk<T> &chunk, const Operation &op) {
  const PackedWeight &w = *static_cast<const PackedWeight *>(op.parameters);
  run_matmul<T>(matmul_of(chunk, op.source, op.target, w), w.kind);
}

template <class T>
void clamp_rows(const RowChunk<T> &chunk, const Operation &op) {
  using namespace simd;
  const Clamp &clamp = *static_cast<const Clamp *>(op.parameters);
  const long width = clamp.width;
  const Vec most = broadcast(clamp.limit), least = broadcast(-clamp.limit);
  T *x = chunk.at(op.target);
#pragma omp parallel for if (chunk.rows * width > kSerial)
  for (long row = 0; row < chunk.rows; row++) {
    T *to = x + row * width;
    for (long d = 0; d < width; d += kLanes)  // NaN stays NaN, as the second operand
      store(to + d, max(least, min(most, load(to + d, width - d))), width - d);
  }
}

// Return the number of elements of a row of queries, keys and values.
long row_width(const HeadsAndPages &layer) {
  const AttentionLayer &a = *layer.attention;
  return a.heads * a.head_dim + (layer.has_keys ? a.kv_heads * (a.head_dim + a.value_dim) : 0);
}

template <class T>
int apply_rope(const RowChunk<T> &chunk, const Operation &op) {
  const HeadsAndPages &layer = *static_cast<const HeadsAndPages *>(op.parameters);
  const AttentionLayer &a = *layer.attention;
  const long width = a.head_dim, heads = a.heads + (layer.has_keys ? a.kv_heads : 0), stride = row_width(layer);
  const RotaryRows none{nullptr, 0};
  const RotaryRows &rotary = layer.rotary < 0 ? none : chunk.step.rotary[layer.rotary];
  const long half = rotary.width / 2;
  const float *scales = layer.query_scale < 0 ? nullptr : chunk.step.query_scales[layer.query_scale] + chunk.first;
  const bool finishes = scales || (layer.head_norm && layer.norms_last);
  T *qkv = chunk.at(op.target);
  const Arena::Mark mark = arena().mark();
  float *squares = nullptr;
  if (const HeadsOfRank *of = layer.row_norm) {
    squares = arena().take<float>(chunk.rows * of->all());
    squares_of_heads(*of, qkv, squares, chunk.rows, width, stride);
    const int missing = chunk.step.group ? all_reduce(*chunk.step.group, squares, chunk.rows * of->all()) : kAllArrived;
    if (missing != kAllArrived) return missing;
  }
#pragma omp parallel for if (chunk.rows * heads * width > kSerial)
  for (long row = 0; row < chunk.rows; row++) {
    const float *cos = rotary.rows + chunk.step.positions[chunk.first + row] * rotary.width, *sin = cos + half;
    const auto rotated = [&](const auto *x, T *y) {
      if (layer.interleaved) rotate_neighbours<kWidestHead>(x, cos, sin, y, width, half);
      else rotate_head(x, cos, sin, y, width, half);
    };
    float factors[2];
    if (squares) row_factors(*layer.row_norm, squares + row * layer.row_norm->all(), width, layer.eps, factors);
    for (long head = 0; head < heads; head++) {
      T *x = qkv + row * stride + head * width;
      const float *norm = layer.head_norm ? layer.head_norm + head * width : nullptr;
      const HeadFinish finish{half ? cos : nullptr, sin, half, layer.interleaved, layer.norms_last ? norm : nullptr,
                              layer.eps, scales && head < a.heads ? scales[row] : 1.0f};
      if (!norm || layer.norms_last) {
        if (finishes) finish_head(finish, x, x, width);
        else rotated(x, x);
        continue;
      }
      alignas(64) float normed[kWidestHead];
      if (squares) scale_row(x, factors[head >= a.heads], norm, normed, width);
      else rms_norm_row(x, norm, normed, width, layer.eps);
      if (finishes) finish_head(finish, normed, x, width);
      else rotated(normed, x);
    }
  }
  arena().release(mark);
  return kAllArrived;
}

template <class T>
void attend_rows(const RowChunk<T> &chunk, const Operation &op) {
  const HeadsAndPages &layer = *static_cast<const HeadsAndPages *>(op.parameters);
  const AttentionLayer &a = *layer.attention;
  const long stride = row_width(layer);
  const T *qkv = chunk.at(op.source), *k = qkv + a.heads * a.head_dim, *v = k + a.kv_heads * a.head_dim;
  const NewRows<T> rows{k, stride, v, stride, chunk.step.slots[layer.pages], chunk.rows};
  attend<T>(*chunk.step.attention[layer.pages], a, qkv, stride, chunk.at(op.target), a.heads * a.value_dim,
            layer.k_pages, layer.v_pages, layer.sinks, layer.has_keys ? &rows : nullptr);
}

template <class T>
void gate(const RowChunk<T> &chunk, const Operation &op) {
  const AttentionLayer &a = *static_cast<const HeadsAndPages *>(op.parameters)->attention;
  gate_rows(chunk.at(op.target), chunk.at(op.source), chunk.rows, a.heads * a.value_dim);
}

template <class T>
void finish_matmul(const RowChunk<T> &chunk, const Operation &op) {
  using namespace simd;
  const PackedWeight &w = *static_cast<const PackedWeight *>(op.parameters);
  const long width = w.columns;
  const T *bias = static_cast<const T *>(w.bias);
  const float *total = chunk.step.partial + chunk.first * width;
  const bool adds = op.target == kResidual;
  T *y = chunk.at(op.target);
#pragma omp parallel for if (chunk.rows * width > kSerial)
  for (long row = 0; row < chunk.rows; row++) {
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
void add_rows(const RowChunk<T> &chunk, const Operation &op) {
  using namespace simd;
  const Addition &addition = *static_cast<const Addition *>(op.parameters);
  const long width = addition.width;
  const Vec scale = broadcast(addition.scale);
  T *x = chunk.at(op.source), *hidden = chunk.at(kResidual);
#pragma omp parallel for if (chunk.rows * width > kSerial)
  for (long row = 0; row < chunk.rows; row++) {
    T *from = x + row * width, *to = hidden + row * width;
    if (const Norm *norm = addition.norm) {
      if (norm->is_layer_norm) layer_norm_row(from, norm->scale, norm->shift, from, width, norm->eps);
      else rms_norm_row(from, norm->scale, from, width, norm->eps);
    }
    for (long d = 0; d < width; d += kLanes)
      store(to + d, load(to + d, width - d) + rounded_product(load(from + d, width - d), scale), width - d);
  }
}

// Store the sum of the weights of each row's experts whose result is their input, in the order of their ids.
void sum_identities(const MoELayer &layer, const int32_t *ids, const float *weights, long rows, float *sums) {
  const long top_k = layer.router->top_k;
  for (long row = 0; row < rows; row++) {
    sums[row] = 0.0f;
    for (long i = row * top_k; i < (row + 1) * top_k; i++)
      if (ids[i] >= layer.first_identity) sums[row] += weights[i];
  }
}

template <class T>
void run_experts(const RowChunk<T> &chunk, const Operation &op) {
  const MoELayer &layer = *static_cast<const MoELayer *>(op.parameters);
  const Router &router = *layer.router;
  const long rows = chunk.rows;
  const T *x = chunk.at(op.source);
  const Arena::Mark mark = arena().mark();
  float *logits = arena().take<float>(rows * router.outputs), *weights = arena().take<float>(rows * router.top_k);
  int32_t *ids = arena().take<int32_t>(rows * router.top_k);
  T *normed = layer.router_norm || layer.norm ? arena().take<T>(rows * router.hidden) : nullptr;
  if (layer.router_norm) apply_norm(*layer.router_norm, x, normed, rows);
  router_logits(router, layer.router_norm ? normed : x, router.hidden, rows, logits);
  route(router, logits, rows, ids, weights);
  if (layer.expert_scale)
    for (long i = 0; i < rows * router.top_k; i++) weights[i] *= layer.expert_scale[ids[i]];
  if (layer.first_identity >= 0)
    sum_identities(layer, ids, weights, rows, chunk.step.identity_weights + chunk.first);
  if (layer.norm) {
    apply_norm(*layer.norm, x, normed, rows);
    x = normed;
  }
  const gemm::ExpertAdapters of_routed{layer.routed_pairs, chunk.step.adapters};
  gemm::multiply_experts(*layer.routed, x, router.hidden, ids, weights, rows, router.top_k, chunk.step.partial,
                         layer.routed_pairs ? &of_routed : nullptr);
  if (layer.shared) {
    std::fill_n(ids, rows, 0);
    if (layer.shared_gate) router_logits(*layer.shared_gate, x, router.hidden, rows, weights);
    for (long row = 0; row < rows; row++) weights[row] = layer.shared_gate ? sigmoid_of(weights[row]) : 1.0f;
    float *sums = chunk.step.partial + rows * router.hidden;
    const gemm::ExpertAdapters of_shared{layer.shared_pairs, chunk.step.adapters};
    gemm::multiply_experts(*layer.shared, x, router.hidden, ids, weights, rows, 1, sums,
                           layer.shared_pairs ? &of_shared : nullptr);
  }
  arena().release(mark);
}

template <class T>
void finish_experts(const RowChunk<T> &chunk, const Operation &op) {
  using namespace simd;
  const MoELayer &layer = *static_cast<const MoELayer *>(op.parameters);
  const long width = layer.router->hidden;
  const bool adds = op.target == kResidual, has_identities = layer.first_identity >= 0;
  const T *x = has_identities ? chunk.at(layer.identity_rows) : nullptr;
  T *y = chunk.at(op.target);
#pragma omp parallel for if (chunk.rows * width > kSerial)
  for (long row = 0; row < chunk.rows; row++) {
    const float *from = chunk.step.partial + row * width, *shared = from + chunk.rows * width;
    const Vec weight = broadcast(has_identities ? chunk.step.identity_weights[chunk.first + row] : 0.0f);
    T *to = y + row * width;
    for (long d = 0; d < width; d += kLanes) {
      Vec sum = load(from + d, width - d);
      if (x) sum = sum + rounded_product(load(x + row * width + d, width - d), weight);
      if (layer.shared) sum = sum + load(shared + d, width - d);
      if (adds) sum = sum + load(to + d, width - d);
      store(to + d, sum, width - d);
    }
  }
}

// Run one operation. Return kAllArrived, or the rank that did not reach an all-reduce in time.
template <class T>
int run_operation(const RowChunk<T> &chunk, const Operation &op) {
  switch (op.kind) {
    case kNormRows: norm_rows(chunk, op); break;
    case kMultiply: multiply(chunk, op); break;
    case kApplyRope: return apply_rope(chunk, op);
    case kAttend: attend_rows(chunk, op); break;
    case kFinishMatmul: finish_matmul(chunk, op); break;
    case kRunExperts: run_experts(chunk, op); break;
    case kFinishExperts: finish_experts(chunk, op); break;
    case kClampRows: clamp_rows(chunk, op); break;
    case kAddRows: add_rows(chunk, op); break;
    case kGateRows: gate(chunk, op); break;
    case kConvolve: convolve_rows(chunk, op); break;
    case kGatedDelta: run_gated_delta(chunk, op); break;
    case kKimiDelta: run_kimi_delta(chunk, op); break;
    case kMamba2: run_mamba2(chunk, op); break;
    case kGatedNorm: return norm_gated_rows(chunk, op);
    case kMultiplyColumns: multiply_columns(chunk, op); break;
    case kScaleColumns: scale_columns(chunk, op); break;
    case kNormHeads: norm_heads(chunk, op); break;
    case kGateHeads: gate_heads(chunk, op); break;
    case kAddColumns: add_columns(chunk, op); break;
    case kMultiplyAdapted: multiply_adapted(chunk, op); break;
    case kFinishAdapted: finish_adapted(chunk, op); break;
    case kPrepareLatent: prepare_latent(chunk, op); break;
    case kMultiplyHeads: multiply_heads(chunk, op); break;
    case kAttendLatent: attend_latent(chunk, op); break;
  }
  return kAllArrived;
}

// Run operations `first` to `last` of a branch, on at most `rows_at_once` rows at a time.
template <class T>
int run(const Branch &branch, const LayerStep &step, long first, long last) {
  const long most = branch.rows_at_once ? std::min(branch.rows_at_once, step.rows) : step.rows;
  const Arena::Mark mark = arena().mark();
  T *scratch[kScratchBuffers];
  for (int i = 0; i < kScratchBuffers; i++)
    scratch[i] = branch.widths[i] ? arena().take<T>(most * branch.widths[i]) : nullptr;
  int missing = kAllArrived;
  for (long row = 0; row < step.rows; row += most) {
    const long rows = std::min(most, step.rows - row);
    const RowChunk<T> chunk{step, {scratch[0], scratch[1], scratch[2], scratch[3]}, row, rows};
    for (long i = first; i < last && missing == kAllArrived; i++) missing = run_operation(chunk, branch.operations[i]);
  }
  arena().release(mark);
  return missing;
}

template <class T>
int run_branches(const Branch *branches, long first, long last, const LayerStep &step) {
  for (const Branch *branch = branches + first; branch < branches + last; branch++) {
    if (const int missing = run<T>(*branch, step, 0, branch->before_all_reduce); missing != kAllArrived) return missing;
    if (branch->before_all_reduce == branch->count || !step.group) continue;
    const long low = branch->low ? branch->low * step.adapters->starts[step.adapters->spans] : 0;
    const int missing = all_reduce(*step.group, step.partial, branch->sums * step.rows * step.width + low);
    if (missing != kAllArrived) return missing;
    run<T>(*branch, step, branch->before_all_reduce, branch->count);
  }
  return kAllArrived;
}

}  // namespace

int oarlock_run_branches(const Branch *branches, long first, long last, const LayerStep *step) {
  int missing = kAllArrived;
  with_type(step->type, [&](auto *of) {
    missing = run_branches<std::remove_pointer_t<decltype(of)>>(branches, first, last, *step);
  });
  return missing;
}

void oarlock_finish_branch(const Branch *branch, const LayerStep *step) {
  with_type(step->type, [&](auto *of) {
    run<std::remove_pointer_t<decltype(of)>>(*branch, *step, branch->before_all_reduce, branch->count);
  });
}
