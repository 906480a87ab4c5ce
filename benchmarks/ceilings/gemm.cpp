// The rate of a plain product y[M, N] = x[M, K] w[N, K]^T with weights in float32, or in bfloat16 with sums in float32:
// `gemm ROWS OUTPUTS INPUTS` prints the best of five in GFLOP/s for each. One loop over tiles that stay in registers,
// written with GCC's vectors and compiled for the processor at hand. Weights are packed beforehand into panels of two
// vectors, [N / WIDTH][K][WIDTH], inputs into strips of ROWS, [M / ROWS][K][ROWS]. bfloat16 weights are widened a block
// of inputs at a time; with AVX512-BF16 pairs of inputs go through its dot product instead. No tails: N and M are cut.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 12 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 6 };
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 12 };
#else
enum { LANES = 4, ROWS = 6 };
#endif
enum { WIDTH = 2 * LANES, BLOCK = 256 };
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));

struct Shape {
  long rows, outputs, inputs;
};

// y += x w for one strip of rows and one block of a panel.
static inline void tile(const float *__restrict x, const float *__restrict w, float *__restrict y, long count, long stride) {
  Vector sums[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < 2; j++) sums[r][j] = *(Vector *)(y + r * stride + j * LANES);
  for (long k = 0; k < count; k++, x += ROWS, w += WIDTH) {
    const Vector a = *(const Vector *)w, b = *(const Vector *)(w + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      sums[r][0] += a * x[r];
      sums[r][1] += b * x[r];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < 2; j++) *(Vector *)(y + r * stride + j * LANES) = sums[r][j];
}

static void widen(const uint16_t *from, float *to, long count) {
  for (long i = 0; i < count; i++) {
    const uint32_t bits = (uint32_t)from[i] << 16;
    memcpy(to + i, &bits, 4);
  }
}

template <typename Weight> static void product(const Shape &s, const float *x, const Weight *w, float *y) {
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < s.outputs / WIDTH; panel++) {
    alignas(64) float wide[BLOCK * WIDTH];
    for (long r = 0; r < s.rows; r++) memset(y + r * s.outputs + panel * WIDTH, 0, WIDTH * sizeof(float));
    for (long first = 0; first < s.inputs; first += BLOCK) {
      const long count = std::min<long>(BLOCK, s.inputs - first);
      const Weight *part = w + (panel * s.inputs + first) * WIDTH;
      const float *block = (const float *)part;
      if (sizeof(Weight) == 2) widen((const uint16_t *)part, wide, count * WIDTH), block = wide;
      for (long r = 0; r < s.rows; r += ROWS)
        tile(x + r * s.inputs + first * ROWS, block, y + r * s.outputs + panel * WIDTH, count, s.outputs);
    }
  }
}

#ifdef __AVX512BF16__
// Panels are [N / WIDTH][K / 2][WIDTH][2], strips [M / ROWS][K / 2][ROWS][2].
static void dot_product(const Shape &s, const uint16_t *x, const uint16_t *w, float *y) {
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < s.outputs / WIDTH; panel++)
    for (long r0 = 0; r0 < s.rows; r0 += ROWS) {
      __m512 sums[ROWS][2];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
      const uint16_t *pw = w + panel * s.inputs * WIDTH, *px = x + r0 * s.inputs;
      for (long k = 0; k < s.inputs; k += 2, pw += 2 * WIDTH, px += 2 * ROWS) {
        const __m512bh a = (__m512bh)_mm512_loadu_si512(pw), b = (__m512bh)_mm512_loadu_si512(pw + WIDTH);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          int bits;
          memcpy(&bits, px + 2 * r, 4);
          const __m512bh pair = (__m512bh)_mm512_set1_epi32(bits);
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], a, pair);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], b, pair);
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < 2; j++)
          _mm512_storeu_ps(y + (r0 + r) * s.outputs + panel * WIDTH + j * LANES, sums[r][j]);
    }
}
#endif

template <typename Run> static double gflops(const Shape &s, Run run) {
  double best = 1e30;
  for (int i = 0; i < 5; i++) {
    const double start = omp_get_wtime();
    run();
    best = std::min(best, omp_get_wtime() - start);
  }
  return 2.0 * s.rows * s.outputs * s.inputs / best / 1e9;
}

int main(int argc, char **argv) {
  if (argc != 4) return 1;
  Shape s = {atol(argv[1]) / ROWS * ROWS, atol(argv[2]) / WIDTH * WIDTH, atol(argv[3]) / 2 * 2};
  std::vector<float> x(s.rows * s.inputs, 1), w(s.outputs * s.inputs, 1), y(s.rows * s.outputs);
  std::vector<uint16_t> narrow_w(w.size(), 0x3f80);
  const double float32 = gflops(s, [&] { product(s, x.data(), w.data(), y.data()); });
  if (y[0] != s.inputs || y.back() != s.inputs) return 2;
#ifdef __AVX512BF16__
  std::vector<uint16_t> narrow_x(x.size(), 0x3f80);
  const double bfloat16 = gflops(s, [&] { dot_product(s, narrow_x.data(), narrow_w.data(), y.data()); });
#else
  const double bfloat16 = gflops(s, [&] { product(s, x.data(), narrow_w.data(), y.data()); });
#endif
  if (y[0] != s.inputs || y.back() != s.inputs) return 2;
  printf("{\"float32\": %.1f, \"bfloat16\": %.1f}\n", float32, bfloat16);
}
