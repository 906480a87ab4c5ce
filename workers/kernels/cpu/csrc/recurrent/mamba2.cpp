// Mamba 2's recurrence (see mamba2.h).
#include "recurrent/mamba2.h"

#include <algorithm>
#include <type_traits>

#include "runtime/arena.h"
#include "simd/vector_math.h"

namespace recurrent {
namespace mamba {

using namespace simd;

constexpr long kBlock = 32;  // rows of the state that are computed together, in the first-level cache

// Inputs of a head for up to kTokensAtOnce tokens.
struct Inputs {
  float *b, *c;  // [tokens, state_width]
  float *added;  // [tokens, head_width]   dt x
  float decay[kTokensAtOnce];
};

template <class T>
void widen(const T *from, float factor, float *to, long width) {
  for (long d = 0; d < width; d += kLanes) store(to + d, load(from + d, width - d) * broadcast(factor), width - d);
}

template <class T>
void prepare(const MambaHeads &layer, const MambaRows<T> &rows, long head, long first, long tokens, Inputs &inputs) {
  const long width = layer.state_width, at = head / (layer.heads / layer.groups) * width, x_width = layer.head_width;
  for (long t = 0; t < tokens; t++) {
    const float dt = rows.dt[(first + t) * layer.heads + head];
    widen(rows.b + (first + t) * rows.b_stride + at, 1.0f, inputs.b + t * width, width);
    widen(rows.c + (first + t) * rows.c_stride + at, 1.0f, inputs.c + t * width, width);
    widen(rows.x + (first + t) * rows.x_stride + head * x_width, dt, inputs.added + t * x_width, x_width);
    inputs.decay[t] = simd::exp(dt * layer.a[head]);
  }
}

// Update kRows rows of the state, and compute their products with c.
template <long kRows>
inline void run_rows(float *state, float decay, const float *added, const float *b, const float *c, long width,
                     float *products) {
  Vec sums[kRows], x[kRows];
  for (long r = 0; r < kRows; r++) sums[r] = zero(), x[r] = broadcast(added[r]);
  const Vec factor = broadcast(decay);
  const auto step = [&](long d, long count) {
    const Vec in = load(b + d, count), out = load(c + d, count);
    for (long r = 0; r < kRows; r++) {
      const Vec s = fma(x[r], in, load(state + r * width + d, count) * factor);
      store(state + r * width + d, s, count);
      sums[r] = fma(s, out, sums[r]);
    }
  };
  long d = 0;
  for (; d + kLanes <= width; d += kLanes) step(d, kLanes);
  if (d < width) step(d, width - d);
  for (long r = 0; r < kRows; r++) products[r] = sum(sums[r]);
}

inline void run_block(float *state, float decay, const float *added, const float *b, const float *c, long width,
                      long rows, float *products) {
  long row = 0;
  for (; row + 4 <= rows; row += 4)
    run_rows<4>(state + row * width, decay, added + row, b, c, width, products + row);
  for (; row < rows; row++)
    run_rows<1>(state + row * width, decay, added + row, b, c, width, products + row);
}

// Compute the blocks of a head of a sequence.
template <class T>
void run_head(const MambaHeads &layer, const MambaRows<T> &rows, float *states, T *y, const StateStep &step,
              const HeadTask &task) {
  const long seq = task.seq, head = task.head;
  const long width = layer.state_width, x_width = layer.head_width, size = x_width * width;
  const long start = step.starts[seq], tokens = step.starts[seq + 1] - start, most = std::min(tokens, kTokensAtOnce);
  const Arena::Mark mark = arena().mark();
  Inputs &inputs = *arena().take<Inputs>(1);
  inputs.b = arena().take<float>(most * width), inputs.c = arena().take<float>(most * width);
  inputs.added = arena().take<float>(most * x_width);
  const Vec through = broadcast(layer.d ? layer.d[head] : 0.0f);
  for (long done = 0; done < tokens || done == 0; done += kTokensAtOnce) {
    const long count = std::min(kTokensAtOnce, tokens - done);
    prepare(layer, rows, head, start + done, count, inputs);
    for (long row = task.first * kBlock; row < std::min(x_width, task.last * kBlock); row += kBlock) {
      const long height = std::min(kBlock, x_width - row), bytes = height * width * sizeof(float);
      const auto state = [&](long slot) { return states + (slot * layer.heads + head) * size + row * width; };
      float *now = state(step.writes[seq]);
      Saves saves(step, seq);
      if (!done) memcpy(now, state(step.reads[seq]), bytes);  // faster than reading and writing in one pass
      for (long t = 0; t < count; t++) {
        alignas(64) float products[kBlock];
        run_block(now, inputs.decay[t], inputs.added + t * x_width + row, inputs.b + t * width, inputs.c + t * width,
                  width, height, products);
        const long token = start + done + t, at = head * x_width + row;
        const T *x = rows.x + token * rows.x_stride + at;
        T *result = y + token * layer.heads * x_width + at;
        for (long d = 0; d < height; d += kLanes)
          store(result + d, fma(through, load(x + d, height - d), load(products + d)), height - d);
        saves.after(done + t + 1, [&](long slot) { memcpy(state(slot), now, bytes); });
      }
    }
  }
  arena().release(mark);
}

}  // namespace mamba

template <class T>
void mamba2(const MambaHeads &layer, const MambaRows<T> &rows, float *states, T *y, const StateStep &step) {
  const long blocks = (layer.head_width + mamba::kBlock - 1) / mamba::kBlock;
  for_each_head(step, layer.heads, blocks, [&](const HeadTask &task) {
    mamba::run_head(layer, rows, states, y, step, task);
  });
}

#define OARLOCK_MAMBA2(T) \
  template void mamba2<T>(const MambaHeads &, const MambaRows<T> &, float *, T *, const StateStep &);
OARLOCK_FOR_EACH_TYPE(OARLOCK_MAMBA2)

}  // namespace recurrent

// Apply Mamba 2's recurrence to rows of type `type`: see `mamba2`.
extern "C" void oarlock_mamba2(const recurrent::MambaHeads *layer, const void *x, long x_stride, const void *b,
                               long b_stride, const void *c, long c_stride, const float *dt, float *states, void *y,
                               const recurrent::StateStep *step, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const recurrent::MambaRows<T> rows{static_cast<const T *>(x), static_cast<const T *>(b), static_cast<const T *>(c),
                                       x_stride, b_stride, c_stride, dt};
    recurrent::mamba2(*layer, rows, states, static_cast<T *>(y), *step);
  });
}
