#ifdef __AVX512BF16__
// RMSNorm and rotary embedding of bfloat16 rows, computed in float32 and rounded once; bit masks over rows of logits.
// Each row is computed by itself in a fixed order, so its bits do not depend on the rest of the batch.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "old_vector_memory.h"

namespace {

constexpr long kSerial = 1 << 15;  // elements; fewer take less time than waking a second thread

template <class Out>
void norm(const uint16_t *x, const float *weight, Out *y, long rows, long heads, long width, long x_stride, float eps) {
#pragma omp parallel for if (rows * heads * width > kSerial)
  for (long i = 0; i < rows * heads; i++) {
    const uint16_t *from = x + i / heads * x_stride + i % heads * width;
    const float *scale = weight + i % heads * width;
    __m512 squares = _mm512_setzero_ps();
    for (long d = 0; d < width; d += 16) {
      const __m512 value = load(from + d, first(width - d));
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
    const __m512 inverse = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
    for (long d = 0; d < width; d += 16) {
      const __mmask16 mask = first(width - d);
      const __m512 value = _mm512_mul_ps(load(from + d, mask), inverse);
      store(y + i * width + d, mask, _mm512_mul_ps(value, load(scale + d, mask)));
    }
  }
}

// y[i] = x[i] cos[i] + x[(i + rotary_dim / 2) % rotary_dim] sin[i], the first half of sin negated; elements from rotary_dim on are copied.
template <class In>
void rotate(const In *x, const float *cos, const float *sin, uint16_t *y, long rows, long heads, long width, long rotary_dim,
            long x_stride) {
  const long half = rotary_dim / 2;
#pragma omp parallel for if (rows * heads * width > kSerial)
  for (long row = 0; row < rows; row++) {
    const float *c = cos + row * rotary_dim, *s = sin + row * rotary_dim;
    for (long head = 0; head < heads; head++) {
      const In *from = x + row * x_stride + head * width;
      uint16_t *to = y + (row * heads + head) * width;
      for (long d = 0; d < half; d += 16) {
        const __mmask16 mask = first(half - d);
        const __m512 a = load(from + d, mask), b = load(from + half + d, mask);
        store(to + d, mask, _mm512_fmadd_ps(b, load(s + d, mask), _mm512_mul_ps(a, load(c + d, mask))));
        store(to + half + d, mask,
              _mm512_fmadd_ps(a, load(s + half + d, mask), _mm512_mul_ps(b, load(c + half + d, mask))));
      }
      for (long d = rotary_dim; d < width; d += 16) {
        const __mmask16 mask = first(width - d);
        store(to + d, mask, load(from + d, mask));
      }
    }
  }
}

// The 16 bits from bit `at` on; words beyond the last read as zero.
inline __mmask16 bits_at(const uint32_t *words, long count, long at) {
  const long word = at / 32;
  uint64_t both = word < count ? words[word] : 0;
  if (word + 1 < count) both |= static_cast<uint64_t>(words[word + 1]) << 32;
  return static_cast<__mmask16>(both >> (at % 32));
}

}  // namespace

// Subtract infinity from every id of `count` rows of logits whose bit is not set: NaN stays NaN, so that a broken row is
// still seen. Row i of `words` [count, num_words] belongs to row `rows[i]` of x [., width], whose ids begin at `first_id`.
extern "C" void oarlock_mask(float *x, long x_stride, const int32_t *rows, const uint32_t *words, long count,
                             long num_words, long first_id, long width) {
  const __m512 infinity = _mm512_set1_ps(__builtin_inff());
#pragma omp parallel for schedule(static) if (count * width > kSerial)
  for (long i = 0; i < count; i++) {
    float *row = x + rows[i] * x_stride;
    const uint32_t *bits = words + i * num_words;
    long d = 0;
    for (; d + 16 <= width; d += 16) {
      const __mmask16 banned = static_cast<__mmask16>(~bits_at(bits, num_words, first_id + d));
      const __m512 value = _mm512_loadu_ps(row + d);
      _mm512_storeu_ps(row + d, _mm512_mask_sub_ps(value, banned, value, infinity));
    }
    if (d < width) {
      const __mmask16 banned = first(width - d) & static_cast<__mmask16>(~bits_at(bits, num_words, first_id + d));
      _mm512_mask_storeu_ps(row + d, banned, _mm512_sub_ps(_mm512_maskz_loadu_ps(banned, row + d), infinity));
    }
  }
}

// x [rows, heads, width] (rows `x_stride` apart), weight float [heads, width] -> y [rows, heads, width] contiguous,
// float32 with `float32_output`, else bfloat16.
extern "C" void oarlock_rms_norm(const uint16_t *x, const float *weight, void *y, long rows, long heads, long width,
                                 long x_stride, float eps, int float32_output) {
  if (float32_output) norm(x, weight, static_cast<float *>(y), rows, heads, width, x_stride, eps);
  else norm(x, weight, static_cast<uint16_t *>(y), rows, heads, width, x_stride, eps);
}

// x [rows, heads, width] (rows `x_stride` apart) bfloat16, or float32 with `float32_input`; cos, sin float [rows, rotary_dim].
extern "C" void oarlock_rotate(const void *x, const float *cos, const float *sin, uint16_t *y, long rows, long heads,
                               long width, long rotary_dim, long x_stride, int float32_input) {
  if (float32_input) rotate(static_cast<const float *>(x), cos, sin, y, rows, heads, width, rotary_dim, x_stride);
  else rotate(static_cast<const uint16_t *>(x), cos, sin, y, rows, heads, width, rotary_dim, x_stride);
}
#endif
