// The halves of a decoder layer (see layer.h).
#include "layer/layer.h"

#include <algorithm>
#include <type_traits>

#include "elementwise/norm.h"
#include "elementwise/rotary.h"
#include "runtime/arena.h"

namespace {

constexpr long kRowsAtOnce = 960;  // rows at a time between the products of an MLP, so that scratch memory stays small
constexpr long kWidestHead = 256;

gemm::Product product(const PackedWeight &w, const void *x, void *y, long rows, long y_stride) {
  return {x, w.weight, w.bias, nullptr, y, rows, w.columns, w.inputs, w.inputs, y_stride, w.epilogue, w.slices};
}

template <class T>
void multiply(const PackedWeight &w, const gemm::Product &p) {
  if (w.kind == gemm::kDense) gemm::multiply<T>(p);
  else if (w.kind == gemm::kInt8 || w.kind == gemm::kInt8Dot) gemm::multiply_int8<T>(p, w.kind);
  else if (w.kind == gemm::kFloat8) gemm::multiply_fp8<T>(p);
  else gemm::multiply_grouped<T>(p, w.kind);
}

template <class T>
T *hidden_at(const LayerHalf &half, const LayerStep &step, long row) {
  return static_cast<T *>(step.hidden) + row * half.in.inputs;
}

// to += x: [count], rounded once.
template <class T>
void add(T *to, const T *x, long count) {
  using namespace simd;
  for (long d = 0; d < count; d += kLanes) store(to + d, load(x + d, count - d) + load(to + d, count - d), count - d);
}

// The first product of a half, of `rows` normed rows of `hidden` from `first` on: y [rows, y_stride].
template <class T>
void enter(const LayerHalf &half, const LayerStep &step, long first, long rows, T *y, long y_stride) {
  const long width = half.in.inputs;
  const Arena::Mark mark = arena().mark();
  T *x = arena().take<T>(rows * width);
  rms_norm(hidden_at<T>(half, step, first), half.norm, x, rows, 1, width, width, half.eps);
  multiply<T>(half.in, product(half.in, x, y, rows, y_stride));
  arena().release(mark);
}

// hidden += x, or with a norm of the result += its norm: x [rows, hidden size], whose contents are lost.
template <class T>
void add_rows(const LayerHalf &half, const LayerStep &step, long first, long rows, T *x) {
  const long width = half.out.columns;
#pragma omp parallel for if (rows * width > kSerial)
  for (long row = 0; row < rows; row++) {
    T *from = x + row * width;
    if (half.post_norm) rms_norm_row(from, half.post_norm, from, width, half.eps);
    add(hidden_at<T>(half, step, first + row), from, width);
  }
}

// The second product of a half, of x [rows, inputs], and what becomes of its result.
template <class T>
void leave(const LayerHalf &half, const LayerStep &step, long first, long rows, const T *x) {
  const long width = half.out.columns;
  gemm::Product p = product(half.out, x, hidden_at<T>(half, step, first), rows, width);
  if (half.out.epilogue == gemm::kFloat) {
    p.y = step.partial + first * width;
    p.bias = nullptr;
    multiply<T>(half.out, p);
  } else if (!half.post_norm) {
    p.residual = p.y;  // each element is read once, just before it is written
    p.epilogue = gemm::kAdd;
    multiply<T>(half.out, p);
  } else {
    const Arena::Mark mark = arena().mark();
    T *y = arena().take<T>(rows * width);
    p.y = y;
    multiply<T>(half.out, p);
    add_rows(half, step, first, rows, y);
    arena().release(mark);
  }
}

// Norms, if the layer has such norms, and rotates the query and key heads of qkv [rows, stride] in place.
template <class T>
void rotate_heads(const AttentionHalf &layer, const LayerStep &step, T *qkv, long stride) {
  const long width = layer.attention->head_dim, heads = layer.attention->heads + layer.attention->kv_heads;
  const RotaryRows &rotary = step.rotary[layer.rotary];
  const long half = rotary.width / 2;
#pragma omp parallel for if (step.rows * heads * width > kSerial)
  for (long row = 0; row < step.rows; row++) {
    const float *cos = rotary.rows + step.positions[row] * rotary.width, *sin = cos + half;
    for (long head = 0; head < heads; head++) {
      T *x = qkv + row * stride + head * width;
      if (layer.head_norm) {
        alignas(64) float normed[kWidestHead];
        rms_norm_row(x, layer.head_norm + head * width, normed, width, layer.half.eps);
        rotate_head(normed, cos, sin, x, width, half);
      } else {
        rotate_head(x, cos, sin, x, width, half);
      }
    }
  }
}

template <class T>
void attention_half(const AttentionHalf &layer, const LayerStep &step) {
  const AttentionLayer &a = *layer.attention;
  const long stride = layer.half.in.columns, mixed_width = a.heads * a.head_dim;
  const Arena::Mark mark = arena().mark();
  T *qkv = arena().take<T>(step.rows * stride);
  enter(layer.half, step, 0, step.rows, qkv, stride);
  rotate_heads(layer, step, qkv, stride);
  const T *k = qkv + mixed_width, *v = k + a.kv_heads * a.head_dim;
  write_kv(a, k, stride, v, stride, layer.k_pages, layer.v_pages, step.slots, step.rows);
  T *mixed = arena().take<T>(step.rows * mixed_width);
  attend<T>(*step.attention, a, qkv, stride, mixed, mixed_width, layer.k_pages, layer.v_pages);
  leave(layer.half, step, 0, step.rows, mixed);
  arena().release(mark);
}

template <class T>
void mlp_half(const LayerHalf &mlp, const LayerStep &step) {
  const long width = mlp.out.inputs;
  const Arena::Mark mark = arena().mark();
  T *gated = arena().take<T>(std::min(kRowsAtOnce, step.rows) * width);
  for (long first = 0; first < step.rows; first += kRowsAtOnce) {
    const long rows = std::min(kRowsAtOnce, step.rows - first);
    enter(mlp, step, first, rows, gated, width);
    leave(mlp, step, first, rows, gated);
  }
  arena().release(mark);
}

template <class T>
void add_total(const LayerHalf &half, const LayerStep &step, const float *total) {
  using namespace simd;
  const long width = half.out.columns;
  const Arena::Mark mark = arena().mark();
  T *x = half.post_norm ? arena().take<T>(step.rows * width) : nullptr;
  const T *bias = static_cast<const T *>(half.out.bias);
#pragma omp parallel for if (step.rows * width > kSerial)
  for (long row = 0; row < step.rows; row++) {
    const float *from = total + row * width;
    // In the order of a single rank's epilogue. A norm of the result reads what its product would be: rounded.
    T *to = x ? x + row * width : hidden_at<T>(half, step, row);
    for (long d = 0; d < width; d += kLanes) {
      Vec sum = load(from + d, width - d);
      if (bias) sum = sum + load(bias + d, width - d);
      if (!x) sum = sum + load(to + d, width - d);
      store(to + d, sum, width - d);
    }
  }
  if (x) add_rows(half, step, 0, step.rows, x);
  arena().release(mark);
}

// The sum over ranks at the end of a half, where kernels compute it.
int finish(const LayerHalf &half, const LayerStep &step) {
  if (!step.group) return kAllCame;
  const int missing = all_reduce(*step.group, step.partial, step.rows * half.out.columns);
  if (missing == kAllCame) oarlock_add_total(&half, &step, step.partial);
  return missing;
}

}  // namespace

int oarlock_attention_half(const AttentionHalf *attention, const LayerStep *step) {
  with_type(attention->half.type,
            [&](auto *of) { attention_half<std::remove_pointer_t<decltype(of)>>(*attention, *step); });
  return finish(attention->half, *step);
}

int oarlock_mlp_half(const LayerHalf *mlp, const LayerStep *step) {
  with_type(mlp->type, [&](auto *of) { mlp_half<std::remove_pointer_t<decltype(of)>>(*mlp, *step); });
  return finish(*mlp, *step);
}

void oarlock_add_total(const LayerHalf *half, const LayerStep *step, const float *total) {
  with_type(half->type, [&](auto *of) { add_total<std::remove_pointer_t<decltype(of)>>(*half, *step, total); });
}
