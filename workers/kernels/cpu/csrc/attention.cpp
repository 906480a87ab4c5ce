// Attention (see attention.h). A tile is a few rows (query token, query head) of one sequence that share a KV head. For
// each span of 256 positions it computes the scores, their softmax against the span's own maximum and the weighted sum
// of values; such partial results are merged in the order of positions (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). Where threads are many and tiles few, the spans of a tile are computed by different
// threads and merged afterwards, in the same order.
//
// Batch invariance: spans are counted from position 0, every sum runs in the order of positions, and masked positions
// get weight zero, which changes no sum. So the bits of a row depend on its own sequence alone: not on the other rows
// of its tile, on how its prompt was cut into chunks, on other sequences of the batch, or on the number of threads.
#include "attention.h"

#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "arena.h"
#include "attention_products.h"
#include "vector_math.h"

namespace {

constexpr int kTile = 3 * kTileRows;  // rows per tile: they share what is read from memory
constexpr int kAhead = 8;             // groups after those of a span: computed in vain, or prefetched
constexpr long kPartsPerThread = 8;   // into how many parts the spans of a step are cut for each thread, at least
constexpr long kLeastSpans = 2;       // spans per part, at least: merging takes time, too
constexpr float kHidden = -std::numeric_limits<float>::infinity();

template <class T>
struct Call {
  const AttentionStep &step;
  const AttentionLayer &layer;
  const T *q;
  T *out;
  const T *k, *v;
  long q_stride, out_stride;
};

// Some spans of one tile. `partials`: null when these are all spans of the tile; else where the first span's results go.
struct Task {
  int seq, head, row, rows;  // `row`: the first one, counted over the query tokens and heads of the sequence and KV head
  long first_span, end_span;
  float *partials;
};

// Where row `r` of a task lies in an array of rows of heads, `stride` elements apart.
template <class T>
long row_offset(const Call<T> &call, const Task &task, long r, long stride) {
  const long num_queries_per_kv = call.layer.heads / call.layer.kv_heads, row = task.row + r;
  const long head = task.head * num_queries_per_kv + row % num_queries_per_kv;
  return (call.step.query_start_loc[task.seq] + row / num_queries_per_kv) * stride + head * call.layer.head_dim;
}

// The first position of the first group that a query at `position` sees.
long first_position(const AttentionLayer &layer, long position) {
  return layer.window && position >= layer.window ? (position - layer.window + 1) / kGroup * kGroup : 0;
}

template <class T>
struct Workspace {
  alignas(64) Left<T> q[kTile * kMaxHead];
  alignas(64) float scores[kTileRows * kSpan];
  alignas(64) std::conditional_t<std::is_same_v<Left<T>, float>, char, Left<T>> weights[kTileRows * kSpan];
  alignas(64) float part[kTile * (kMaxHead + 2)], result[kTile * (kMaxHead + 2)];  // of one span, and of all so far
};

// Weights take the place of scores if they have the same type.
template <class T>
Left<T> *weights_of(Workspace<T> &space) {
  if constexpr (std::is_same_v<Left<T>, float>) return space.scores;
  else return space.weights;
}

// Results of `rows` rows over some positions, in one piece of memory: weighted sums of values [rows][width], the largest
// scores [rows], and the sums of weights relative to them [rows]. A row that saw no position has the score kHidden.
long span_size(long rows, long width) { return (rows * (width + 2) + 15) / 16 * 16; }
float *peaks_of(float *span, long rows, long width) { return span + rows * width; }
float *totals_of(float *span, long rows, long width) { return span + rows * (width + 1); }

void clear(float *span, long rows, long width) {
  memset(span, 0, rows * (width + 2) * sizeof(float));
  for (long r = 0; r < rows; r++) peaks_of(span, rows, width)[r] = kHidden;
}

// Adds the results for the positions that follow.
void merge(float *into, float *next, long rows, long width) {
  for (long r = 0; r < rows; r++) {
    float &peak = peaks_of(into, rows, width)[r], &total = totals_of(into, rows, width)[r];
    const float next_peak = peaks_of(next, rows, width)[r];
    if (next_peak == kHidden) continue;
    const float largest = std::fmax(peak, next_peak);
    const float keep = peak == kHidden ? 0.0f : simd::exp(peak - largest), take = simd::exp(next_peak - largest);
    total = std::fma(total, keep, totals_of(next, rows, width)[r] * take);
    peak = largest;
    const Vec keeps = simd::broadcast(keep), takes = simd::broadcast(take);
    for (long d = r * width; d < (r + 1) * width; d += kLanes)
      simd::store(into + d, simd::fma(simd::load(into + d), keeps, simd::load(next + d) * takes));
  }
}

// scores [count] of one row become weights; the row sees the positions `low` to `high` of them.
template <class E>
void softmax(const AttentionLayer &layer, float *scores, E *weights, long low, long high, long count, float *peak,
             float *total) {
  *peak = kHidden;
  *total = 0.0f;
  if (low >= high) {
    memset(weights, 0, count * sizeof *weights);
    return;
  }
  const long begin = low / kLanes * kLanes, end = (high + kLanes - 1) / kLanes * kLanes;
  const Vec hidden = simd::broadcast(kHidden);
  float scale = layer.scale;
  if (layer.softcap > 0) {
    const Vec cap = simd::broadcast(layer.softcap), ratio = simd::broadcast(scale / layer.softcap);
    for (long i = begin; i < end; i += kLanes)
      simd::store(scores + i, simd::tanh(simd::load(scores + i) * ratio) * cap);
    scale = 1.0f;
  }
  if (begin < low) simd::store(scores + begin, simd::select(simd::first(low - begin), hidden, simd::load(scores + begin)));
  if (high < end) {
    float *last = scores + end - kLanes;
    simd::store(last, simd::select(simd::first(high - (end - kLanes)), simd::load(last), hidden));
  }
  Vec peaks = hidden;
  for (long i = begin; i < end; i += kLanes) peaks = simd::max(peaks, simd::load(scores + i));
  *peak = simd::largest(peaks) * scale;
  if (*peak == kHidden) {
    memset(weights, 0, count * sizeof *weights);
    return;
  }
  const Vec scales = simd::broadcast(scale), shift = simd::broadcast(-*peak);
  Vec totals = simd::zero();
  memset(weights, 0, begin * sizeof *weights);
  for (long i = begin; i < end; i += kLanes) {
    const Vec p = simd::exp(simd::fma(simd::load(scores + i), scales, shift));
    simd::store(weights + i, p);
    totals = totals + (std::is_same_v<E, float> ? p : simd::load(weights + i));  // as rounded
  }
  memset(weights + end, 0, (count - end) * sizeof *weights);
  *total = simd::sum(totals);
}

template <class T>
void finish(const Call<T> &call, const Task &task, const float *result) {
  const long rows = task.rows, width = call.layer.head_dim;
  for (long r = 0; r < rows; r++) {
    T *to = call.out + row_offset(call, task, r, call.out_stride);
    const Vec total = simd::broadcast(result[rows * (width + 1) + r]);
    for (long d = 0; d < width; d += kLanes) simd::store(to + d, simd::load(result + r * width + d) / total);
  }
}

template <class T>
inline Left<T> left(T value) {
  if constexpr (std::is_same_v<Left<T>, T>) return value;
  else return simd::to_float(value);
}

template <class T>
__attribute__((noinline)) void compute(const Call<T> &call, const Task &task, Workspace<T> &space) {
  const AttentionStep &step = call.step;
  const AttentionLayer &layer = call.layer;
  constexpr int kStep = Format<T>::kStep;
  const long width = layer.head_dim, num_queries_per_kv = layer.heads / layer.kv_heads, rows = task.rows;
  const long query = step.query_start_loc[task.seq];  // the sequence's first query token
  const long before = step.seq_lens[task.seq] - (step.query_start_loc[task.seq + 1] - query);  // positions before it
  const long blocks = (rows + kTileRows - 1) / kTileRows;
  const auto block_start = [&](long block) { return block * rows / blocks; };
  const auto last_seen = [&](long r) { return before + (task.row + r) / num_queries_per_kv; };
  for (long block = 0; block < blocks; block++) {
    const long start = block_start(block), count = block_start(block + 1) - start;
    for (long r = 0; r < count; r++) {
      const T *from = call.q + row_offset(call, task, start + r, call.q_stride);
      Left<T> *to = space.q + start * width + r * kStep;
      for (long d = 0; d < width; d++) to[d / kStep * count * kStep + d % kStep] = left<T>(from[d]);
    }
  }
  if (!task.partials) clear(space.result, rows, width);

  const long end = last_seen(rows - 1) + 1;
  const long begin = first_position(layer, last_seen(0));
  const int32_t *table = step.tables + task.seq * step.table_width;
  const long groups_per_page = layer.block_size / kGroup, page_stride = layer.kv_heads * layer.block_size * width;
  Left<T> *weights = weights_of(space);
  for (long span = task.first_span; span < task.end_span; span++) {
    const long first = begin > span * kSpan ? begin : span * kSpan;
    const long stop = end < (span + 1) * kSpan ? end : (span + 1) * kSpan;
    const long groups = (stop - first + kGroup - 1) / kGroup, left_groups = (end - first + kGroup - 1) / kGroup;
    // After the groups of the span come those that follow, or copies of the last one. What is computed from them is not
    // read.
    const T *k[kSpan / kGroup + kAhead], *v[kSpan / kGroup + kAhead];
    long page = first / kGroup / groups_per_page, place = first / kGroup % groups_per_page;
    for (long g = 0; g < groups + kAhead; g++) {
      if (g >= left_groups) {
        k[g] = k[g - 1], v[g] = v[g - 1];
        continue;
      }
      const long at = table[page] * page_stride + (task.head * groups_per_page + place) * kGroup * width;
      k[g] = call.k + at, v[g] = call.v + at;
      if (++place == groups_per_page) place = 0, page++;
    }
    float *memory = task.partials ? task.partials + (span - task.first_span) * span_size(rows, width) : space.part;
    for (long block = 0; block < blocks; block++) {
      const long start = block_start(block), count = block_start(block + 1) - start;
      const Products<T> &product = products<T>(count);
      for (long i = 0; i < groups * kVectors; i += product.columns) {
        const T *from[4], *next[8];
        for (long c = 0; c < product.columns; c++)
          from[c] = k[(i + c) / kVectors] + (i + c) % kVectors * kLanes * kStep;
        const long g = i / kVectors, ahead = product.columns > kVectors ? product.columns / kVectors : 1;
        for (long c = 0; c < ahead; c++) next[2 * c] = v[g + c], next[2 * c + 1] = k[g + ahead + c];
        product.score(space.q + start * width, from, width, space.scores + i * kLanes, next);
      }
      for (long r = 0; r < count; r++) {
        const long last = last_seen(start + r), high = last + 1 < stop ? last + 1 : stop;
        const long low = layer.window && last - layer.window + 1 > first ? last - layer.window + 1 : first;
        softmax(layer, space.scores + r * kSpan, weights + r * kSpan, low - first, high - first, groups * kGroup,
                peaks_of(memory, rows, width) + start + r, totals_of(memory, rows, width) + start + r);
      }
      float *sum = memory + start * width;
      for (long g = 0, until; g < groups; g = until) {
        constexpr long kGroups = Format<T>::kPositions / kGroup;
        until = (first / kGroup + g + kGroups) / kGroups * kGroups - first / kGroup;
        if (until > groups) until = groups;
        const Left<T> *from = weights + g * kGroup;
        long d = 0;
        for (; d + product.columns * kLanes <= width; d += product.columns * kLanes)
          product.wide(from, v + g, until - g, width, d, g > 0, sum);
        for (; d < width; d += kLanes * (kVectors < product.columns ? kVectors : product.columns))
          product.narrow(from, v + g, until - g, width, d, g > 0, sum);
      }
    }
    if (!task.partials) merge(space.result, memory, rows, width);
  }
  if (!task.partials) finish(call, task, space.result);
}

// The tiles of all sequences and KV heads, later ones of a sequence first because they take longer: calls
// visit(sequence, KV head, first row, rows, first span, end span).
template <class Visit>
void for_each_tile(const AttentionStep &step, const AttentionLayer &layer, const Visit &visit) {
  const long num_queries_per_kv = layer.heads / layer.kv_heads;
  for (long seq = 0; seq < step.seqs; seq++) {
    const long tokens = step.query_start_loc[seq + 1] - step.query_start_loc[seq];
    const long before = step.seq_lens[seq] - tokens, rows = tokens * num_queries_per_kv;
    for (long row = (rows - 1) / kTile * kTile; row >= 0 && rows; row -= kTile) {
      const long count = rows - row < kTile ? rows - row : kTile;
      const long begin = first_position(layer, before + row / num_queries_per_kv);
      const long end = before + (row + count - 1) / num_queries_per_kv + 1;
      for (long head = 0; head < layer.kv_heads; head++)
        visit(seq, head, row, count, begin / kSpan, (end + kSpan - 1) / kSpan);
    }
  }
}

template <class T>
void run(const Call<T> &call) {
  const AttentionStep &step = call.step;
  const AttentionLayer &layer = call.layer;
  const long width = layer.head_dim, threads = omp_get_max_threads();
  long tiles = 0, spans = 0;
  for_each_tile(step, layer, [&](long, long, long, long, long first, long end) { tiles++, spans += end - first; });
  // Parts of tiles of at most `share` spans: small enough to keep all threads busy until the end.
  long share = threads == 1 ? spans : spans / (threads * kPartsPerThread);
  if (share < kLeastSpans) share = kLeastSpans;
  const Arena::Mark mark = arena().mark();
  Task *tasks = arena().take<Task>(tiles + spans / share);
  Task *split = arena().take<Task>(spans / share);
  long count = 0, splits = 0;
  for_each_tile(step, layer, [&](int seq, int head, int row, int rows, long first, long end) {
    Task task{seq, head, row, rows, first, end, nullptr};
    if (end - first <= share) {
      tasks[count++] = task;
      return;
    }
    const long size = span_size(rows, width), parts = (end - first + share - 1) / share;
    task.partials = arena().take<float>((end - first) * size);
    split[splits++] = task;
    for (long part = 0; part < parts; part++) {
      Task &to = tasks[count++] = task;
      to.first_span = first + (end - first) * part / parts;
      to.end_span = first + (end - first) * (part + 1) / parts;
      to.partials += (to.first_span - first) * size;
    }
  });
#pragma omp parallel if (count > 1)
  {
    Workspace<T> space;
#pragma omp for schedule(dynamic)
    for (long i = 0; i < count; i++) compute(call, tasks[i], space);
#pragma omp for schedule(dynamic)
    for (long i = 0; i < splits; i++) {
      const Task &task = split[i];
      clear(space.result, task.rows, width);
      for (long span = task.first_span; span < task.end_span; span++)
        merge(space.result, task.partials + (span - task.first_span) * span_size(task.rows, width), task.rows, width);
      finish(call, task, space.result);
    }
  }
  arena().release(mark);
}

}  // namespace

template <class T>
void attend(const AttentionStep &step, const AttentionLayer &layer, const T *q, long q_stride, T *out, long out_stride,
            const T *k_pages, const T *v_pages) {
  run(Call<T>{step, layer, q, out, k_pages, v_pages, q_stride, out_stride});
}

template <class T>
void write_kv(const AttentionLayer &layer, const T *k, long k_stride, const T *v, long v_stride, T *k_pages, T *v_pages,
              const int64_t *slots, long tokens) {
  constexpr int kStep = Format<T>::kStep;
  const long kv_heads = layer.kv_heads, width = layer.head_dim, page_size = layer.block_size * width;
#pragma omp parallel if (tokens >= 64)
  {
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++)
      if (slots[t] % layer.block_size == 0)
        memset(v_pages + slots[t] / layer.block_size * kv_heads * page_size, 0, kv_heads * page_size * sizeof(T));
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++) {
      const long block = slots[t] / layer.block_size, offset = slots[t] % layer.block_size, position = offset % kGroup;
      for (long head = 0; head < kv_heads; head++) {
        const long group = (block * kv_heads + head) * page_size + offset / kGroup * kGroup * width;
        const T *key = k + t * k_stride + head * width, *value = v + t * v_stride + head * width;
        T *key_to = k_pages + group + position * kStep;
        T *value_to = v_pages + group + position / kStep * width * kStep + position % kStep;
        for (long d = 0; d < width; d += kStep, key_to += kGroup * kStep) memcpy(key_to, key + d, kStep * sizeof(T));
        for (long d = 0; d < width; d++) value_to[d * kStep] = value[d];
      }
    }
  }
}

#define OARLOCK_ATTENTION(T)                                                                                       \
  template void attend<T>(const AttentionStep &, const AttentionLayer &, const T *, long, T *, long, const T *,    \
                          const T *);                                                                              \
  template void write_kv<T>(const AttentionLayer &, const T *, long, const T *, long, T *, T *, const int64_t *, long);
OARLOCK_ATTENTION(BFloat16)
OARLOCK_ATTENTION(Float16)
OARLOCK_ATTENTION(float)

extern "C" void oarlock_attend(const AttentionStep *step, const AttentionLayer *layer, const void *q, long q_stride,
                               void *out, long out_stride, const void *k_pages, const void *v_pages, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    attend<T>(*step, *layer, static_cast<const T *>(q), q_stride, static_cast<T *>(out), out_stride,
              static_cast<const T *>(k_pages), static_cast<const T *>(v_pages));
  });
}

extern "C" void oarlock_write_kv(const AttentionLayer *layer, const void *k, long k_stride, const void *v, long v_stride,
                                 void *k_pages, void *v_pages, const int64_t *slots, long tokens, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    write_kv<T>(*layer, static_cast<const T *>(k), k_stride, static_cast<const T *>(v), v_stride,
                static_cast<T *>(k_pages), static_cast<T *>(v_pages), slots, tokens);
  });
}
