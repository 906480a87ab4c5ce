#ifdef __AVX512BF16__
// y = epilogue(x w^T + bias) with bfloat16 weights that are read once from memory, for any number of rows.
//
// The weight is packed as [N / 32][K / 2][32][2]: one 64-byte load holds two neighbouring inputs of sixteen outputs, the
// operand of `vdpbf16ps`. A tile keeps the sums of up to 12 rows x 32 outputs in registers and adds along K once, pair
// by pair. So the order of additions of an output depends on K alone: the bits of a row do not depend on the other rows
// of the batch, on their number, or on the number of threads.
//
// A gated product packs 16 rows of gate beside 16 rows of up in each panel, so one tile holds both factors.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "old_vector_math.h"
#include "old_vector_memory.h"

namespace {

constexpr int kPanel = 32;    // outputs per packed panel
constexpr int kRows = 12;     // rows per tile: 24 accumulators of the 32 registers
constexpr int kAhead = 2048;  // bytes of weights fetched ahead: hardware prefetching stops at page borders

enum Epilogue { kPlain = 0, kAdd = 1, kFloat = 2, kSiluGate = 3, kGeluTanhGate = 4 };

struct Product {
  const uint16_t *x;    // [M, K], rows `x_stride` apart
  const uint16_t *w;    // packed
  const uint16_t *bias; // [N] in the packed order, or null
  const uint16_t *residual;  // [M, N], rows `y_stride` apart; only kAdd
  void *y;              // [M, N] (gated: [M, N / 2]), rows `y_stride` apart
  long rows, columns, inputs, x_stride, y_stride;
  int epilogue;
};

// The epilogue of one row's 32 sums: adds the bias, applies what `epilogue` says, rounds and stores.
inline void finish(const Product &p, long row, long panel, __m512 low, __m512 high) {
  const long column = panel * kPanel;
  const bool gated = p.epilogue == kSiluGate || p.epilogue == kGeluTanhGate;
  const long count = gated ? kPanel : p.columns - column;  // a gated bias is padded to whole panels, as the weight is
  const __mmask16 left = first(count), right = first(count > 16 ? count - 16 : 0);
  if (p.bias) {
    low = _mm512_add_ps(low, load(p.bias + column, left));
    high = _mm512_add_ps(high, load(p.bias + column + 16, right));
  }
  const long at = row * p.y_stride + column;
  switch (p.epilogue) {
    case kFloat: {
      float *y = static_cast<float *>(p.y) + at;
      store(y, left, low);
      store(y + 16, right, high);
      return;
    }
    case kSiluGate:
    case kGeluTanhGate: {
      const long half = panel * (kPanel / 2);
      const __m512 gate = p.epilogue == kSiluGate ? silu(low) : gelu_tanh(low);
      store(static_cast<uint16_t *>(p.y) + row * p.y_stride + half, first(p.columns / 2 - half), _mm512_mul_ps(gate, high));
      return;
    }
    case kAdd:
      low = _mm512_add_ps(low, load(p.residual + at, left));
      high = _mm512_add_ps(high, load(p.residual + at + 16, right));
      [[fallthrough]];
    default:
      store(static_cast<uint16_t *>(p.y) + at, left, low);
      store(static_cast<uint16_t *>(p.y) + at + 16, right, high);
  }
}

// The products of R rows and one panel. Meanwhile it prefetches from `fetch` on, `step` bytes for each pair of inputs.
template <int R>
void tile(const Product &p, long row, long panel, const char *fetch, long step) {
  const uint16_t *w = p.w + panel * kPanel * p.inputs;
  const uint16_t *x = p.x + row * p.x_stride;
  __m512 low[R], high[R];
  for (int r = 0; r < R; r++) low[r] = high[r] = _mm512_setzero_ps();
  for (long k = 0; k < p.inputs; k += 2, w += 2 * kPanel, fetch += step) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + kPanel);
    _mm_prefetch(fetch, _MM_HINT_T0);
    _mm_prefetch(fetch + 64, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * p.x_stride + k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      low[r] = _mm512_dpbf16_ps(low[r], w0, both);
      high[r] = _mm512_dpbf16_ps(high[r], w1, both);
    }
  }
  for (int r = 0; r < R; r++) finish(p, row + r, panel, low[r], high[r]);
}

using Tile = void (*)(const Product &, long, long, const char *, long);
constexpr Tile kTiles[kRows + 1] = {nullptr,  tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>, tile<6>,
                                    tile<7>,  tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};

}  // namespace

extern "C" void oarlock_pack(const uint16_t *weight, uint16_t *packed, long columns, long inputs, int gated) {
  // `packed` holds ceil(columns / 32) * 32 * inputs elements. Gated: rows 0 .. columns / 2 are gate, the others up.
  const long panels = (columns + kPanel - 1) / kPanel, half = columns / 2;
#pragma omp parallel for
  for (long panel = 0; panel < panels; panel++) {
    uint16_t *to = packed + panel * kPanel * inputs;
    for (int output = 0; output < kPanel; output++) {
      long row = panel * kPanel + output;
      bool inside = row < columns;
      if (gated) {
        const long index = panel * (kPanel / 2) + output % 16;
        inside = index < half;
        row = output < 16 ? index : half + index;
      }
      for (long k = 0; k < inputs; k++)
        to[(k / 2) * 2 * kPanel + output * 2 + k % 2] = inside ? weight[row * inputs + k] : 0;
    }
  }
}

// Rows of a weight that was packed (not gated) by `oarlock_pack`: an embedding that shares the head's memory.
extern "C" void oarlock_unpack_rows(const uint16_t *packed, const int64_t *ids, uint16_t *rows, long count, long inputs) {
#pragma omp parallel for if (count >= 16)
  for (long i = 0; i < count; i++) {
    const uint16_t *from = packed + ids[i] / kPanel * kPanel * inputs + ids[i] % kPanel * 2;
    for (long k = 0; k < inputs; k += 2, from += 2 * kPanel) __builtin_memcpy(rows + i * inputs + k, from, 4);
  }
}

extern "C" void oarlock_gemm(const uint16_t *x, const uint16_t *w, const uint16_t *bias, const uint16_t *residual, void *y,
                             long rows, long columns, long inputs, long x_stride, long y_stride, int epilogue) {
  const Product p{x, w, bias, residual, y, rows, columns, inputs, x_stride, y_stride, epilogue};
  const long panels = (columns + kPanel - 1) / kPanel;
  const long blocks = (rows + kRows - 1) / kRows;
  const long bytes = kPanel * inputs * sizeof *w, pair = 2 * kPanel * sizeof *w;
  // With one block of rows the panel is read from memory and prefetched a little ahead. With more, the panel stays in
  // the second-level cache for the later blocks, which prefetch the next panel: reading and arithmetic overlap.
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < panels; panel++) {
    const char *here = reinterpret_cast<const char *>(w) + panel * bytes, *next = panel + 1 < panels ? here + bytes : here;
    long row = 0;
    for (long block = 0; block < blocks; block++) {
      const long count = (rows - row + blocks - block - 1) / (blocks - block);  // blocks of about equal size
      if (block == 0) kTiles[count](p, row, panel, here + kAhead, pair);
      else kTiles[count](p, row, panel, next + bytes / (blocks - 1) * (block - 1), pair / (blocks - 1));
      row += count;
    }
  }
}
#endif
