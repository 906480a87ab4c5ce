// Packing of weights [columns, inputs] into the order in which the matmuls of gemm.h read them:
// [panels][inputs][kPanel], bfloat16 [panels][inputs / 2][kPanel][2]. The last panel and an odd last input are padded
// with zeros. With slices: [panels][slices][inputs of a slice]..., each slice padded separately.
#include <algorithm>
#include <type_traits>

#include "gemm/gemm.h"

namespace {

using gemm::kPanel;
using gemm::row_of;

template <class T>
constexpr long kStep = std::is_same_v<T, BFloat16> ? 2 : 1;

template <class T>
long padded(long inputs) {
  return (inputs + kStep<T> - 1) / kStep<T> * kStep<T>;
}

template <class T>
void pack(const T *weight, T *packed, long columns, long inputs, long stride, bool gated, long slices) {
  const long width = gated ? simd::kLanes : kPanel, outputs = gated ? columns / 2 : columns;
  const long panels = (outputs + width - 1) / width, length = inputs / slices, steps = padded<T>(length) / kStep<T>;
  constexpr long kAtOnce = 64 / (kStep<T> * sizeof(T));  // steps in one cache line of a row
#pragma omp parallel for schedule(static)
  for (long part = 0; part < panels * slices; part++) {
    T *to = packed + part * steps * kStep<T> * kPanel;
    const T *rows[kPanel];
    for (int output = 0; output < kPanel; output++) {
      const long row = row_of(part / slices, output, columns, gated);
      rows[output] = row < 0 ? nullptr : weight + row * stride + part % slices * length;
    }
    // One cache line of every row at a time, so each is read from memory once.
    for (long begin = 0; begin < steps; begin += kAtOnce) {
      const long end = std::min(begin + kAtOnce, steps);
      for (int output = 0; output < kPanel; output++)
        for (long s = begin; s < end; s++)
          for (long i = 0; i < kStep<T>; i++) {
            const long k = s * kStep<T> + i;
            to[(s * kPanel + output) * kStep<T> + i] = rows[output] && k < length ? rows[output][k] : T{};
          }
    }
  }
}

// Read rows `ids` of a packed weight (neither gated nor sliced), for an embedding that shares the memory of the head.
template <class T>
void unpack_rows(const T *packed, const int64_t *ids, T *rows, long count, long inputs) {
  const long size = padded<T>(inputs) * kPanel;
#pragma omp parallel for if (count >= 16)
  for (long i = 0; i < count; i++) {
    const T *from = packed + ids[i] / kPanel * size + ids[i] % kPanel * kStep<T>;
    for (long k = 0; k < inputs; k++) rows[i * inputs + k] = from[k / kStep<T> * kStep<T> * kPanel + k % kStep<T>];
  }
}

}  // namespace

extern "C" long oarlock_panel() { return kPanel; }

// Return the number of elements of `packed`. Rows of `weight` are `stride` elements apart.
extern "C" long oarlock_packed_size(long columns, long inputs, int gated, int type, long slices) {
  const long width = gated ? simd::kLanes : kPanel, outputs = gated ? columns / 2 : columns;
  const long length = inputs / slices;
  return (outputs + width - 1) / width * kPanel * slices * (type == kBFloat16 ? padded<BFloat16>(length) : length);
}

extern "C" void oarlock_pack(const void *weight, void *packed, long columns, long inputs, long stride, int gated, int type,
                             long slices) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    pack(static_cast<const T *>(weight), static_cast<T *>(packed), columns, inputs, stride, gated != 0, slices);
  });
}

extern "C" void oarlock_unpack_rows(const void *packed, const int64_t *ids, void *rows, long count, long inputs, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    unpack_rows(static_cast<const T *>(packed), ids, static_cast<T *>(rows), count, inputs);
  });
}
