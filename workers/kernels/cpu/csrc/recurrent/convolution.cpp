// Depthwise convolution (see convolution.h).
#include "recurrent/convolution.h"

#include <algorithm>
#include <type_traits>

#include "simd/vector_math.h"

namespace recurrent {
namespace convolution {

// Return the number in an element: the compiler moves numbers by vectors, but not structures.
template <class T>
inline auto &number(T &element) {
  if constexpr (std::is_same_v<std::remove_const_t<T>, float>)
    return element;
  else
    return element.bits;
}

constexpr long kBlock = 64;  // channels of a task: its rows of all taps stay in the first-level cache

// Some channels of a convolution with kTaps taps, and their weights by tap.
template <class T, long kTaps>
struct ChannelBlock {
  static constexpr long kKept = kTaps - 1;
  const Convolution &layer;
  long first, count;
  alignas(64) float weight[kTaps][kBlock];
  alignas(64) T before[kKept][kBlock];  // inputs of the tokens before the step, oldest first

  ChannelBlock(const Convolution &layer, long first)
      : layer(layer), first(first), count(std::min(kBlock, layer.channels - first)) {
    for (long c = 0; c < count; c++)
      for (long tap = 0; tap < kTaps; tap++) weight[tap][c] = layer.weight[(first + c) * kTaps + tap];
  }

  T *state(T *states, long slot) const { return states + (slot * layer.channels + first) * kKept; }

  void read(const T *__restrict state) {
    T *__restrict to = before[0];
    for (long c = 0; c < count; c++)
      for (long i = 0; i < kKept; i++) number(to[i * kBlock + c]) = number(state[c * kKept + i]);
  }

  // Return the input of token `token` of the sequence, whose tokens have the rows x. Earlier tokens are negative.
  const T *row(const T *x, long stride, long token) const {
    return token < 0 ? before[kKept + token] : x + token * stride;
  }

  // Store the state after `tokens` tokens.
  void write(const T *x, long stride, long tokens, T *__restrict state) const {
    const T *from[kKept];
    for (long i = 0; i < kKept; i++) from[i] = row(x, stride, tokens - kKept + i);
    for (long c = 0; c < count; c++)
      for (long i = 0; i < kKept; i++) number(state[c * kKept + i]) = number(from[i][c]);
  }

  void convolve_token(const T *x, long stride, long token, T *y) const {
    using namespace simd;
    const T *rows[kTaps];
    for (long tap = 0; tap < kTaps; tap++) rows[tap] = row(x, stride, token - kKept + tap);
    for (long c = 0; c < count; c += kLanes) {
      const long lanes = count - c;
      Vec total = load(rows[0] + c, lanes) * load(weight[0] + c);
      for (long tap = 1; tap < kTaps; tap++) total = fma(load(rows[tap] + c, lanes), load(weight[tap] + c), total);
      if (layer.bias) total = total + load(layer.bias + first + c, lanes);
      store(y + c, layer.silu ? simd::silu(total) : total, lanes);
    }
  }
};

template <class T, long kTaps>
void convolve_with(const Convolution &layer, const T *x, long stride, T *states, T *y, const StateStep &step) {
#pragma omp parallel for schedule(dynamic, 1)
  for (long first = 0; first < layer.channels; first += kBlock) {
    ChannelBlock<T, kTaps> block(layer, first);
    for (long seq = 0; seq < step.seqs; seq++) {
      const long start = step.starts[seq], tokens = step.starts[seq + 1] - start;
      const T *rows = x + start * stride + first;
      block.read(block.state(states, step.reads[seq]));
      for (long token = 0; token < tokens; token++)
        block.convolve_token(rows, stride, token, y + (start + token) * layer.channels + first);
      const auto save = [&](long length, long slot) { block.write(rows, stride, length, block.state(states, slot)); };
      for (long v = step.save_starts[seq]; v < step.save_starts[seq + 1]; v++)
        save(step.save_lens[v], step.save_slots[v]);
      save(tokens, step.writes[seq]);
    }
  }
}

}  // namespace convolution

template <class T>
void convolve(const Convolution &layer, const T *x, long stride, T *states, T *y, const StateStep &step) {
  switch (layer.taps) {
#define OARLOCK_TAPS(count) \
  case count: return convolution::convolve_with<T, count>(layer, x, stride, states, y, step);
    OARLOCK_TAPS(2) OARLOCK_TAPS(3) OARLOCK_TAPS(4) OARLOCK_TAPS(5) OARLOCK_TAPS(6) OARLOCK_TAPS(7) OARLOCK_TAPS(8)
  }
}

#define OARLOCK_CONVOLVE(T) \
  template void convolve<T>(const Convolution &, const T *, long, T *, T *, const StateStep &);
OARLOCK_FOR_EACH_TYPE(OARLOCK_CONVOLVE)

}  // namespace recurrent

// Convolve rows of type `type`: see `convolve`.
extern "C" void oarlock_convolve(const recurrent::Convolution *layer, const void *x, long stride, void *states,
                                 void *y, const recurrent::StateStep *step, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    recurrent::convolve(*layer, static_cast<const T *>(x), stride, static_cast<T *>(states), static_cast<T *>(y),
                        *step);
  });
}
