// y = epilogue(x w^T + bias) with w = scale * (whole numbers from -8 to 7), a scale for each kGroup inputs of an output.
//
// Each row of x is rounded to whole numbers from -127 to 127, with a scale of its own. The products of a group are added
// up exactly, times the group's scale rounded to float32, and added to the sum of the groups before: in the order of
// inputs, whatever the rows, threads and tiles. So the bits of a row depend on that row alone, at every level of
// instruction set. The sum times the row's scale is rounded to float32, and then comes what the epilogue adds.
//
// A packed weight is a row of panels, a panel a row of groups, each: [kPanel] scales, [kGroup / 4][kLanes][4] bytes. A
// byte has the weights of two outputs, each 8 higher and so from 0 to 15: in its lower half that of a register's output,
// in its upper half that of the output kLanes further on. Sums begin with -8 times the sum of the row's numbers.
#include "gemm/int4.h"

#include <array>
#include <type_traits>
#include <utility>

#include "gemm/epilogue.h"
#include "gemm/rounded_rows.h"
#include "gemm/shares.h"
#include "runtime/arena.h"

namespace gemm {
namespace int4 {
namespace {

constexpr long kGroup = 32;               // inputs; also in workers/kernels/cpu/int4_gemm.py
constexpr int kStrip = kTileRows / 2;     // sums in float32 take as many registers as those of a group
constexpr long kChunk = 240;              // rows whose sums of one panel stay in the caches
constexpr long kFetchAhead = 2048;        // bytes of weights fetched ahead while they are read
constexpr int kZero = 8;                  // the weight 0 as it is stored
constexpr long kStepBytes = 4 * kLanes;   // weights of four inputs
constexpr long kScaleBytes = kPanel * sizeof(BFloat16);
constexpr long kGroupBytes = kScaleBytes + kGroup / 4 * kStepBytes;
static_assert(kBlock % kGroup == 0, "a block has whole groups");

long groups_of(long inputs) { return (inputs + kGroup - 1) / kGroup; }
long panel_bytes(long inputs) { return groups_of(inputs) * kGroupBytes; }

// Where a group's sums begin: [rows][groups].
struct Starts {
  int32_t *at;
  long groups;

  void compute(const RoundedRows<kStrip, 0> &x) {
#pragma omp parallel for if (x.size() > kSerialRows)
    for (long strip = 0; strip < x.strips; strip++)
      for (long r = 0; r < x.count(strip); r++)
        for (long block = 0; block < x.blocks; block++) {
          const long count = std::min(kBlock, x.inputs - block * kBlock);
          uint8_t *row = x.at(strip, block) + r * kRowBytes;
          memset(row + count, 0, groups_of(count) * kGroup - count);
          for (long group = 0; group < groups_of(count); group++) {
            int32_t total = 0;
            for (long k = 0; k < kGroup; k++) total += static_cast<int8_t>(row[group * kGroup + k]);
            at[(x.begin(strip) + r) * groups + block * (kBlock / kGroup) + group] = -kZero * total;
          }
        }
  }
};

// sums [R][kPanel] += x w over `groups` groups; if `is_first` they begin at zero. The next row's `starts` lie `stride` on.
template <class Dot, int R>
void tile(const uint8_t *x, const char *w, long groups, const int32_t *starts, long stride, bool is_first, float *sums,
          Fetch fetch) {
  Vec low[R], high[R];
  for (int r = 0; r < R; r++) {
    low[r] = is_first ? zero() : load(sums + r * kPanel);
    high[r] = is_first ? zero() : load(sums + r * kPanel + kLanes);
  }
  for (long group = 0; group < groups; group++, w += kGroupBytes, fetch.from += fetch.step) {
    for (long at = 0; at < fetch.step; at += 64) prefetch(fetch.from + at);
    Ints whole_low[R], whole_high[R];
    for (int r = 0; r < R; r++) whole_low[r] = whole_high[r] = broadcast_int(starts[r * stride + group]);
    for (long step = 0; step < kGroup / 4; step++, x += 4) {
      const Ints both = load_ints(w + kScaleBytes + step * kStepBytes);
      const Ints left = low_nibbles(both), right = high_nibbles(both);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const Ints four = broadcast_four(x + r * kRowBytes);
        whole_low[r] = Dot::add_unsigned(whole_low[r], left, four);
        whole_high[r] = Dot::add_unsigned(whole_high[r], right, four);
      }
    }
    const BFloat16 *scales = reinterpret_cast<const BFloat16 *>(w);
    const Vec left = load(scales), right = load(scales + kLanes);
    for (int r = 0; r < R; r++) {
      low[r] = low[r] + rounded_product(to_floats(whole_low[r]), left);
      high[r] = high[r] + rounded_product(to_floats(whole_high[r]), right);
    }
  }
  for (int r = 0; r < R; r++) {
    store(sums + r * kPanel, low[r]);
    store(sums + r * kPanel + kLanes, high[r]);
  }
}

using Tile = void (*)(const uint8_t *x, const char *w, long groups, const int32_t *starts, long stride, bool is_first,
                      float *sums, Fetch fetch);

template <class Dot, int... R>
constexpr auto tile_table(std::integer_sequence<int, R...>) {
  return std::array<Tile, sizeof...(R) + 1>{nullptr, tile<Dot, R + 1>...};
}
// Of R rows: kTiles<Dot>[R].
template <class Dot>
constexpr auto kTiles = tile_table<Dot>(std::make_integer_sequence<int, kStrip>());

// sums [rows][kPanel] of one panel.
void sum(const char *panel, const RoundedRows<kStrip, 0> &x, const Starts &starts, const Tile *tiles, float *sums) {
  for (long block = 0; block < x.blocks; block++) {
    const char *w = panel + block * (kBlock / kGroup) * kGroupBytes;
    const long groups = groups_of(std::min(kBlock, x.inputs - block * kBlock));
    for (long strip = 0; strip < x.strips; strip++) {
      // While the strips compute, each of them fetches its share of the next block.
      const bool is_alone = x.strips == 1;
      const Fetch next{is_alone ? w + kFetchAhead : w + groups * kGroupBytes * (x.strips + strip) / x.strips,
                       kGroupBytes / x.strips};
      const int32_t *begin = starts.at + x.begin(strip) * starts.groups + block * (kBlock / kGroup);
      tiles[x.count(strip)](x.at(strip, block), w, groups, begin, starts.groups, block == 0,
                            sums + x.begin(strip) * kPanel, next);
    }
  }
}

// Threads take panels: a sum of groups is not cut among threads, so that its order stays the same.
template <class T>
void multiply(const Product &p, const Tile *tiles) {
  const long panels = (p.columns + kPanel - 1) / kPanel;
  for (long first = 0; first < p.rows; first += kChunk) {
    const Arena::Mark mark = arena().mark();
    RoundedRows<kStrip, 0> x(std::min(kChunk, p.rows - first), p.inputs);
    x.packed = arena().take<uint8_t>(x.size());
    x.scales = arena().take<float>(x.rows);
    x.pack(static_cast<const T *>(p.x) + first * p.x_stride, p.x_stride);
    Starts starts{arena().take<int32_t>(x.rows * groups_of(p.inputs)), groups_of(p.inputs)};
    starts.compute(x);
    const Shares shares(panels);
#pragma omp parallel
    {
      alignas(64) float sums[kChunk * kPanel];
      shares.visit([&](long panel) {
        sum(static_cast<const char *>(p.weight) + panel * panel_bytes(p.inputs), x, starts, tiles, sums);
        for (long r = 0; r < x.rows; r++) {
          const Vec scale = broadcast(x.scales[r]);
          const Vec low = rounded_product(load(sums + r * kPanel), scale);
          const Vec high = rounded_product(load(sums + r * kPanel + kLanes), scale);
          finish<T>(p, first + r, panel, low, high);
        }
      });
    }
    arena().release(mark);
  }
}

// The panels of weight [columns, inputs], rows `stride` apart, with scales [columns, groups]. The last panel and the last
// group are filled with zeros.
void pack(const int8_t *weight, const BFloat16 *scales, char *packed, long columns, long inputs, long stride,
          bool gated) {
  const long width = gated ? kLanes : kPanel, outputs = gated ? columns / 2 : columns, groups = groups_of(inputs);
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < (outputs + width - 1) / width; panel++) {
    char *at = packed + panel * panel_bytes(inputs);
    memset(at, 0, panel_bytes(inputs));
    for (int output = 0; output < kPanel; output++) {
      const long row = row_of(panel, output, columns, gated);
      const int shift = output < kLanes ? 0 : 4;
      for (long group = 0; group < groups; group++) {
        char *to = at + group * kGroupBytes;
        if (row >= 0) memcpy(to + output * sizeof(BFloat16), scales + row * groups + group, sizeof(BFloat16));
        for (long i = 0; i < kGroup; i++) {
          const long k = group * kGroup + i;
          const int value = row >= 0 && k < inputs ? weight[row * stride + k] : 0;
          to[kScaleBytes + i / 4 * kStepBytes + output % kLanes * 4 + i % 4] |= (value + kZero) << shift;
        }
      }
    }
  }
}

template <class T>
void dequantise_rows(const char *packed, const int64_t *ids, T *rows, long count, long inputs) {
#pragma omp parallel for if (count >= 16)
  for (long row = 0; row < count; row++) {
    const char *panel = packed + ids[row] / kPanel * panel_bytes(inputs);
    const long output = ids[row] % kPanel, shift = output < kLanes ? 0 : 4;
    for (long group = 0; group < groups_of(inputs); group++) {
      const char *from = panel + group * kGroupBytes;
      const float scale = to_float(reinterpret_cast<const BFloat16 *>(from)[output]);
      alignas(64) float values[kGroup];
      for (long i = 0; i < kGroup; i++) {
        const uint8_t byte = from[kScaleBytes + i / 4 * kStepBytes + output % kLanes * 4 + i % 4];
        values[i] = ((byte >> shift & 15) - kZero) * scale;
      }
      const long begin = group * kGroup, here = std::min(kGroup, inputs - begin);
      for (long i = 0; i < here; i += kLanes) store(rows + row * inputs + begin + i, load(values + i), here - i);
    }
  }
}

}  // namespace
}  // namespace int4

template <class T>
void multiply_int4(const Product &p, int kind) {
  int4::multiply<T>(p, kind == kInt4Dot ? int4::kTiles<Dot>.data() : int4::kTiles<PlainDot>.data());
}

#define OARLOCK_MULTIPLY_INT4(T) template void multiply_int4<T>(const Product &, int);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MULTIPLY_INT4)

}  // namespace gemm

// `packed` holds so many bytes.
extern "C" long oarlock_int4_size(long columns, long inputs, int gated) {
  const long width = gated ? simd::kLanes : gemm::kPanel, outputs = gated ? columns / 2 : columns;
  return (outputs + width - 1) / width * gemm::int4::panel_bytes(inputs);
}

extern "C" void oarlock_int4_pack(const int8_t *weight, const simd::BFloat16 *scales, void *packed, long columns,
                                  long inputs, long stride, int gated) {
  gemm::int4::pack(weight, scales, static_cast<char *>(packed), columns, inputs, stride, gated != 0);
}

extern "C" void oarlock_int4_gemm(const void *x, const void *weight, const void *bias, const void *residual, void *y,
                                  long rows, long columns, long inputs, long x_stride, long y_stride, int epilogue,
                                  int type, int kind) {
  const gemm::Product p{x, weight, bias, residual, y, rows, columns, inputs, x_stride, y_stride, epilogue};
  with_type(type, [&](auto *of) { gemm::multiply_int4<std::remove_pointer_t<decltype(of)>>(p, kind); });
}

// Rows `ids` of a weight that was packed (not gated), times their scales: [count, inputs].
extern "C" void oarlock_int4_rows(const void *packed, const int64_t *ids, void *rows, long count, long inputs, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    gemm::int4::dequantise_rows(static_cast<const char *>(packed), ids, static_cast<T *>(rows), count, inputs);
  });
}
