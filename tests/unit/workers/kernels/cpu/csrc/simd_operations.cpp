// Every operation of simd.h and vector_math.h on arrays, for tests: registers are loaded and stored whole unless the
// operation is about parts of them. Lengths are multiples of lanes().
#include "simd/element_types.h"
#include "simd/vector_math.h"

using namespace simd;

namespace {

template <class Function>
void each(long count, float *y, const Function &function) {
  for (long i = 0; i < count; i += kLanes) store(y + i, function(i));
}

}  // namespace

extern "C" long lanes() { return kLanes; }

extern "C" int multiplies_pairs() {
#ifdef OARLOCK_BF16_DOT
  return 1;
#else
  return 0;
#endif
}

extern "C" void unary(int operation, const float *x, float *y, long count) {
  each(count, y, [&](long i) {
    const Vec a = load(x + i);
    switch (operation) {
      case 0: return abs(a);
      case 1: return round(a);
      case 2: return exp(a);
      case 3: return sigmoid(a);
      case 4: return silu(a);
      case 5: return tanh(a);
      case 6: return gelu_tanh(a);
      case 7: return broadcast(sum(a));
      case 8: return broadcast(largest(a));
      case 9: return broadcast(first_lane(a));
      case 10: return gelu(a);
      default: return zero();
    }
  });
}

extern "C" void binary(int operation, const float *x, const float *y, float *z, long count) {
  each(count, z, [&](long i) {
    const Vec a = load(x + i), b = load(y + i);
    switch (operation) {
      case 0: return a + b;
      case 1: return a - b;
      case 2: return a * b;
      case 3: return a / b;
      case 4: return min(a, b);
      case 5: return max(a, b);
      case 6: return with_sign_of(a, b);
      case 7: return scale_by_power_of_2(a, b);
      case 8: return select(less(a, b), broadcast(1.0f), zero());
      default: return zero();
    }
  });
}

extern "C" void fused(int negated, const float *x, const float *y, const float *z, float *out, long count) {
  each(count, out, [&](long i) {
    const Vec a = load(x + i), b = load(y + i), c = load(z + i);
    return negated ? fnma(a, b, c) : fma(a, b, c);
  });
}

extern "C" float exp_of_one(float x) { return exp(x); }

// Bit i of the results is lane i.
extern "C" uint32_t first_lanes(long count) { return to_bits(first(count)); }
extern "C" uint32_t both_lanes(uint32_t a, uint32_t b) { return to_bits(both(from_bits(a), from_bits(b))); }

// One register: `count` elements of `type` to floats, and back; all lanes are written to `y`.
extern "C" void load_part(int type, const void *x, long count, float *y) {
  with_type(type, [&](auto *of) { store(y, load(static_cast<decltype(of)>(const_cast<void *>(x)), count)); });
}
extern "C" void store_part(int type, const float *x, long count, void *y) {
  with_type(type, [&](auto *of) { store(static_cast<decltype(of)>(y), load(x), count); });
}

// Whole registers, and one element at a time.
extern "C" void widen(int type, const void *x, float *y, long count) {
  with_type(type, [&](auto *of) {
    const auto *from = static_cast<decltype(of)>(const_cast<void *>(x));
    each(count, y, [&](long i) { return load(from + i); });
  });
}
extern "C" void widen_each(int type, const void *x, float *y, long count) {
  with_type(type, [&](auto *of) {
    for (long i = 0; i < count; i++) y[i] = to_float(static_cast<decltype(of)>(const_cast<void *>(x))[i]);
  });
}
extern "C" void round_to(int type, const float *x, void *y, long count) {
  with_type(type, [&](auto *of) {
    for (long i = 0; i < count; i += kLanes) store(static_cast<decltype(of)>(y) + i, load(x + i));
  });
}

// sums [count] += for each lane the two products of pairs a [2 count] and the pair b [2].
extern "C" void multiply_pairs(const BFloat16 *a, const BFloat16 *b, float *sums, long count) {
  each(count, sums, [&](long i) { return add_products(load(sums + i), load_pairs(a + 2 * i), broadcast_pair(b)); });
}
