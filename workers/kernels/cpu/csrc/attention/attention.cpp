// Attention (see attention.h). A tile is a few rows (query token, query head) of one sequence that share a KV head. For
// each span of 256 positions it computes the scores, their softmax against the span's own maximum and the weighted sum
// of values; such partial results are merged in the order of positions (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). Where threads are many and tiles few, the spans of a tile are computed by different
// threads and merged afterwards, in the same order.
//
// Batch invariance: spans are counted from position 0, every sum runs in the order of positions, and masked positions
// get weight zero, which changes no sum. So the bits of a row depend on its own sequence alone: not on the other rows
// of its tile, on how its prompt was cut into chunks, on other sequences of the batch, or on the number of threads.
#include "attention/attention.h"

#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/products.h"
#include "runtime/arena.h"
#include "simd/vector_math.h"

namespace {

constexpr int kTile = 3 * kTileRows;  // rows per tile: they share what is read from memory
constexpr int kUnit = kVectors < 4 ? 4 / kVectors : 1;  // groups per call of a product that takes 4 registers
constexpr int kMore = 2 * kUnit;      // groups after those of a span that products may be given
constexpr long kPartsPerThread = 8;  // into how many parts the spans of a step are cut for each thread, at least
constexpr long kLeastSpans = 2;      // spans per part, at least: merging takes time, too
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

// Some spans of one tile. `partials`: null when these are all spans of the tile; else where the first one's results go.
struct Task {
  int seq, head, row, rows;  // `row`: the first one, of the rows (query token, head) of the sequence and KV head
  long first_span, end_span;
  float *partials;
};

// The first position of the first group that a query at `position` sees.
long first_position(const AttentionLayer &layer, long position) {
  return layer.window && position >= layer.window ? (position - layer.window + 1) / kGroup * kGroup : 0;
}

// Rows of a tile that are multiplied together.
template <class T>
struct Block {
  long start;
  const Products<T> *products;
};

template <class T>
struct Workspace {
  long q_at[kTile], out_at[kTile], last[kTile];  // of each row: where it lies in q and out, the last position it sees
  Block<T> blocks[kTile / kTileRows];
  alignas(64) Left<T> q[kTile * kMaxHead];
  alignas(64) float scores[kTile * kSpan];
  alignas(64) std::conditional_t<std::is_same_v<Left<T>, float>, char, Left<T>> weights[kTile * kSpan];
  alignas(64) float part[kTile * (kMaxHead + 2)], result[kTile * (kMaxHead + 2)];  // of one span, and of all so far
};

// Weights take the place of scores if they have the same type.
template <class T>
Left<T> *weights_of(Workspace<T> &space) {
  if constexpr (std::is_same_v<Left<T>, float>) return space.scores;
  else return space.weights;
}

// Results of `rows` rows over some positions, in one piece of memory: weighted sums of values [rows][width], largest
// scores [rows] times log2(e), and the sums of weights relative to them [rows]. A row that saw no position has kHidden.
long span_size(long rows, long width) { return (rows * (width + 2) + 15) / 16 * 16; }
float *peaks_of(float *span, long rows, long width) { return span + rows * width; }
float *totals_of(float *span, long rows, long width) { return span + rows * (width + 1); }

void clear(float *span, long rows, long width) {
  memset(span, 0, rows * (width + 2) * sizeof(float));
  for (long r = 0; r < rows; r++) peaks_of(span, rows, width)[r] = kHidden;
}

// 2^y for y <= 0, and exactly 0 where it is tiny or y is kHidden.
Vec weight(Vec y) { return simd::select(simd::less(y, simd::broadcast(-126.0f)), simd::zero(), simd::power_of_2(y)); }
float weight(float y) { return simd::first_lane(weight(simd::broadcast(y))); }

// Adds the results for the positions that follow.
void merge(float *into, float *next, long rows, long width) {
  for (long r = 0; r < rows; r++) {
    float &peak = peaks_of(into, rows, width)[r], &total = totals_of(into, rows, width)[r];
    const float next_peak = peaks_of(next, rows, width)[r];
    if (next_peak == kHidden) continue;
    const float largest = peak > next_peak ? peak : next_peak;
    const float keep = peak == kHidden ? 0.0f : weight(peak - largest), take = weight(next_peak - largest);
    total = std::fma(total, keep, totals_of(next, rows, width)[r] * take);
    peak = largest;
    const Vec keeps = simd::broadcast(keep), takes = simd::broadcast(take);
    for (long d = r * width; d < (r + 1) * width; d += kLanes)
      simd::store(into + d, simd::fma(simd::load(into + d), keeps, simd::load(next + d) * takes));
  }
}

// Of `count` scores, a multiple of kLanes. Four registers of maxima, since one would wait for itself.
float largest(const float *scores, long count) {
  Vec peaks[4];
  for (Vec &some : peaks) some = simd::broadcast(kHidden);
  long i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) peaks[j] = simd::max(peaks[j], simd::load(scores + i + j * kLanes));
  for (; i < count; i += kLanes) peaks[0] = simd::max(peaks[0], simd::load(scores + i));
  return simd::largest(simd::max(simd::max(peaks[0], peaks[1]), simd::max(peaks[2], peaks[3])));
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
  scale *= simd::kLog2E;  // exp(x) is 2^(x log2(e))
  if (begin < low)
    simd::store(scores + begin, simd::select(simd::first(low - begin), hidden, simd::load(scores + begin)));
  if (high < end) {
    float *last = scores + end - kLanes;
    simd::store(last, simd::select(simd::first(high - (end - kLanes)), simd::load(last), hidden));
  }
  *peak = largest(scores + begin, end - begin) * scale;
  if (*peak == kHidden) {
    memset(weights, 0, count * sizeof *weights);
    return;
  }
  const Vec scales = simd::broadcast(scale), shift = simd::broadcast(-*peak);
  Vec totals = simd::zero();
  if (begin > 0) memset(weights, 0, begin * sizeof *weights);
  for (long i = begin; i < end; i += kLanes) {
    const Vec p = weight(simd::fma(simd::load(scores + i), scales, shift));
    simd::store(weights + i, p);
    totals = totals + (std::is_same_v<E, float> ? p : simd::load(weights + i));  // as rounded
  }
  if (end < count) memset(weights + end, 0, (count - end) * sizeof *weights);
  *total = simd::sum(totals);
}

// Finds the rows of a task. Returns the number of their blocks.
template <class T>
long find_rows(const Call<T> &call, const Task &task, Workspace<T> &space) {
  const AttentionStep &step = call.step;
  const long num_queries_per_kv = call.layer.heads / call.layer.kv_heads, width = call.layer.head_dim;
  const long query = step.query_start_loc[task.seq];  // the sequence's first query token
  const long before = step.seq_lens[task.seq] - (step.query_start_loc[task.seq + 1] - query);  // positions before it
  long token = task.row / num_queries_per_kv, head = task.row % num_queries_per_kv;
  for (long r = 0; r < task.rows; r++) {
    const long at = (task.head * num_queries_per_kv + head) * width;
    space.q_at[r] = (query + token) * call.q_stride + at;
    space.out_at[r] = (query + token) * call.out_stride + at;
    space.last[r] = before + token;
    if (++head == num_queries_per_kv) head = 0, token++;
  }
  const long blocks = (task.rows + kTileRows - 1) / kTileRows;
  for (long block = 0; block < blocks; block++) {
    const long start = block * task.rows / blocks, end = (block + 1) * task.rows / blocks;
    space.blocks[block] = {start, &products<T>(end - start)};
  }
  return blocks;
}

template <class T>
void finish(const Call<T> &call, const Task &task, Workspace<T> &space) {
  const long rows = task.rows, width = call.layer.head_dim;
  const float *result = space.result;
  for (long r = 0; r < rows; r++) {
    T *to = call.out + space.out_at[r];
    const Vec total = simd::broadcast(result[rows * (width + 1) + r]);
    for (long d = 0; d < width; d += kLanes) simd::store(to + d, simd::load(result + r * width + d) / total);
  }
}

template <class T>
inline Left<T> left(T value) {
  if constexpr (std::is_same_v<Left<T>, T>) return value;
  else return simd::to_float(value);
}

// Where the groups of a span lie that a tile sees. After them come those that follow, or copies of the last one: these
// are prefetched or computed in vain.
template <class T>
struct Groups {
  long first, count;  // the first position, and the number of groups in this span
  const T *k[kSpan / kGroup + kMore], *v[kSpan / kGroup + kMore];
};

// `begin` and `end`: the positions that the tile sees.
template <class T>
void find_groups(const Call<T> &call, const Task &task, long begin, long end, long span, Groups<T> &groups) {
  const AttentionLayer &layer = call.layer;
  const int32_t *table = call.step.tables + task.seq * call.step.table_width;
  const long groups_per_page = layer.block_size / kGroup, size = kGroup * layer.head_dim;
  const long first = begin > span * kSpan ? begin : span * kSpan;
  const long stop = end < (span + 1) * kSpan ? end : (span + 1) * kSpan;
  groups.first = first;
  groups.count = (stop - first + kGroup - 1) / kGroup;
  const long left = (end - first + kGroup - 1) / kGroup;
  long page = first / kGroup / groups_per_page, place = first / kGroup % groups_per_page;
  for (long g = 0; g < kSpan / kGroup + kMore; g++) {
    if (g >= left) {
      groups.k[g] = groups.k[g - 1], groups.v[g] = groups.v[g - 1];
      continue;
    }
    const long at = ((table[page] * layer.kv_heads + task.head) * groups_per_page + place) * size;
    groups.k[g] = call.k + at, groups.v[g] = call.v + at;
    if (++place == groups_per_page) place = 0, page++;
  }
}

template <class T>
__attribute__((noinline)) void compute(const Call<T> &call, const Task &task, Workspace<T> &space) {
  const AttentionLayer &layer = call.layer;
  constexpr int kStep = Format<T>::kStep;
  const long width = layer.head_dim, rows = task.rows, blocks = find_rows(call, task, space);
  for (long r = 0; r < rows; r++) {
    const T *from = call.q + space.q_at[r];
    Left<T> *to = space.q + r * kMaxHead;
    if constexpr (std::is_same_v<Left<T>, T>) memcpy(to, from, width * sizeof(T));
    else for (long d = 0; d < width; d += kLanes) simd::store(to + d, simd::load(from + d));
  }
  if (!task.partials) clear(space.result, rows, width);

  const long end = space.last[rows - 1] + 1, begin = first_position(layer, space.last[0]);
  Left<T> *weights = weights_of(space);
  Groups<T> here, next;
  find_groups(call, task, begin, end, task.first_span, here);
  for (long span = task.first_span; span < task.end_span; span++, here = next) {
    find_groups(call, task, begin, end, span + 1 < task.end_span ? span + 1 : span, next);
    float *memory = task.partials ? task.partials + (span - task.first_span) * span_size(rows, width) : space.part;
    for (long g = 0; g < here.count; g += kUnit)
      for (long block = 0; block < blocks; block++) {
        const long start = space.blocks[block].start;
        const Products<T> &product = *space.blocks[block].products;
        for (long i = g * kVectors; i < (g + kUnit) * kVectors && i < here.count * kVectors; i += product.columns) {
          const long group = i / kVectors, groups = product.columns > kVectors ? product.columns / kVectors : 1;
          const T *from[4], *ahead[8];
          for (long c = 0; c < product.columns; c++)
            from[c] = here.k[(i + c) / kVectors] + (i + c) % kVectors * kLanes * kStep;
          for (long c = 0; c < groups; c++) {
            ahead[2 * c] = here.v[group + c];
            ahead[2 * c + 1] = here.k[group + groups + c];
          }
          product.score(space.q + start * kMaxHead, from, width, space.scores + start * kSpan + i * kLanes, ahead);
        }
      }
    for (long r = 0; r < rows; r++) {
      const long last = space.last[r], high = last - here.first + 1, most = here.count * kGroup;
      const long low = layer.window && last - layer.window + 1 > here.first ? last - layer.window + 1 - here.first : 0;
      softmax(layer, space.scores + r * kSpan, weights + r * kSpan, low, high < most ? high : most, most,
              peaks_of(memory, rows, width) + r, totals_of(memory, rows, width) + r);
    }
    for (long block = 0; block < blocks; block++) {
      const long start = space.blocks[block].start;
      const Products<T> &product = *space.blocks[block].products;
      const T *ahead[kSpan / kGroup];  // each block of rows prefetches its share of the next span's keys
      const long share = (here.count + blocks - 1) / blocks;
      for (long g = 0; g < here.count; g++)
        ahead[g] = g >= share * block && g < share * (block + 1) ? next.k[g] : here.v[g];
      for (long g = 0, until; g < here.count; g = until) {
        constexpr long kGroups = Format<T>::kPositions / kGroup;
        until = (here.first / kGroup + g + kGroups) / kGroups * kGroups - here.first / kGroup;
        if (until > here.count) until = here.count;
        const Left<T> *from = weights + start * kSpan + g * kGroup;
        const auto add = [&](auto product, long d) {
          product(from, here.v + g, ahead + g, until - g, width, d, g > 0, memory + start * width);
        };
        long d = 0;
        for (; d + product.columns * kLanes <= width; d += product.columns * kLanes) add(product.wide, d);
        const long narrow = kLanes * (kVectors < product.columns ? kVectors : product.columns);
        for (; d < width; d += narrow) add(product.narrow, d);
      }
    }
    if (!task.partials) merge(space.result, memory, rows, width);
  }
  if (!task.partials) finish(call, task, space);
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
      find_rows(call, task, space);
      clear(space.result, task.rows, width);
      for (long span = task.first_span; span < task.end_span; span++)
        merge(space.result, task.partials + (span - task.first_span) * span_size(task.rows, width), task.rows, width);
      finish(call, task, space);
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

#define OARLOCK_ATTEND(T)                                                                                         \
  template void attend<T>(const AttentionStep &, const AttentionLayer &, const T *, long, T *, long, const T *,   \
                          const T *);
OARLOCK_FOR_EACH_TYPE(OARLOCK_ATTEND)

extern "C" void oarlock_attend(const AttentionStep *step, const AttentionLayer *layer, const void *q, long q_stride,
                               void *out, long out_stride, const void *k_pages, const void *v_pages, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    attend<T>(*step, *layer, static_cast<const T *>(q), q_stride, static_cast<T *>(out), out_stride,
              static_cast<const T *>(k_pages), static_cast<const T *>(v_pages));
  });
}
