#ifdef __AVX512BF16__
// Causal attention over paged keys and values, read in place: decode, prefill and chunks through one path.
//
// A tile is up to 12 rows (query token, query head) of one sequence that share a KV head. For each chunk of up to 256
// positions, in order, it computes the scores, their softmax against a running maximum (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018) and the weighted sum of values. float32 and float16 take chunks of 64 and
// add scores in blocks of 16 elements: longer chains of additions would lose digits that bfloat16 does not have.
//
// Batch invariance: chunks are counted from position 0, every sum runs in the order of positions, and masked positions
// get weight zero, which changes no sum. So the bits of a row depend on its own sequence alone: not on the other rows
// of its tile, on how its prompt was cut into chunks, on other sequences of the batch, or on the number of threads.
//
// Pages hold groups of 16 positions, 16 * D elements each, in the order the products read them:
//   keys    [D / s][16][s]     one load: s neighbouring elements of 16 positions
//   values  [16 / s][D][s]     one load: 16 elements of s neighbouring positions
// s is 2 for bfloat16, whose dot product takes pairs, else 1.
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "old_vector_math.h"

namespace {

constexpr int kGroup = 16;    // positions per group
constexpr int kChunk = 256;   // positions per softmax update, at most
constexpr int kRows = 12;     // rows per tile
constexpr int kMaxHead = 256; // elements per head
constexpr float kHidden = -std::numeric_limits<float>::infinity();

struct Step {
  const void *q;          // [T, heads, D], rows `q_stride` apart
  void *out;              // [T, heads, D], rows `out_stride` apart
  const void *k, *v;      // pages of one layer: [blocks, kv_heads, block_size, D]
  const int32_t *tables;  // [S, table_width]
  const int32_t *query_start_loc, *seq_lens;
  long seqs, table_width, q_stride, out_stride, heads, kv_heads, head_dim, block_size;
  long window;  // 0: none
  float scale, softcap;  // softcap 0: none
};

// What depends on the type of keys and values: elements per load (kStep), positions per chunk (kPositions), elements per
// block of a score (kElements), the type of the left factor, and the product.
struct Bfloat16 {
  using Stored = uint16_t;
  using Left = uint16_t;
  static constexpr int kStep = 2, kPositions = kChunk, kElements = kMaxHead;
  static __m512 product(__m512 sum, const Stored *w, const Left *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
  }
  static Left left(Stored value) { return value; }
  static __m512 store_weights(Left *to, __m512 p) {  // rounds, and returns what was stored
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(p);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void store(Stored *to, __m512 y) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(y));
  }
};

struct Float32 {
  using Stored = float;
  using Left = float;
  static constexpr int kStep = 1, kPositions = 64, kElements = 16;
  static __m512 product(__m512 sum, const Stored *w, const Left *x) {
    return _mm512_fmadd_ps(_mm512_loadu_ps(w), _mm512_set1_ps(*x), sum);
  }
  static Left left(Stored value) { return value; }
  static __m512 store_weights(Left *to, __m512 p) { return _mm512_storeu_ps(to, p), p; }
  static void store(Stored *to, __m512 y) { _mm512_storeu_ps(to, y); }
};

struct Float16 {
  using Stored = uint16_t;
  using Left = float;
  static constexpr int kStep = 1, kPositions = 64, kElements = 16;
  static __m512 product(__m512 sum, const Stored *w, const Left *x) {
    const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w)));
    return _mm512_fmadd_ps(wide, _mm512_set1_ps(*x), sum);
  }
  static Left left(Stored value) { return _cvtsh_ss(value); }
  static __m512 store_weights(Left *to, __m512 p) { return _mm512_storeu_ps(to, p), p; }
  static void store(Stored *to, __m512 y) {
    const __m256i half = _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), half);
  }
};

// The state of a tile: its queries, the weights and scores of the current chunk, and the running sums.
template <class E>
struct Tile {
  alignas(64) typename E::Left q[kRows * kMaxHead];
  alignas(64) typename E::Left weights[kRows * kChunk];
  alignas(64) float scores[kRows * kChunk];
  alignas(64) float sum[kRows * kMaxHead];
  float peak[kRows], total[kRows];
  long last[kRows];  // the last position each row sees
};

// scores[r][0..31] of two groups of positions. Pages lie anywhere in memory, where hardware prefetching does not help, so
// the loop prefetches the values of the same groups and the keys of the next ones.
template <class E, int R>
void score(const typename E::Left *q, const typename E::Stored *k0, const typename E::Stored *k1, long width, float *to,
           const typename E::Stored *const next[4]) {
  for (long begin = 0; begin < width; begin += E::kElements) {
    const long end = width < begin + E::kElements ? width : begin + E::kElements;
    __m512 low[R], high[R];
    for (int r = 0; r < R; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (long d = begin; d < end; d += E::kStep, k0 += kGroup * E::kStep, k1 += kGroup * E::kStep) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        _mm_prefetch(reinterpret_cast<const char *>(next[i] + d * kGroup), _MM_HINT_T0);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        low[r] = E::product(low[r], k0, q + r * width + d);
        high[r] = E::product(high[r], k1, q + r * width + d);
      }
    }
    for (int r = 0; r < R; r++) {
      float *at = to + r * kChunk;
      if (begin) {
        low[r] = _mm512_add_ps(_mm512_loadu_ps(at), low[r]);
        high[r] = _mm512_add_ps(_mm512_loadu_ps(at + kGroup), high[r]);
      }
      _mm512_storeu_ps(at, low[r]);
      _mm512_storeu_ps(at + kGroup, high[r]);
    }
  }
}

// sum[r][d..d + 16 C) = sum * keep[r] + weights[r] @ values over `groups` groups of positions
template <class E, int R, int C>
void weighted_sum(const typename E::Left *weights, const typename E::Stored *const *v, long groups, long width, long d,
                  const float *keep, float *sum) {
  __m512 part[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) part[r][c] = _mm512_setzero_ps();
  for (long g = 0; g < groups; g++) {
    const typename E::Stored *from = v[g] + d * E::kStep;
    for (int j = 0; j < kGroup; j += E::kStep, from += width * E::kStep) {
#pragma GCC unroll 12
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++)
          part[r][c] = E::product(part[r][c], from + c * kGroup * E::kStep, weights + r * kChunk + g * kGroup + j);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      float *to = sum + r * width + d + c * kGroup;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), _mm512_set1_ps(keep[r]), part[r][c]));
    }
}

// Which of the 16 positions from `base` on a row may attend to: up to `last`, and within the window.
inline __mmask16 visible(long base, long last, long window) {
  const long count = last - base + 1;
  __mmask16 mask = count >= kGroup ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
  if (window) {
    const long blind = last - window + 1 - base;
    if (blind >= kGroup) return 0;
    if (blind > 0) mask &= static_cast<__mmask16>(~((1u << blind) - 1));
  }
  return mask;
}

// Online softmax of one row and chunk: scores become weights; returns the factor that rescales the earlier sums.
template <class E>
float softmax(const Step &s, Tile<E> &tile, int r, long base, long groups) {
  float *scores = tile.scores + r * kChunk;
  const __m512 hidden = _mm512_set1_ps(kHidden);
  __m512 peaks = hidden;
  for (long g = 0; g < groups; g++) {
    __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + g * kGroup), _mm512_set1_ps(s.scale));
    if (s.softcap > 0) {
      const __m512 cap = _mm512_set1_ps(s.softcap);
      x = _mm512_mul_ps(tanh_ps(_mm512_div_ps(x, cap)), cap);
    }
    x = _mm512_mask_blend_ps(visible(base + g * kGroup, tile.last[r], s.window), hidden, x);
    _mm512_storeu_ps(scores + g * kGroup, x);
    peaks = _mm512_max_ps(peaks, x);
  }
  typename E::Left *weights = tile.weights + r * kChunk;
  const float peak = std::fmax(tile.peak[r], _mm512_reduce_max_ps(peaks));
  if (peak == kHidden) {  // every position so far is masked
    memset(weights, 0, groups * kGroup * sizeof *weights);
    return 0.0f;
  }
  __m512 totals = _mm512_setzero_ps();
  for (long g = 0; g < groups; g++) {
    const __m512 p = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + g * kGroup), _mm512_set1_ps(peak)));
    totals = _mm512_add_ps(totals, E::store_weights(weights + g * kGroup, p));
  }
  const float keep = tile.peak[r] == kHidden ? 0.0f : exp_one(tile.peak[r] - peak);
  tile.total[r] = tile.total[r] * keep + _mm512_reduce_add_ps(totals);
  tile.peak[r] = peak;
  return keep;
}

template <class E, int R>
void attend_tile(const Step &s, long seq, long head, long row) {
  using Stored = typename E::Stored;
  Tile<E> tile;
  const long width = s.head_dim, num_queries_per_kv = s.heads / s.kv_heads;
  const long query = s.query_start_loc[seq];  // the sequence's first query token
  const long before = s.seq_lens[seq] - (s.query_start_loc[seq + 1] - query);  // positions before the first query
  const Stored *from[R];
  Stored *to[R];
  for (int r = 0; r < R; r++) {
    const long token = (row + r) / num_queries_per_kv;
    const long query_head = head * num_queries_per_kv + (row + r) % num_queries_per_kv;
    from[r] = static_cast<const Stored *>(s.q) + (query + token) * s.q_stride + query_head * width;
    to[r] = static_cast<Stored *>(s.out) + (query + token) * s.out_stride + query_head * width;
    for (long d = 0; d < width; d++) tile.q[r * width + d] = E::left(from[r][d]);
    tile.last[r] = before + token;
    tile.peak[r] = kHidden;
    tile.total[r] = 0;
  }
  memset(tile.sum, 0, R * width * sizeof(float));
  const long end = tile.last[R - 1] + 1;
  const long begin = s.window && tile.last[0] >= s.window ? (tile.last[0] - s.window + 1) / kGroup * kGroup : 0;
  const int32_t *table = s.tables + seq * s.table_width;
  constexpr long kLength = E::kPositions;
  for (long chunk = begin / kLength * kLength; chunk < end; chunk += kLength) {
    const long first = begin > chunk ? begin : chunk, stop = end < chunk + kLength ? end : chunk + kLength;
    const long groups = (stop - first + kGroup - 1) / kGroup;
    const Stored *k[kChunk / kGroup + 4], *v[kChunk / kGroup + 1];
    for (long g = 0; g < groups; g++) {
      const long position = first + g * kGroup;
      const long page = table[position / s.block_size] * s.kv_heads + head;
      const long at = (page * s.block_size + position % s.block_size) * width;
      k[g] = static_cast<const Stored *>(s.k) + at;
      v[g] = static_cast<const Stored *>(s.v) + at;
    }
    // Groups are taken in pairs: after an odd last one comes a copy whose scores are not read; the others are only
    // prefetched.
    for (long g = groups; g < groups + 4; g++) k[g] = k[groups - 1];
    v[groups] = v[groups - 1];
    for (long g = 0; g < groups; g += 2) {
      const Stored *const next[4] = {v[g], v[g + 1], k[g + 2], k[g + 3]};
      score<E, R>(tile.q, k[g], k[g + 1], width, tile.scores + g * kGroup, next);
    }
    float keep[R];
    for (int r = 0; r < R; r++) keep[r] = softmax<E>(s, tile, r, first, groups);
    long d = 0;
    for (; d + 2 * kGroup <= width; d += 2 * kGroup)
      weighted_sum<E, R, 2>(tile.weights, v, groups, width, d, keep, tile.sum);
    if (d < width) weighted_sum<E, R, 1>(tile.weights, v, groups, width, d, keep, tile.sum);
  }
  for (int r = 0; r < R; r++)
    for (long d = 0; d < width; d += kGroup)
      E::store(to[r] + d, _mm512_div_ps(_mm512_loadu_ps(tile.sum + r * width + d), _mm512_set1_ps(tile.total[r])));
}

template <class E>
using Attend = void (*)(const Step &, long, long, long);

template <class E>
void attend(const Step &s, const int32_t *tile_starts) {
  static constexpr Attend<E> kTiles[kRows + 1] = {
      nullptr,           attend_tile<E, 1>, attend_tile<E, 2>, attend_tile<E, 3>,  attend_tile<E, 4>,
      attend_tile<E, 5>, attend_tile<E, 6>, attend_tile<E, 7>, attend_tile<E, 8>,  attend_tile<E, 9>,
      attend_tile<E, 10>, attend_tile<E, 11>, attend_tile<E, 12>};
  const long num_queries_per_kv = s.heads / s.kv_heads, units = tile_starts[s.seqs] * s.kv_heads;
  // A unit is one tile of one KV head. Later tiles of a sequence see more positions and take longer, so threads take
  // units one by one.
#pragma omp parallel for schedule(dynamic) if (units > 1)
  for (long unit = 0; unit < units; unit++) {
    const long number = unit / s.kv_heads;
    long low = 0, high = s.seqs - 1;  // the sequence whose tiles include `number`
    while (low < high) {
      const long middle = (low + high + 1) / 2;
      if (tile_starts[middle] <= number) low = middle;
      else high = middle - 1;
    }
    const long rows = (s.query_start_loc[low + 1] - s.query_start_loc[low]) * num_queries_per_kv;
    const long row = (number - tile_starts[low]) * kRows;
    kTiles[rows - row < kRows ? rows - row : kRows](s, low, unit % s.kv_heads, row);
  }
}

// Store [T, kv_heads, D] at `slots`. Writing the first slot of a page clears the page of values first: weight zero times
// what an earlier sequence left there must be zero, and zero times NaN is not.
template <class Stored, int kStep>
void write(const Stored *k, const Stored *v, Stored *k_pages, Stored *v_pages, const int64_t *slots, long tokens,
           long k_stride, long v_stride, long kv_heads, long width, long block_size) {
#pragma omp parallel for schedule(static) if (tokens >= 64)
  for (long head = 0; head < kv_heads; head++)
    for (long t = 0; t < tokens; t++) {
      const long block = slots[t] / block_size, offset = slots[t] % block_size;
      const long page = (block * kv_heads + head) * block_size * width;
      if (offset == 0) memset(v_pages + page, 0, block_size * width * sizeof(Stored));
      const long group = page + offset / kGroup * kGroup * width, position = offset % kGroup;
      const Stored *key = k + t * k_stride + head * width, *value = v + t * v_stride + head * width;
      Stored *key_to = k_pages + group + position * kStep;
      Stored *value_to = v_pages + group + position / kStep * width * kStep + position % kStep;
      for (long d = 0; d < width; d += kStep, key_to += kGroup * kStep)
        memcpy(key_to, key + d, kStep * sizeof(Stored));
      for (long d = 0; d < width; d++) value_to[d * kStep] = value[d];
    }
}

}  // namespace

enum StoredType { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// `tile_starts` [S + 1]: how many tiles of 12 rows the sequences before each one have.
extern "C" void oarlock_attend(const void *q, void *out, const void *k, const void *v, const int32_t *tables,
                               const int32_t *query_start_loc, const int32_t *seq_lens, const int32_t *tile_starts,
                               long seqs, long table_width, long q_stride, long out_stride, long heads, long kv_heads,
                               long head_dim, long block_size, long window, float scale, float softcap, int type) {
  const Step s{q,          out,   k,        v,        tables,     query_start_loc, seq_lens, seqs, table_width, q_stride,
               out_stride, heads, kv_heads, head_dim, block_size, window,          scale,    softcap};
  if (type == kBfloat16) attend<Bfloat16>(s, tile_starts);
  else if (type == kFloat16) attend<Float16>(s, tile_starts);
  else attend<Float32>(s, tile_starts);
}

extern "C" void oarlock_write(const void *k, const void *v, void *k_pages, void *v_pages, const int64_t *slots,
                              long tokens, long k_stride, long v_stride, long kv_heads, long head_dim, long block_size,
                              int type) {
  using Half = uint16_t;
  if (type == kFloat32)
    write<float, 1>(static_cast<const float *>(k), static_cast<const float *>(v), static_cast<float *>(k_pages),
                    static_cast<float *>(v_pages), slots, tokens, k_stride, v_stride, kv_heads, head_dim, block_size);
  else
    (type == kBfloat16 ? write<Half, 2> : write<Half, 1>)(
        static_cast<const Half *>(k), static_cast<const Half *>(v), static_cast<Half *>(k_pages),
        static_cast<Half *>(v_pages), slots, tokens, k_stride, v_stride, kv_heads, head_dim, block_size);
}
#endif
