// Attention (see attention.h). A tile is a few rows (query token, query head) of one sequence that share a KV head. For
// each span of 256 positions, a tile computes the scores, their softmax against the span's own maximum and the weighted
// sum of values. These partial results are merged in the order of positions (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). If there are many threads and few tiles, different threads compute the spans of a
// tile, which are merged afterwards in the same order.
//
// Batch invariance: spans are counted from position 0, every sum runs in the order of positions, and masked positions
// get weight zero, which changes no sum. So the bits of a row depend only on its own sequence: not on the other rows of
// its tile, the chunks of its prompt, other sequences in the batch, or the number of threads.
#include "attention/attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/matmuls.h"
#include "attention/softmax.h"
#include "attention/transpose.h"
#include "attention/widen.h"
#include "runtime/arena.h"

namespace {

constexpr int kTile = 3 * kTileRows;  // rows per tile; they share the data read from memory
constexpr int kUnit = kVectors < 4 ? 4 / kVectors : 1;  // groups per call of a kernel that takes 4 registers
constexpr int kMore = 2 * kUnit;      // groups after the end of a span that kernels may read
constexpr int kWidened = 4;  // groups of values widened at a time; groups of keys: kUnit, which is at most this
// Elements of keys whose scores are computed for all rows of a tile before the next, if values are in keys: keys that
// wide do not stay in the first-level cache.
constexpr long kKeyPart = 128;
constexpr long kStrip = 4 * kLanes;  // most elements of values that are read from keys at a time
constexpr int kStripGroups = 8;      // most groups of positions whose values are read from keys at a time
constexpr long kPartsPerThread = 8;  // minimum number of parts per thread into which the spans of a step are cut
constexpr long kLeastSpans = 2;      // minimum number of spans per part, because merging takes time
constexpr long kMostKept = 1 << 22;  // floats per thread: most results of spans that are kept until they are merged

template <class T>
struct Call {
  const AttentionStep &step;
  const AttentionLayer &layer;
  const T *q;
  T *out;
  uint8_t *k, *v;
  long q_stride, out_stride;
  const float *sinks;      // null if the model has none
  const NewRows<T> *rows;  // keys and values that the tasks store; or null
};

// Spans of one tile to compute. `partials`: null if these are all spans of the tile, otherwise the buffer for the
// results of the first span; the others follow.
struct Task {
  int seq, head, row, rows;  // `row`: the first row (query token, head) of the sequence and KV head
  long first_span, end_span;
  float *partials;
};

// Return the first position that a query at `position` sees.
long first_visible(const AttentionLayer &layer, long position) {
  if (layer.chunk) return position - position % layer.chunk;
  return layer.window && position >= layer.window ? position - layer.window + 1 : 0;
}

// The range of positions that a task's tile sees.
struct Seen {
  long begin, end;
};

Seen seen_by(const AttentionStep &step, const AttentionLayer &layer, const Task &task) {
  const long num_queries_per_kv = layer.heads / layer.kv_heads;
  const long tokens = step.query_start_loc[task.seq + 1] - step.query_start_loc[task.seq];
  const long before = step.seq_lens[task.seq] - tokens;
  // The range begins with the group of the first visible position.
  return {first_visible(layer, before + task.row / num_queries_per_kv) / kGroup * kGroup,
          before + (task.row + task.rows - 1) / num_queries_per_kv + 1};
}

// Rows of a tile that are multiplied by one kernel call.
template <class T>
struct Block {
  long start;
  const Matmuls<T> *matmuls;
};

template <class T>
struct Workspace {
  long q_at[kTile], out_at[kTile], last[kTile];  // each row's offsets in q and out, last visible position
  Block<T> blocks[kTile / kTileRows];
  alignas(64) Left<T> q[kTile * kMaxHead];
  alignas(64) float scores[kTile * kSpan];
  alignas(64) std::conditional_t<std::is_same_v<Left<T>, float>, char, Left<T>> weights[kTile * kSpan];
  // Results of one span, and of all spans so far.
  alignas(64) float part[kTile * (kMaxHead + 2)], result[kTile * (kMaxHead + 2)];
  alignas(64) T wide[kWidened * kGroup * kMaxHead];             // groups of 8-bit pages, widened
  alignas(64) T values[kStripGroups * kGroup * kStrip];         // elements of values that were read from keys
  alignas(64) float key_scales[kSpan], value_scales[kSpan];     // scales of int8 pages
  // Scores of the second part of keys that have two scales, and these scales.
  alignas(64) float second_scores[kTile * kSpan], second_scales[kSpan];
};

// Return the buffer for weights. They overwrite the scores if they have the same type.
template <class T>
Left<T> *weights_of(Workspace<T> &space) {
  if constexpr (std::is_same_v<Left<T>, float>) return space.scores;
  else return space.weights;
}

// Results of `rows` rows over some positions, in one buffer: weighted sums of values [rows][width], largest scores
// [rows] times log2(e), and the sums of weights relative to them [rows]. A row that saw no position has kHidden as its
// largest score.
long span_size(long rows, long width) { return (rows * (width + 2) + 15) / 16 * 16; }
float *peaks_of(float *span, long rows, long width) { return span + rows * width; }
float *totals_of(float *span, long rows, long width) { return span + rows * (width + 1); }

void clear(float *span, long rows, long width) {
  memset(span, 0, rows * (width + 2) * sizeof(float));
  for (long r = 0; r < rows; r++) peaks_of(span, rows, width)[r] = kHidden;
}

// Merge the results of the following positions into `into`.
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

// Compute the offsets of the rows of a task and split them into blocks. Return the number of blocks.
template <class T>
long find_rows(const Call<T> &call, const Task &task, Workspace<T> &space) {
  const AttentionStep &step = call.step;
  const AttentionLayer &layer = call.layer;
  const long num_queries_per_kv = layer.heads / layer.kv_heads;
  const long query = step.query_start_loc[task.seq];  // the sequence's first query token
  const long before = step.seq_lens[task.seq] - (step.query_start_loc[task.seq + 1] - query);  // positions before it
  long token = task.row / num_queries_per_kv, head = task.row % num_queries_per_kv;
  for (long r = 0; r < task.rows; r++) {
    const long query_head = task.head * num_queries_per_kv + head;
    space.q_at[r] = (query + token) * call.q_stride + query_head * layer.head_dim;
    space.out_at[r] = (query + token) * call.out_stride + query_head * layer.value_dim;
    space.last[r] = before + token;
    if (++head == num_queries_per_kv) head = 0, token++;
  }
  const long blocks = (task.rows + kTileRows - 1) / kTileRows;
  for (long block = 0; block < blocks; block++) {
    const long start = block * task.rows / blocks, end = (block + 1) * task.rows / blocks;
    space.blocks[block] = {start, &matmuls<T>(end - start)};
  }
  return blocks;
}

template <class T>
void finish(const Call<T> &call, const Task &task, Workspace<T> &space) {
  const long rows = task.rows, width = call.layer.value_dim;
  const long num_queries_per_kv = call.layer.heads / call.layer.kv_heads;
  const float *result = space.result;
  for (long r = 0; r < rows; r++) {
    T *to = call.out + space.out_at[r];
    float sum = result[rows * (width + 1) + r];
    if (call.sinks) {
      const long head = task.head * num_queries_per_kv + (task.row + r) % num_queries_per_kv;
      sum += relative_weight(call.sinks[head] * simd::kLog2E, result[rows * width + r]);
    }
    const Vec total = simd::broadcast(sum);
    for (long d = 0; d < width; d += kLanes) simd::store(to + d, simd::load(result + r * width + d) / total);
  }
}

template <class T>
inline Left<T> left(T value) {
  if constexpr (std::is_same_v<Left<T>, T>) return value;
  else return simd::to_float(value);
}

// Addresses of the groups of a span that a tile sees. They are followed by the next groups, or by copies of the last
// one: kernels may prefetch or compute these, but the results are not used.
struct Groups {
  long first, count;  // the first position, and the number of groups in this span
  const uint8_t *k[kSpan / kGroup + kMore], *v[kSpan / kGroup + kMore];
};

template <class T>
void find_groups(const Call<T> &call, const Task &task, long span, Groups &groups) {
  const AttentionLayer &layer = call.layer;
  const auto [begin, end] = seen_by(call.step, layer, task);
  const int32_t *table = call.step.tables + call.step.rows[task.seq] * call.step.table_width;
  const long groups_per_page = layer.block_size / kGroup;
  const long key_size = key_group_bytes<T>(layer), value_size = value_group_bytes<T>(layer);
  const long first = begin > span * kSpan ? begin : span * kSpan;
  const long stop = end < (span + 1) * kSpan ? end : (span + 1) * kSpan;
  groups.first = first;
  groups.count = (stop - first + kGroup - 1) / kGroup;
  const long left = (end - first + kGroup - 1) / kGroup;
  long page = first / kGroup / groups_per_page, page_group = first / kGroup % groups_per_page;
  for (long g = 0; g < kSpan / kGroup + kMore; g++) {
    if (g >= left) {
      groups.k[g] = groups.k[g - 1], groups.v[g] = groups.v[g - 1];
      continue;
    }
    const long at = (table[page] * layer.kv_heads + task.head) * groups_per_page + page_group;
    groups.k[g] = call.k + at * key_size, groups.v[g] = layer.value_in_key ? groups.k[g] : call.v + at * value_size;
    if (++page_group == groups_per_page) page_group = 0, page++;
  }
}

// Compute the part of the scores of groups g to g + kUnit that elements `begin` to `end` of keys give, or add it to the
// previous part. keys [kUnit]: these elements of the groups.
template <class T>
void score_part(const Groups &here, const T *const *keys, long g, long begin, long end, long blocks,
                const Workspace<T> &space, float *scores, long item, bool adds) {
  constexpr int kStep = Format<T>::kStep;
  for (long block = 0; block < blocks; block++) {
    const long start = space.blocks[block].start;
    const Matmuls<T> &matmul = *space.blocks[block].matmuls;
    for (long i = g * kVectors; i < (g + kUnit) * kVectors && i < here.count * kVectors; i += matmul.columns) {
      const long group = i / kVectors, groups = matmul.columns > kVectors ? matmul.columns / kVectors : 1;
      const T *from[4];
      const uint8_t *ahead[8];
      for (long c = 0; c < matmul.columns; c++)
        from[c] = keys[(i + c) / kVectors - g] + (i + c) % kVectors * kLanes * kStep;
      for (long c = 0; c < groups; c++) {
        ahead[2 * c] = here.v[group + c] + begin * kGroup * item;
        ahead[2 * c + 1] = here.k[group + groups + c] + begin * kGroup * item;
      }
      float *to = scores + start * kSpan + i * kLanes;
      matmul.score(space.q + start * kMaxHead + begin, from, end - begin, to, ahead, item, adds);
    }
  }
}

// Compute the scores of a span, and read the scales of its keys and values if they have any.
template <class T>
void score_span(const Call<T> &call, const Groups &here, long blocks, Workspace<T> &space) {
  const AttentionLayer &layer = call.layer;
  const long width = layer.head_dim, most = layer.value_in_key ? kKeyPart : width;
  const bool is_rounded = layer.pages != kUnrounded;
  const bool has_scales = layer.pages == kInt8Pages, has_two = has_scales && has_second_part(layer);
  const long item = is_rounded ? 1 : sizeof(T), first = has_two ? first_part(layer) : width;
  for (long g = 0; g < here.count; g += kUnit) {
    for (long u = 0; has_scales && u < kUnit && g + u < here.count; u++) {
      widen_scales(here.k[g + u], width, space.key_scales + (g + u) * kGroup);
      if (has_two) widen_scales(here.k[g + u], width, space.second_scales + (g + u) * kGroup, 1);
      simd::prefetch(here.k[g + u + kUnit] + kGroup * width);  // prefetch the scales after the elements
      simd::prefetch(here.v[g + u] + kGroup * layer.value_dim);
    }
    for (long begin = 0, end; begin < width; begin = end) {
      end = std::min(begin + most, begin < first ? first : width);
      const T *keys[kUnit];
      for (long u = 0; u < kUnit; u++) {
        const uint8_t *stored = here.k[g + u] + begin * kGroup * item;
        T *wide = space.wide + u * kGroup * (end - begin);
        keys[u] = is_rounded ? wide : reinterpret_cast<const T *>(stored);
        if (is_rounded && g + u < here.count) widen_part(layer, stored, kGroup * (end - begin), wide);
      }
      score_part(here, keys, g, begin, end, blocks, space, begin < first ? space.scores : space.second_scores, item,
                 begin != 0 && begin != first);
    }
  }
  if (!has_scales) return;
  for (long g = 0; g < here.count; g++)
    widen_scales(here.v[g], layer.value_in_key ? width : layer.value_dim, space.value_scales + g * kGroup);
}

// Multiply the scores [count] of row `row` by the scales of their keys.
template <class T>
void scale_scores(const AttentionLayer &layer, Workspace<T> &space, long row, long count) {
  float *scores = space.scores + row * kSpan;
  const float *second = space.second_scores + row * kSpan;
  const bool has_two = has_second_part(layer);
  for (long i = 0; i < count; i += kLanes) {
    Vec score = simd::load(scores + i) * simd::load(space.key_scales + i);
    if (has_two) score = simd::fma(simd::load(second + i), simd::load(space.second_scales + i), score);
    simd::store(scores + i, score);
  }
}

// Compute `memory` [rows][width] = weights [rows][kSpan] times the values of a span. `next`: the groups of the next
// span.
template <class T>
void add_values(const Call<T> &call, const Groups &here, const Groups &next, const Left<T> *weights, long blocks,
                Workspace<T> &space, float *memory) {
  const AttentionLayer &layer = call.layer;
  const long width = layer.value_dim, size = kGroup * width;
  const bool is_rounded = layer.pages != kUnrounded;
  const long item = is_rounded ? 1 : sizeof(T);
  const long share = (here.count + blocks - 1) / blocks;  // groups of the next span's keys that each block prefetches
  const long most = is_rounded ? kWidened : Format<T>::kPositions / kGroup;
  for (long g = 0, until; g < here.count; g = until) {
    until = (here.first / kGroup + g + most) / most * most - here.first / kGroup;
    if (until > here.count) until = here.count;
    const T *values[kSpan / kGroup];
    const uint8_t *ahead[kSpan / kGroup];
    for (long i = g; i < until; i++) {
      values[i - g] = is_rounded ? space.wide + (i - g) * size : reinterpret_cast<const T *>(here.v[i]);
      if (is_rounded) widen_group(layer, here.v[i], width, space.wide + (i - g) * size);
    }
    for (long block = 0; block < blocks; block++) {
      const long start = space.blocks[block].start;
      const Matmuls<T> &matmul = *space.blocks[block].matmuls;
      for (long i = g; i < until; i++) {
        const bool is_mine = i >= share * block && i < share * (block + 1);
        ahead[i - g] = is_mine ? next.k[i] : here.v[i];
      }
      const Left<T> *from = weights + start * kSpan + g * kGroup;
      const auto add = [&](auto matmul, long d) {
        matmul(from, values, ahead, item, until - g, width, d, g > 0, memory + start * width, width);
      };
      long d = 0;
      for (; d + matmul.columns * kLanes <= width; d += matmul.columns * kLanes) add(matmul.wide, d);
      const long narrow = kLanes * (kVectors < matmul.columns ? kVectors : matmul.columns);
      for (; d < width; d += narrow) add(matmul.narrow, d);
    }
  }
}

// Compute the same if values are in keys. A strip of the elements of values is brought into the order of values, and
// stays in the first-level cache while all rows of the tile are multiplied.
template <class T>
void add_values_in_keys(const Call<T> &call, const Groups &here, const Groups &next, const Left<T> *weights,
                        long blocks, Workspace<T> &space, float *memory) {
  const AttentionLayer &layer = call.layer;
  const long width = layer.value_dim, share = (here.count + blocks - 1) / blocks;
  const long item = layer.pages == kUnrounded ? sizeof(T) : 1;
  const long most = std::min(kStripGroups, Format<T>::kPositions / kGroup);
  long strip = kGroup;
  for (long block = 0; block < blocks; block++)
    strip = std::max<long>(strip, space.blocks[block].matmuls->columns * kLanes);
  for (long g = 0, until; g < here.count; g = until) {
    until = std::min((here.first / kGroup + g + most) / most * most - here.first / kGroup, here.count);
    for (long begin = 0; begin < width; begin += strip) {
      const long count = std::min(strip, width - begin), offset = begin * kGroup * item;
      const T *values[kSpan / kGroup];
      for (long i = g; i < until; i++) {
        T *to = space.values + (i - g) * kGroup * count;
        values[i - g] = to;
        const bool is_rounded = layer.pages != kUnrounded;
        if (is_rounded) widen_part(layer, here.k[i] + offset, kGroup * count, space.wide);
        transpose_group(is_rounded ? space.wide : reinterpret_cast<const T *>(here.k[i] + offset), count, to);
      }
      for (long block = 0; block < blocks; block++) {
        const long start = space.blocks[block].start;
        const Matmuls<T> &matmul = *space.blocks[block].matmuls;
        const uint8_t *ahead[kSpan / kGroup];
        for (long i = g; i < until; i++) {
          const bool is_mine = i >= share * block && i < share * (block + 1);
          ahead[i - g] = is_mine ? next.k[i] + offset : here.k[i] + offset + kGroup * count * item;
        }
        const auto add = [&](auto matmul, long d) {
          matmul(weights + start * kSpan + g * kGroup, values, ahead, item, until - g, count, d, g > 0,
                 memory + start * width + begin, width);
        };
        long d = 0;
        for (; d + matmul.columns * kLanes <= count; d += matmul.columns * kLanes) add(matmul.wide, d);
        const long narrow = kLanes * (kVectors < matmul.columns ? kVectors : matmul.columns);
        for (; d < count; d += narrow) add(matmul.narrow, d);
      }
    }
  }
}

// Compute a task. `following`: the task that this thread computes next, whose first keys are prefetched; or null.
template <class T>
__attribute__((noinline)) void compute(const Call<T> &call, const Task &task, const Task *following,
                                       Workspace<T> &space) {
  const AttentionLayer &layer = call.layer;
  const bool has_scales = layer.pages == kInt8Pages;
  const long width = layer.value_dim, rows = task.rows, blocks = find_rows(call, task, space);
  for (long r = 0; r < rows; r++) {
    const T *from = call.q + space.q_at[r];
    Left<T> *to = space.q + r * kMaxHead;
    if constexpr (std::is_same_v<Left<T>, T>) memcpy(to, from, layer.head_dim * sizeof(T));
    else for (long d = 0; d < layer.head_dim; d += kLanes) simd::store(to + d, simd::load(from + d));
  }
  if (!task.partials) clear(space.result, rows, width);

  // No other task reads the new key and value of this sequence and KV head (`can_store_in_tasks`).
  if (call.rows && task.end_span * kSpan > space.last[rows - 1])
    write_head(layer, *call.rows, call.step.query_start_loc[task.seq], task.head, call.k, call.v);
  Left<T> *weights = weights_of(space);
  Groups here, next;
  find_groups(call, task, task.first_span, here);
  for (long span = task.first_span; span < task.end_span; span++, here = next) {
    if (span + 1 < task.end_span) find_groups(call, task, span + 1, next);
    else if (following) find_groups(call, *following, following->first_span, next);
    else next = here;
    float *memory = task.partials ? task.partials + (span - task.first_span) * span_size(rows, width) : space.part;
    score_span(call, here, blocks, space);
    for (long r = 0; r < rows; r++) {
      const long last = space.last[r], high = last - here.first + 1, most = here.count * kGroup;
      const long seen_from = first_visible(layer, last), low = seen_from > here.first ? seen_from - here.first : 0;
      float *scores = space.scores + r * kSpan;
      if (has_scales) scale_scores(layer, space, r, most);
      softmax(layer, scores, weights + r * kSpan, has_scales ? space.value_scales : nullptr, low,
              high < most ? high : most, most, peaks_of(memory, rows, width) + r, totals_of(memory, rows, width) + r);
    }
    if (layer.value_in_key) add_values_in_keys(call, here, next, weights, blocks, space, memory);
    else add_values(call, here, next, weights, blocks, space, memory);
    if (!task.partials) merge(space.result, memory, rows, width);
  }
  if (!task.partials) finish(call, task, space);
}

// Call visit(task) for each tile of all sequences and KV heads, with all spans of the tile. Later tiles of a sequence
// come first because they take longer.
template <class Visit>
void for_each_tile(const AttentionStep &step, const AttentionLayer &layer, const Visit &visit) {
  const long num_queries_per_kv = layer.heads / layer.kv_heads;
  for (int seq = 0; seq < step.seqs; seq++) {
    const long rows = (step.query_start_loc[seq + 1] - step.query_start_loc[seq]) * num_queries_per_kv;
    for (long row = (rows - 1) / kTile * kTile; row >= 0 && rows; row -= kTile) {
      Task task{seq, 0, static_cast<int>(row), static_cast<int>(rows - row < kTile ? rows - row : kTile), 0, 0, nullptr};
      const auto [begin, end] = seen_by(step, layer, task);
      task.first_span = begin / kSpan, task.end_span = (end + kSpan - 1) / kSpan;
      for (; task.head < layer.kv_heads; task.head++) visit(task);
    }
  }
}

// Return whether every sequence has one query token, and the heads of a KV head fit in one tile.
bool is_decode(const AttentionStep &step, const AttentionLayer &layer) {
  for (long seq = 0; seq < step.seqs; seq++)
    if (step.query_start_loc[seq + 1] - step.query_start_loc[seq] != 1) return false;
  return layer.heads / layer.kv_heads <= kTile;
}

// Return whether the last token of `seq` fills a page that another sequence reads: the prefix cache shares a page within
// the step that fills it. Tables have a shared page in the same column.
bool fills_shared_page(const AttentionStep &step, const AttentionLayer &layer, long seq) {
  const long filled = step.seq_lens[seq];
  if (filled % layer.block_size) return false;
  const auto page_of = [&](long other) {
    return step.tables[step.rows[other] * step.table_width + filled / layer.block_size - 1];
  };
  for (long other = 0; other < step.seqs; other++)
    if (other != seq && step.seq_lens[other] > filled && page_of(other) == page_of(seq)) return true;
  return false;
}

// Return whether each task of a step can store the new key and value itself, because no other task reads them.
bool can_store_in_tasks(const AttentionStep &step, const AttentionLayer &layer) {
  if (!is_decode(step, layer)) return false;
  for (long seq = 0; seq < step.seqs; seq++)
    if (fills_shared_page(step, layer, seq)) return false;
  return true;
}

// Return the largest number of spans in a part of a tile, if `threads` threads compute the `spans` spans of a step: small
// enough to keep all threads busy until the end, unless the results of single spans would take too much memory.
long spans_per_part(const AttentionStep &step, const AttentionLayer &layer, long spans, long threads) {
  long share = std::max(threads == 1 ? spans : spans / (threads * kPartsPerThread), kLeastSpans);
  for (;; share *= 2) {
    long kept = 0;
    for_each_tile(step, layer, [&](const Task &task) {
      const long own = task.end_span - task.first_span;
      if (own > share) kept += own * span_size(task.rows, layer.value_dim);
    });
    if (kept <= threads * kMostKept) return share;
  }
}

template <class T>
void run(const Call<T> &call) {
  const AttentionStep &step = call.step;
  const AttentionLayer &layer = call.layer;
  const long width = layer.value_dim, threads = omp_get_max_threads();
  long tiles = 0, spans = 0;
  for_each_tile(step, layer, [&](const Task &task) { tiles++, spans += task.end_span - task.first_span; });
  const long share = spans_per_part(step, layer, spans, threads);
  const Arena::Mark mark = arena().mark();
  Task *tasks = arena().take<Task>(tiles + spans / share);
  Task *split = arena().take<Task>(spans / share);
  long count = 0, splits = 0;
  for_each_tile(step, layer, [&](Task task) {
    const long first = task.first_span, end = task.end_span;
    if (end - first <= share) {
      tasks[count++] = task;
      return;
    }
    const long size = span_size(task.rows, width), parts = (end - first + share - 1) / share;
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
    if (step.seqs == 1 && call.rows) {  // tasks of about one size, so each thread knows its next task
      const long team = omp_get_num_threads(), me = omp_get_thread_num(), end = count * (me + 1) / team;
      for (long i = count * me / team; i < end; i++)
        compute(call, tasks[i], i + 1 < end ? tasks + i + 1 : nullptr, space);
#pragma omp barrier
    } else {
#pragma omp for schedule(dynamic)
      for (long i = 0; i < count; i++) compute(call, tasks[i], nullptr, space);
    }
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
            void *k_pages, void *v_pages, const float *sinks, const NewRows<T> *rows) {
  if (rows && !can_store_in_tasks(step, layer)) {
    write_kv(layer, *rows, k_pages, v_pages);
    rows = nullptr;
  }
  run(Call<T>{step, layer, q, out, static_cast<uint8_t *>(k_pages), static_cast<uint8_t *>(v_pages), q_stride,
              out_stride, sinks, rows});
}

#define OARLOCK_ATTEND(T)                                                                                          \
  template void attend<T>(const AttentionStep &, const AttentionLayer &, const T *, long, T *, long, void *, void *, \
                          const float *, const NewRows<T> *);
OARLOCK_FOR_EACH_TYPE(OARLOCK_ATTEND)

extern "C" void oarlock_attend(const AttentionStep *step, const AttentionLayer *layer, const void *q, long q_stride,
                               void *out, long out_stride, void *k_pages, void *v_pages, const float *sinks,
                               int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    attend<T>(*step, *layer, static_cast<const T *>(q), q_stride, static_cast<T *>(out), out_stride,
              k_pages, v_pages, sinks);
  });
}
