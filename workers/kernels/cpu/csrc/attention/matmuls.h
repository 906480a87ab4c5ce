// The two matmuls of attention over one span of positions, for 1 to simd::kTileRows rows at a time. The sums of all
// rows stay in registers while keys or values are read once. A row is summed in the same order for any number of rows.
#pragma once
#include <type_traits>
#include <utility>

#include "attention/pages.h"

namespace {

using simd::kRegisters, simd::kTileRows;

constexpr int kSpan = 256;                 // positions per softmax
constexpr int kVectors = kGroup / kLanes;  // registers that one element takes for all positions of a group

#ifdef OARLOCK_BF16_DOT
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

// Matmul parameters of a dtype. Left: dtype of queries and weights, the left factors. kStep: s of the page layout.
// kElements, kPositions: length of a chain of additions before its sum is added to the total. Longer chains would lose
// digits that bfloat16 does not have, but the other dtypes do.
template <class T>
struct Format {
  using Left = float;
  static constexpr int kStep = 1, kElements = 16, kPositions = 64;
};

template <>
struct Format<BFloat16> {
  using Left = std::conditional_t<kHasDot, BFloat16, float>;
  static constexpr int kStep = 2, kElements = 256, kPositions = kSpan;
};

template <class T>
using Left = typename Format<T>::Left;

// Add to sum[r][c] the C registers at from[c] times the left factors x[r * Stride] (for pairs also x[r * Stride + 1]).
template <class T, int R, int C, int Stride>
inline __attribute__((always_inline)) void add_products(Vec (&sum)[R][C], const T *const (&from)[C],
                                                        const Left<T> *x) {
  if constexpr (std::is_same_v<Left<T>, BFloat16>) {
    simd::Pairs w[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) w[c] = simd::load_pairs(from[c]);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const simd::Pairs left = simd::broadcast_pair(x + r * Stride);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = simd::add_products(sum[r][c], w[c], left);
    }
  } else {
#pragma GCC unroll 2
    for (int part = 0; part < Format<T>::kStep; part++) {
      Vec w[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        if constexpr (Format<T>::kStep == 1) w[c] = simd::load(from[c]);
        else w[c] = part ? simd::upper(simd::load_pairs(from[c])) : simd::lower(simd::load_pairs(from[c]));
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const Vec left = simd::broadcast(x[r * Stride + part]);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[r][c] = simd::fma(w[c], left, sum[r][c]);
      }
    }
  }
}

// Pages are scattered in memory, so hardware prefetching does not help. Each matmul prefetches the next data while it
// computes, a little at a time. It prefetches the same number of elements as it reads, of `item` bytes each.

// Prefetch the cache lines of C registers.
template <class T, int C>
inline __attribute__((always_inline)) void prefetch(const uint8_t *from, long item) {
  constexpr int kBytes = C * kLanes * Format<T>::kStep * sizeof(T);
#pragma GCC unroll 4
  for (int at = 0; at < kBytes; at += 64) simd::prefetch(from + at / static_cast<int>(sizeof(T)) * item);
}

// Compute the scores of R rows and C registers of positions: to[r * kSpan + 0 .. C * kLanes). Add to the previous
// scores if `adds` is set. q [R][kMaxHead]; k [C]: the addresses of these positions at d = 0; next [2 * groups]: keys
// and values to prefetch.
template <class T, int R, int C>
void score(const Left<T> *q, const T *const *k, long width, float *to, const uint8_t *const *next, long item,
           bool adds) {
  constexpr int kStep = Format<T>::kStep, kElements = Format<T>::kElements;
  constexpr int kGroups = C > kVectors ? C / kVectors : 1;
  for (long begin = 0; begin < width; begin += kElements) {
    const long end = width < begin + kElements ? width : begin + kElements;
    Vec sum[R][C];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = simd::zero();
    for (long d = begin; d < end; d += kStep) {
      const T *from[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) from[c] = k[c] + d * kGroup;
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kGroups; i++) simd::prefetch(next[i] + d * kGroup * item);
      add_products<T, R, C, kMaxHead>(sum, from, q + d);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        float *at = to + r * kSpan + c * kLanes;
        simd::store(at, begin || adds ? simd::load(at) + sum[r][c] : sum[r][c]);
      }
  }
}

// Compute weights [R][kSpan] @ values v over `groups` groups of positions: sum[r * stride + d + 0 .. C * kLanes). Add
// to the previous sums if `adds` is set. width: elements of a value in `v`; next [groups]: groups of keys or values to
// prefetch.
template <class T, int R, int C>
void weighted_sum(const Left<T> *weights, const T *const *v, const uint8_t *const *next, long item, long groups,
                  long width, long d, bool adds, float *sum, long stride) {
  constexpr int kStep = Format<T>::kStep;
  Vec part[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) part[r][c] = simd::zero();
  for (long g = 0; g < groups; g++) {
    const T *at = v[g] + d * kStep;
    const uint8_t *ahead = next[g] + d * kStep * item;
    for (int j = 0; j < kGroup; j += kStep, at += width * kStep, ahead += width * kStep * item) {
      const T *from[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) from[c] = at + c * kLanes * kStep;
      prefetch<T, C>(ahead, item);
      add_products<T, R, C, kSpan>(part, from, weights + g * kGroup + j);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      float *to = sum + r * stride + d + c * kLanes;
      simd::store(to, adds ? simd::load(to) + part[r][c] : part[r][c]);
    }
}

// The matmul kernels for R rows. With fewer rows, a kernel takes more registers of positions or elements, to keep the
// multipliers busy.
template <class T>
struct Matmuls {
  int columns;
  void (*score)(const Left<T> *, const T *const *, long, float *, const uint8_t *const *, long, bool);
  using WeightedSum = void (*)(const Left<T> *, const T *const *, const uint8_t *const *, long, long, long, long, bool,
                               float *, long);
  WeightedSum wide, narrow;  // kernels for `columns` registers, and for 16 elements
};

template <class T, int R>
constexpr Matmuls<T> matmuls_of() {
  constexpr int kColumns = R * 4 + 4 + 1 <= kRegisters ? 4 : 2;
  constexpr int kNarrow = kVectors < kColumns ? kVectors : kColumns;
  return {kColumns, score<T, R, kColumns>, weighted_sum<T, R, kColumns>, weighted_sum<T, R, kNarrow>};
}

template <class T, int... R>
const Matmuls<T> &matmuls(int rows, std::integer_sequence<int, R...>) {
  static constexpr Matmuls<T> kAll[] = {matmuls_of<T, R + 1>()...};
  return kAll[rows - 1];
}

template <class T>
const Matmuls<T> &matmuls(int rows) {
  return matmuls<T>(rows, std::make_integer_sequence<int, kTileRows>());
}

}  // namespace
