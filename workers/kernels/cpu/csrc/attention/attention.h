// Causal attention over paged keys and values, read in place: decode, prefill and chunks through one path.
//
// Pages hold groups of 16 positions, 16 * D elements each, in the order the products read them:
//   keys    [D / s][16][s]     one load: s neighbouring elements of several positions
//   values  [16 / s][D][s]     one load: several elements of s neighbouring positions
// s is 2 for bfloat16, whose dot product takes pairs, else 1. Pages in 8 bits have the same order, with s of the model's
// type; in int8, the scales [16] of the positions come after the numbers of a group, in bfloat16.
#pragma once
#include <cstdint>

// What all layers of a step share. S sequences; B columns of `tables`, which has a row for each sequence of the engine.
struct AttentionStep {
  const int32_t *tables;           // [R, B]     blocks of the sequence in each row, in the order of positions
  const int32_t *rows;             // [S]        the row of each sequence
  const int32_t *query_start_loc;  // [S + 1]    rows of the queries of each sequence
  const int32_t *seq_lens;         // [S]        positions after this step
  long seqs, table_width;
};

enum Pages { kUnrounded = 0, kInt8Pages = 1, kFp8Pages = 2 };  // in the model's type; int8 with scales; e4m3

struct AttentionLayer {
  long heads, kv_heads;  // of this rank; query head h reads KV head h / (heads / kv_heads)
  long head_dim;         // D: a multiple of 16, at most 256
  long block_size;       // positions per page, a multiple of 16
  long window;           // a query sees itself and the window - 1 positions before it; 0: all
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
  int pages;      // a Pages: the form of keys and values in memory
};

// Keys and values of a step's own tokens, k and v [tokens, kv_heads, D], rows `k_stride` and `v_stride` elements apart,
// and their `slots` [tokens]: block * block_size + offset.
template <class T>
struct NewRows {
  const T *k;
  long k_stride;
  const T *v;
  long v_stride;
  const int64_t *slots;
  long tokens;
};

// q [T, heads, D] and out [T, heads, D], rows `q_stride` and `out_stride` elements apart; pages [blocks, kv_heads,
// block_size / 16] groups. sinks [heads]: a score of each head that joins those of the positions, after the softcap, and
// has no value; or null. Stores `rows` in the pages first, if there are any. Called outside of parallel regions; uses all
// threads, and the arena of the calling one.
template <class T>
void attend(const AttentionStep &step, const AttentionLayer &layer, const T *q, long q_stride, T *out, long out_stride,
            void *k_pages, void *v_pages, const float *sinks, const NewRows<T> *rows = nullptr);

// Stores `rows`. Writing the first slot of a page clears the page of values first, or their scales: weight zero times
// what an earlier sequence left there must be zero, and zero times NaN is not.
template <class T>
void write_kv(const AttentionLayer &layer, const NewRows<T> &rows, void *k_pages, void *v_pages);

// Stores what row `token` has for one KV head, as `write_kv`: all heads of a row together are that row.
template <class T>
void write_head(const AttentionLayer &layer, const NewRows<T> &rows, long token, long head, void *k_pages, void *v_pages);
