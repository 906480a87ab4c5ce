// RMSNorm and rotary embedding of rows, and bit masks over rows of logits, each in one pass. Each row is computed by
// itself in a fixed order, so its bits do not depend on the rest of the batch.
#include <type_traits>

#include "elementwise/norm.h"
#include "elementwise/rotary.h"

namespace {

// The `kLanes` bits from bit `at` on, and more above them; words beyond the last read as zero.
inline uint32_t bits_at(const uint32_t *words, long count, long at) {
  const long word = at / 32;
  uint64_t both = word < count ? words[word] : 0;
  if (word + 1 < count) both |= static_cast<uint64_t>(words[word + 1]) << 32;
  return static_cast<uint32_t>(both >> (at % 32));
}

}  // namespace

// Subtract infinity from every id of `count` rows of logits whose bit is not set: NaN stays NaN, so that a broken row is
// still seen. Row i of `words` [count, num_words] belongs to row `rows[i]` of x [., width], whose ids begin at `first_id`.
extern "C" void oarlock_mask(float *x, long x_stride, const int32_t *rows, const uint32_t *words, long count,
                             long num_words, long first_id, long width) {
  using namespace simd;
  const Vec infinity = broadcast(__builtin_inff());
#pragma omp parallel for schedule(static) if (count * width > kSerial)
  for (long i = 0; i < count; i++) {
    float *row = x + rows[i] * x_stride;
    const uint32_t *bits = words + i * num_words;
    long d = 0;
    for (; d + kLanes <= width; d += kLanes) {
      const Vec value = load(row + d);
      store(row + d, select(from_bits(bits_at(bits, num_words, first_id + d)), value, value - infinity));
    }
    if (d < width) {
      const Vec value = load(row + d, width - d);
      const Mask allowed = from_bits(bits_at(bits, num_words, first_id + d));
      store(row + d, select(allowed, value, value - infinity), width - d);
    }
  }
}

// x [rows, heads, width] of type `in` (rows `x_stride` apart), weight float [heads, width] -> y [rows, heads, width]
// contiguous, of type `in`, or float32 with `float32_output`.
extern "C" void oarlock_rms_norm(const void *x, const float *weight, void *y, long rows, long heads, long width,
                                 long x_stride, float eps, int in, int float32_output) {
  with_type(in, [&](auto *of) {
    using In = std::remove_pointer_t<decltype(of)>;
    const In *from = static_cast<const In *>(x);
    if (float32_output) rms_norm(from, weight, static_cast<float *>(y), rows, heads, width, x_stride, eps);
    else rms_norm(from, weight, static_cast<In *>(y), rows, heads, width, x_stride, eps);
  });
}

// x [rows, heads, width] of type `out`, or float32 with `float32_input` (rows `x_stride` apart); cos, sin float
// [rows, 2 half], whose second halves hold the cosine and sine of each pair -> y [rows, heads, width] of type `out`.
extern "C" void oarlock_rotate(const void *x, const float *cos, const float *sin, void *y, long rows, long heads,
                               long width, long half, long x_stride, int float32_input, int out) {
  with_type(out, [&](auto *of) {
    using Out = std::remove_pointer_t<decltype(of)>;
    const auto run = [&](auto *from) {
      rotate(from, cos + half, sin + half, static_cast<Out *>(y), rows, heads, width, half, x_stride, 2 * half);
    };
    if (float32_input) run(static_cast<const float *>(x));
    else run(static_cast<const Out *>(x));
  });
}
