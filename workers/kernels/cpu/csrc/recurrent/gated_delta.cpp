// The gated delta rule (see gated_delta.h).
#include "recurrent/gated_delta.h"

#include <algorithm>
#include <type_traits>

#include "elementwise/norm.h"
#include "runtime/arena.h"
#include "simd/vector_math.h"

namespace recurrent {
namespace delta {

using namespace simd;

constexpr float kKeyEpsilon = 1e-6f;
constexpr long kVectors = 4;
constexpr long kTile = kVectors * kLanes;  // columns of the state that are computed together, in the first-level cache
constexpr long kWide = kRegisters / 4;     // vectors of a row that are computed together for one token

// Inputs of a head for up to kTokensAtOnce tokens.
struct Inputs {
  float *keys;            // [tokens, key_width]
  float *read, *queries;  // [tokens, key_width]   keys and queries as they are multiplied with the state; `read` is
                          // `keys`, unless channels have decays
  float *decays;          // [tokens], or [tokens, key_width] if channels have decays
  float beta[kTokensAtOnce], overlap[kTokensAtOnce];  // overlap: product of key and query
};

// Decays of the rows of a state for one token.
template <bool kChannels>
struct Decays {
  const Vec all;
  explicit Decays(const float *at) : all(broadcast(*at)) {}
  Vec of(long) const { return all; }
};

template <>
struct Decays<true> {
  const float *at;
  explicit Decays(const float *at) : at(at) {}
  Vec of(long row) const { return broadcast(at[row]); }
};

// Write x [width] divided by its length, times `scale`.
template <class T>
void write_unit(const T *x, float scale, float *to, long width) {
  const float factor = inverse_root(sum_of_squares(x, width), kKeyEpsilon) * scale;
  for (long d = 0; d < width; d += kLanes) store(to + d, load(x + d, width - d) * broadcast(factor), width - d);
}

inline float product(const float *a, const float *b, long width) {
  Vec total = zero();
  for (long d = 0; d < width; d += kLanes) total = fma(load(a + d, width - d), load(b + d, width - d), total);
  return sum(total);
}

// Compute the decays of a key's channels, and multiply key and query by them.
inline void decay_channels(const float *log_decay, const float *key, float *decays, float *read, float *query,
                           long width) {
  for (long d = 0; d < width; d += kLanes) {
    const long count = width - d;
    const Vec decay = simd::exp(load(log_decay + d, count));
    store(decays + d, decay, count);
    store(read + d, load(key + d, count) * decay, count);
    store(query + d, load(query + d, count) * decay, count);
  }
}

template <bool kChannels, class T>
void prepare(const DeltaHeads &layer, const DeltaRows<T> &rows, long head, long first, long tokens, Inputs &inputs) {
  const long width = layer.key_width, at = head / (layer.value_heads / layer.key_heads) * width;
  const float query_scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(width)));
  for (long t = 0; t < tokens; t++) {
    float *key = inputs.keys + t * width, *query = inputs.queries + t * width;
    write_unit(rows.k + (first + t) * rows.k_stride + at, 1.0f, key, width);
    write_unit(rows.q + (first + t) * rows.q_stride + at, query_scale, query, width);
    const long gates = (first + t) * layer.value_heads + head;
    inputs.beta[t] = rows.beta[gates];
    inputs.overlap[t] = product(key, query, width);
    if constexpr (kChannels)
      decay_channels(rows.log_decay + gates * width, key, inputs.decays + t * width, inputs.read + t * width, query,
                     width);
    else
      inputs.decays[t] = simd::exp(rows.log_decay[gates]);
  }
}

template <long kCount>
struct Columns {
  Vec at[kCount];
};

// Columns of a state, in a slot or as a copy.
template <class Float>
struct Tile {
  Float *first;
  long rows, stride;  // elements between two rows
};

// Go over a tile of the state. kUpdates: it becomes decay S + key delta. kReads: `found` and `seen` become
// the products of the (new) state with the next token's key and query.
template <bool kUpdates, bool kReads, bool kChannels, long kCount, class Float>
inline void pass(const Tile<Float> &tile, const Decays<kChannels> &decays, const float *key,
                 const Columns<kCount> &delta, const float *next_key, const float *next_query, Columns<kCount> &found,
                 Columns<kCount> &seen) {
  Columns<kCount> products_k, products_q;
  for (long i = 0; i < kCount; i++) products_k.at[i] = products_q.at[i] = zero();
  for (long row = 0; row < tile.rows; row++) {
    Float *at = tile.first + row * tile.stride;
    const Vec factor = kUpdates ? decays.of(row) : zero();
    const Vec k = kUpdates ? broadcast(key[row]) : zero();
    const Vec next_k = kReads ? broadcast(next_key[row]) : zero();
    const Vec next_q = kReads ? broadcast(next_query[row]) : zero();
    for (long i = 0; i < kCount; i++) {
      Vec s = load(at + i * kLanes);
      if constexpr (kUpdates) {
        s = fma(k, delta.at[i], s * factor);
        store(at + i * kLanes, s);
      }
      if (kReads) {
        products_k.at[i] = fma(next_k, s, products_k.at[i]);
        products_q.at[i] = fma(next_q, s, products_q.at[i]);
      }
    }
  }
  if (kReads) found = products_k, seen = products_q;
}

// Write decay S + key delta to `to`, past the caches, where S is the tile `from`. Meanwhile fetch the same rows of
// another state, so that memory is busy while this tile is computed. Every tile fetches the whole rows again, which is
// faster than to fetch them once (by 9 % at AVX2).
template <bool kChannels, long kCount>
inline void advance(const Tile<const float> &from, float *to, const float *next, const Decays<kChannels> &decays,
                    const float *key, const Columns<kCount> &delta) {
  for (long row = 0; row < from.rows; row++) {
    const long at = row * from.stride;
    const Vec k = broadcast(key[row]), factor = decays.of(row);
    for (long d = 0; d < from.stride; d += 16) prefetch(next + at + d);
    for (long i = 0; i < kCount; i++)
      stream(to + at + i * kLanes, fma(k, delta.at[i], load(from.first + at + i * kLanes) * factor));
  }
}

// Write the results of token t to y, and return its `delta`. v and y: the columns of its row.
template <bool kChannels, class T, long kCount>
inline Columns<kCount> finish(const Inputs &inputs, long t, const Columns<kCount> &found, const Columns<kCount> &seen,
                              const T *v, T *y, long columns) {
  const Vec beta = broadcast(inputs.beta[t]), overlap = broadcast(inputs.overlap[t]);
  Columns<kCount> delta;
  for (long i = 0; i < kCount; i++) {
    const long d = i * kLanes;
    const Vec value = load(v + d, columns - d);
    if constexpr (kChannels) {
      delta.at[i] = (value - found.at[i]) * beta;
      store(y + d, fma(overlap, delta.at[i], seen.at[i]), columns - d);
    } else {
      const Vec decay = broadcast(inputs.decays[t]);
      delta.at[i] = fnma(decay, found.at[i], value) * beta;
      store(y + d, fma(overlap, delta.at[i], seen.at[i] * decay), columns - d);
    }
  }
  return delta;
}

inline void load_tile(const float *state, long stride, long columns, const Tile<float> &tile) {
  for (long row = 0; row < tile.rows; row++)
    for (long i = 0; i < kTile; i += kLanes)
      store(tile.first + row * tile.stride + i, load(state + row * stride + i, columns - i));
}

inline void store_tile(const Tile<float> &tile, long stride, long columns, float *state) {
  for (long row = 0; row < tile.rows; row++)
    for (long i = 0; i < kTile; i += kLanes)
      store(state + row * stride + i, load(tile.first + row * tile.stride + i), columns - i);
}

// Compute `columns` columns of a head for `tokens` tokens. v and y: the columns of the first token's row. After each
// token, `save` is called with the number of tokens that the tile has seen.
template <bool kChannels, class T, class Save>
void run_tile(const Inputs &inputs, const Tile<float> &tile, long columns, long tokens, const T *v, long v_stride,
              T *y, long y_stride, const Save &save) {
  Columns<kVectors> found, seen, delta;
  const long each = kChannels ? tile.rows : 1;  // decays of a token
  const Decays<kChannels> first(inputs.decays);
  pass<false, true>(tile, first, nullptr, delta, inputs.read, inputs.queries, found, seen);
  for (long t = 0; t < tokens; t++) {
    delta = finish<kChannels>(inputs, t, found, seen, v + t * v_stride, y + t * y_stride, columns);
    const float *key = inputs.keys + t * tile.rows;
    const long next = (t + 1) * tile.rows;
    const Decays<kChannels> decays(inputs.decays + t * each);
    if (t + 1 < tokens)
      pass<true, true>(tile, decays, key, delta, inputs.read + next, inputs.queries + next, found, seen);
    else
      pass<true, false>(tile, decays, key, delta, nullptr, nullptr, found, seen);
    save(t + 1);
  }
}

// A head of a sequence, some of whose tiles are computed.
template <class T, bool kChannels>
struct Head {
  const DeltaHeads &layer;
  const DeltaRows<T> &rows;
  const StateStep &step;
  const HeadTask &task;
  float *states;
  T *y;

  long width() const { return layer.value_width; }
  long first() const { return task.first * kTile; }  // columns
  long last() const { return std::min(width(), task.last * kTile); }
  float *state(long slot) const { return states + (slot * layer.value_heads + task.head) * layer.key_width * width(); }
  const T *v(long token) const { return rows.v + token * rows.v_stride + task.head * width(); }
  T *result(long token) const { return y + (token * layer.value_heads + task.head) * width(); }

  // Compute one token. The old state is read from memory once and the new one is only written, both row by row if
  // kCount vectors are a whole row.
  template <long kCount>
  void run_token(const Inputs &inputs, long token) const {
    const float *from = state(step.reads[task.seq]);
    const float *next = states + task.next * layer.key_width * width();
    float *to = state(step.writes[task.seq]);
    const Decays<kChannels> decays(inputs.decays);
    Columns<kCount> found, seen, delta;
    for (long column = first(); column < last(); column += kCount * kLanes) {
      const Tile<const float> old{from + column, layer.key_width, width()};
      pass<false, true>(old, decays, nullptr, delta, inputs.read, inputs.queries, found, seen);
      delta = finish<kChannels>(inputs, 0, found, seen, v(token) + column, result(token) + column, kCount * kLanes);
      advance(old, to + column, next, decays, inputs.keys, delta);
    }
    end_streams();
    Saves(step, task.seq).after(1, [&](long slot) {
      for (long row = 0; row < layer.key_width; row++)
        std::copy(to + row * width() + first(), to + row * width() + last(), state(slot) + row * width() + first());
    });
  }

  // Compute any number of tokens.
  void run(Inputs &inputs, long start, long tokens) const {
    const Tile<float> copy{arena().take<float>(layer.key_width * kTile), layer.key_width, kTile};
    float *written = state(step.writes[task.seq]);
    const float *from = state(step.reads[task.seq]);
    if (task.last - task.first > 1) {  // copying a whole state first is faster than reading it by columns
      memcpy(written, from, layer.key_width * width() * sizeof *from);
      from = written;
    }
    for (long done = 0; done < tokens || done == 0; done += kTokensAtOnce, from = written) {
      const long count = std::min(kTokensAtOnce, tokens - done), token = start + done;
      prepare<kChannels>(layer, rows, task.head, token, count, inputs);
      for (long column = first(); column < last(); column += kTile) {
        const long columns = std::min(kTile, width() - column);
        const bool in_place = count == 1 && from == written && columns == kTile;  // a copy would not be used again
        const Tile<float> tile = in_place ? Tile<float>{written + column, layer.key_width, width()} : copy;
        const auto keep = [&](long slot) { store_tile(tile, width(), columns, state(slot) + column); };
        Saves saves(step, task.seq);
        if (!in_place) load_tile(from + column, width(), columns, tile);
        if (count > 0)
          run_tile<kChannels>(inputs, tile, columns, count, v(token) + column, rows.v_stride, result(token) + column,
                   layer.value_heads * width(), [&](long seen) { saves.after(done + seen, keep); });
        if (!in_place) keep(step.writes[task.seq]);
      }
    }
  }
};

template <class T, bool kChannels>
void run_head(const Head<T, kChannels> &head) {
  const long seq = head.task.seq, start = head.step.starts[seq], tokens = head.step.starts[seq + 1] - start;
  const Arena::Mark mark = arena().mark();
  Inputs &inputs = *arena().take<Inputs>(1);
  const long most = std::min(tokens, kTokensAtOnce), values = most * head.layer.key_width;
  inputs.keys = arena().take<float>(values);
  inputs.queries = arena().take<float>(values);
  inputs.read = kChannels ? arena().take<float>(values) : inputs.keys;
  inputs.decays = arena().take<float>(kChannels ? values : most);
  if (tokens == 1 && head.width() % kTile == 0 && can_stream(head.state(0))) {
    prepare<kChannels>(head.layer, head.rows, head.task.head, start, 1, inputs);
    if ((head.last() - head.first()) % (kWide * kLanes) == 0)
      head.template run_token<kWide>(inputs, start);
    else
      head.template run_token<kVectors>(inputs, start);
  } else {
    head.run(inputs, start, tokens);
  }
  arena().release(mark);
}

}  // namespace delta

template <class T>
void gated_delta_rule(const DeltaHeads &layer, const DeltaRows<T> &rows, float *states, T *y, const StateStep &step) {
  const long tiles = (layer.value_width + delta::kTile - 1) / delta::kTile;
  for_each_head(step, layer.value_heads, tiles, [&](const HeadTask &task) {
    if (layer.decays_channels)
      delta::run_head(delta::Head<T, true>{layer, rows, step, task, states, y});
    else
      delta::run_head(delta::Head<T, false>{layer, rows, step, task, states, y});
  });
}

#define OARLOCK_GATED_DELTA(T) \
  template void gated_delta_rule<T>(const DeltaHeads &, const DeltaRows<T> &, float *, T *, const StateStep &);
OARLOCK_FOR_EACH_TYPE(OARLOCK_GATED_DELTA)

}  // namespace recurrent

// Apply the gated delta rule to rows of type `type`: see `gated_delta_rule`.
extern "C" void oarlock_gated_delta_rule(const recurrent::DeltaHeads *layer, const void *q, long q_stride,
                                         const void *k, long k_stride, const void *v, long v_stride,
                                         const float *log_decay, const float *beta, float *states, void *y,
                                         const recurrent::StateStep *step, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const recurrent::DeltaRows<T> rows{static_cast<const T *>(q), static_cast<const T *>(k), static_cast<const T *>(v),
                                       q_stride, k_stride, v_stride, log_decay, beta};
    recurrent::gated_delta_rule(*layer, rows, states, static_cast<T *>(y), *step);
  });
}
