// y_h = x_h w_h^T for each head h. The rows of all heads are packed first. Then threads take panels of outputs, one
// head after the other, in the order of the weights in memory. A panel has the bits of the matmul with one matrix
// (gemm.cpp), so the bits of a row depend neither on the other rows and heads nor on the number of threads.
#include "gemm/heads.h"

#include <algorithm>
#include <numeric>

#include "gemm/epilogue.h"
#include "gemm/panel_rows.h"
#include "gemm/shares.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"

extern "C" long oarlock_packed_size(long columns, long inputs, int gated, int type, long slices);

namespace gemm {
namespace {

constexpr long kMostPacked = 1 << 21;  // elements of x that are packed at a time, unless a row of all heads has more

// Multiply at most kMostRows rows.
template <class T>
void multiply_some(const HeadMatmul &matmul, const T *x, HeadStrides from, T *y, HeadStrides to, long rows) {
  const Arena::Mark mark = arena().mark();
  const long panels = (matmul.columns + kPanel - 1) / kPanel;
  const long size = oarlock_packed_size(matmul.columns, matmul.inputs, 0, number_of(static_cast<T *>(nullptr)), 1);
  auto *args = arena().take<MatmulArgs>(matmul.heads);
  auto **packed = arena().take<PanelRows *>(matmul.heads);
  auto *own = arena().take<int32_t>(rows);
  std::iota(own, own + rows, 0);
  for (long head = 0; head < matmul.heads; head++) {
    const T *weight = static_cast<const T *>(matmul.weight) + head * size;
    args[head] = {nullptr, weight, nullptr, nullptr, y + head * to.head, rows, matmul.columns, matmul.inputs,
                  from.row, to.row, kPlain};
    packed[head] = dense_panel_rows<T>(args[head]);
  }
  const long strips = packed[0]->strips;
  const Shares shares(matmul.heads * panels);
#pragma omp parallel
  {
    alignas(64) float sums[kMostRows * kPanel];
#pragma omp for schedule(static)
    for (long i = 0; i < matmul.heads * strips; i++)
      packed[i / strips]->pack(i % strips, x + i / strips * from.head, from.row, own);
    shares.visit([&](long piece) {
      const long head = piece / panels, panel = piece % panels;
      packed[head]->multiply(panel, 0, sums);
      for (long r = 0; r < rows; r++)
        finish<T>(args[head], r, panel, load(sums + r * kPanel), load(sums + r * kPanel + kLanes));
    });
  }
  arena().release(mark);
}

}  // namespace

template <class T>
void multiply_heads(const HeadMatmul &matmul, const T *x, HeadStrides from, T *y, HeadStrides to, long rows) {
  const long most = std::clamp(kMostPacked / (matmul.heads * matmul.inputs), 1L, kMostRows);
  for (long row = 0; row < rows; row += most)
    multiply_some(matmul, x + row * from.row, from, y + row * to.row, to, std::min(most, rows - row));
}

#define OARLOCK_MULTIPLY_HEADS(T) \
  template void multiply_heads<T>(const HeadMatmul &, const T *, HeadStrides, T *, HeadStrides, long);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MULTIPLY_HEADS)

}  // namespace gemm

// Strides in elements. y has `y_row` elements in a row and `y_head` elements from one head to the next.
extern "C" void oarlock_multiply_heads(const gemm::HeadMatmul *matmul, const void *x, long x_row, long x_head, void *y,
                                       long y_row, long y_head, long rows, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    gemm::multiply_heads(*matmul, static_cast<const T *>(x), {x_row, x_head}, static_cast<T *>(y), {y_row, y_head},
                         rows);
  });
}
