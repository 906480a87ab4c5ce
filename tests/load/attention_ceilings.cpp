// What a processor can do at most at one level of instruction set, for tests/load/attention_bench.py.
#include "simd/simd.h"

using simd::kLanes;
using simd::Vec;

// Reads `pieces` pieces of `count` floats each with all threads; each thread reads a consecutive part.
extern "C" float stream_read(const float *const *pieces, long number, long count) {
  float sink = 0;
#pragma omp parallel reduction(+ : sink)
  {
    Vec sum[4] = {simd::zero(), simd::zero(), simd::zero(), simd::zero()};
    for (long piece = 0; piece < number; piece++)
#pragma omp for schedule(static) nowait
      for (long i = 0; i < count / (16 * kLanes); i++)
        for (int j = 0; j < 16; j++) {
          const float *at = pieces[piece] + (i * 16 + j) * kLanes;
          if (j * kLanes % 16 == 0) simd::prefetch(at + 512);
          sum[j % 4] = simd::max(sum[j % 4], simd::load(at));
        }
    sink += simd::sum(sum[0] + sum[1] + sum[2] + sum[3]);
  }
  return sink;
}

// `rounds` rounds of independent fused multiply-adds on registers in each thread.
extern "C" float multiply_add(long rounds) {
  float sink = 0;
#pragma omp parallel reduction(+ : sink)
  {
    constexpr int kSums = kLanes == 8 ? 12 : 16;
    Vec sum[kSums];
    for (int j = 0; j < kSums; j++) sum[j] = simd::broadcast(j);
    const Vec a = simd::broadcast(0.999f), b = simd::broadcast(0.001f);
    for (long i = 0; i < rounds; i++) {
#pragma GCC unroll 16
      for (int j = 0; j < kSums; j++) sum[j] = simd::fma(sum[j], a, b);
    }
    for (int j = 0; j < kSums; j++) sink += simd::sum(sum[j]);
  }
  return sink;
}

extern "C" long operations_per_round() { return 2L * kLanes * (kLanes == 8 ? 12 : 16); }
