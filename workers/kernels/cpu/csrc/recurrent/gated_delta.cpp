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

// Inputs of a head for up to kTokensAtOnce tokens.
struct Inputs {
  float *keys, *queries;  // [tokens, key_width]
  float decay[kTokensAtOnce], beta[kTokensAtOnce], overlap[kTokensAtOnce];  // overlap: product of key and query
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

template <class T>
void prepare(const DeltaHeads &layer, const DeltaRows<T> &rows, long head, long first, long tokens, Inputs &inputs) {
  const long width = layer.key_width, at = head / (layer.value_heads / layer.key_heads) * width;
  const float query_scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(width)));
  for (long t = 0; t < tokens; t++) {
    float *key = inputs.keys + t * width, *query = inputs.queries + t * width;
    write_unit(rows.k + (first + t) * rows.k_stride + at, 1.0f, key, width);
    write_unit(rows.q + (first + t) * rows.q_stride + at, query_scale, query, width);
    inputs.decay[t] = simd::exp(rows.log_decay[(first + t) * layer.value_heads + head]);
    inputs.beta[t] = rows.beta[(first + t) * layer.value_heads + head];
    inputs.overlap[t] = product(key, query, width);
  }
}

struct Columns {
  Vec at[kVectors];
};

// kTile columns of a state, in the slot itself or as a copy.
struct Tile {
  float *first;
  long rows, stride;  // elements between two rows
};

// Go over a tile of the state. kUpdates: it becomes decay S + key delta. kReads: `found` and `seen` become
// the products of the (new) state with the next token's key and query.
template <bool kUpdates, bool kReads>
inline void pass(const Tile &tile, float decay, const float *key, const Columns &delta, const float *next_key,
                 const float *next_query, Columns &found, Columns &seen) {
  Columns products_k, products_q;
  for (long i = 0; i < kVectors; i++) products_k.at[i] = products_q.at[i] = zero();
  const Vec factor = broadcast(decay);
  for (long row = 0; row < tile.rows; row++) {
    float *at = tile.first + row * tile.stride;
    const Vec k = kUpdates ? broadcast(key[row]) : zero();
    const Vec next_k = kReads ? broadcast(next_key[row]) : zero();
    const Vec next_q = kReads ? broadcast(next_query[row]) : zero();
    for (long i = 0; i < kVectors; i++) {
      Vec s = load(at + i * kLanes);
      if (kUpdates) {
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

inline void load_tile(const float *state, long stride, long columns, const Tile &tile) {
  for (long row = 0; row < tile.rows; row++)
    for (long i = 0; i < kTile; i += kLanes)
      store(tile.first + row * tile.stride + i, load(state + row * stride + i, columns - i));
}

inline void store_tile(const Tile &tile, long stride, long columns, float *state) {
  for (long row = 0; row < tile.rows; row++)
    for (long i = 0; i < kTile; i += kLanes)
      store(state + row * stride + i, load(tile.first + row * tile.stride + i), columns - i);
}

// Compute `columns` columns of a head for `tokens` tokens. v and y: the columns of the first token's row. After each
// token, `save` is called with the number of tokens that the tile has seen.
template <class T, class Save>
void run_tile(const Inputs &inputs, const Tile &tile, long columns, long tokens, const T *v, long v_stride, T *y,
              long y_stride, const Save &save) {
  Columns found, seen, delta;
  pass<false, true>(tile, 0.0f, nullptr, delta, inputs.keys, inputs.queries, found, seen);
  for (long t = 0; t < tokens; t++) {
    const Vec decay = broadcast(inputs.decay[t]), beta = broadcast(inputs.beta[t]);
    for (long i = 0; i < kVectors; i++) {
      const long d = i * kLanes;
      delta.at[i] = fnma(decay, found.at[i], load(v + t * v_stride + d, columns - d)) * beta;
      const Vec result = fma(broadcast(inputs.overlap[t]), delta.at[i], seen.at[i] * decay);
      store(y + t * y_stride + d, result, columns - d);
    }
    const float *key = inputs.keys + t * tile.rows, *query = inputs.queries + t * tile.rows;
    if (t + 1 < tokens)
      pass<true, true>(tile, inputs.decay[t], key, delta, key + tile.rows, query + tile.rows, found, seen);
    else
      pass<true, false>(tile, inputs.decay[t], key, delta, nullptr, nullptr, found, seen);
    save(t + 1);
  }
}

// Compute the tiles `first_tile` to `last_tile` of a head of a sequence.
template <class T>
void run_head(const DeltaHeads &layer, const DeltaRows<T> &rows, float *states, T *y, const StateStep &step, long seq,
              long head, long first_tile, long last_tile) {
  const long width = layer.value_width, y_stride = layer.value_heads * width, size = layer.key_width * width;
  const long start = step.starts[seq], tokens = step.starts[seq + 1] - start;
  const auto state = [&](long slot) { return states + (slot * layer.value_heads + head) * size; };
  const Arena::Mark mark = arena().mark();
  Inputs &inputs = *arena().take<Inputs>(1);
  inputs.keys = arena().take<float>(std::min(tokens, kTokensAtOnce) * layer.key_width);
  inputs.queries = arena().take<float>(std::min(tokens, kTokensAtOnce) * layer.key_width);
  const Tile copy{arena().take<float>(layer.key_width * kTile), layer.key_width, kTile};
  float *written = state(step.writes[seq]);
  const float *from = state(step.reads[seq]);
  if (last_tile - first_tile > 1) {  // copying a whole state first is faster than reading it by columns
    memcpy(written, from, size * sizeof *from);
    from = written;
  }
  for (long done = 0; done < tokens || done == 0; done += kTokensAtOnce, from = written) {
    const long count = std::min(kTokensAtOnce, tokens - done);
    prepare(layer, rows, head, start + done, count, inputs);
    for (long column = first_tile * kTile; column < std::min(width, last_tile * kTile); column += kTile) {
      const long columns = std::min(kTile, width - column), at = head * width + column;
      const bool in_place = count == 1 && from == written && columns == kTile;  // a copy would not be used again
      const Tile tile = in_place ? Tile{written + column, layer.key_width, width} : copy;
      const auto keep = [&](long slot) { store_tile(tile, width, columns, state(slot) + column); };
      Saves saves(step, seq);
      if (!in_place) load_tile(from + column, width, columns, tile);
      if (count > 0)
        run_tile(inputs, tile, columns, count, rows.v + (start + done) * rows.v_stride + at, rows.v_stride,
                 y + (start + done) * y_stride + at, y_stride, [&](long seen) { saves.after(done + seen, keep); });
      if (!in_place) keep(step.writes[seq]);
    }
  }
  arena().release(mark);
}

}  // namespace delta

template <class T>
void gated_delta_rule(const DeltaHeads &layer, const DeltaRows<T> &rows, float *states, T *y, const StateStep &step) {
  const long tiles = (layer.value_width + delta::kTile - 1) / delta::kTile;
  for_each_head(step, layer.value_heads, tiles, [&](long seq, long head, long first, long last) {
    delta::run_head(layer, rows, states, y, step, seq, head, first, last);
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
