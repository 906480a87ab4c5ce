// Causal attention over a paged KV cache, read in place. Decode, prefill and chunked prefill share one code path.
//
// Pages hold groups of 16 positions, 16 * D elements of keys and 16 * E of values, in the order in which the matmuls
// read them:
//   keys    [D / s][16][s]     one load: s neighbouring elements of several positions
//   values  [16 / s][E][s]     one load: several elements of s neighbouring positions
// s is 2 for bfloat16, whose dot product takes pairs, and 1 otherwise. 8-bit pages have the same order, with the s of
// the model's dtype. In int8 pages, the bfloat16 scales [16] of the positions follow the elements of each group.
//
// If the value is in the key, it is the first E elements of the key, and there are no groups of values. In int8 pages,
// the value and the other elements of such a key then have separate scales: [2][16].
#pragma once
#include <cstdint>

// Inputs shared by all layers of a step. S: sequences. B: columns of `tables`. R: rows of `tables`, one for each
// sequence in the engine.
struct AttentionStep {
  const int32_t *tables;           // [R, B]     block ids of the sequence in each row, in the order of positions
  const int32_t *rows;             // [S]        the row of each sequence in `tables`
  const int32_t *query_start_loc;  // [S + 1]    the first query row of each sequence
  const int32_t *seq_lens;         // [S]        positions after this step
  long seqs, table_width;
};

enum Pages { kUnrounded = 0, kInt8Pages = 1, kFp8Pages = 2 };  // model dtype; int8 with scales; e4m3

struct AttentionLayer {
  long heads, kv_heads;  // heads of this rank; query head h reads KV head h / (heads / kv_heads)
  long head_dim;         // D, elements of a query and of a key: a multiple of 16, at most 576
  long value_dim;        // E, elements of a value and of a result: likewise
  long block_size;       // positions per page, a multiple of 16
  long window;           // a query sees itself and the window - 1 positions before it; 0: all
  long chunk;            // a query sees the positions of its own chunk of this many, up to itself; 0: no chunks
  float scale;
  float softcap;  // if positive, scores become softcap * tanh(score / softcap)
  int pages;      // a Pages value: the format of the KV cache
  int value_in_key;  // the value is the first E elements of the key, and has no pages
};

// Keys and values of the tokens of this step, k [tokens, kv_heads, D] and v [tokens, kv_heads, E], rows `k_stride` and
// `v_stride` elements apart, and their `slots` [tokens]: block * block_size + offset. v is null if values are in keys.
template <class T>
struct NewRows {
  const T *k;
  long k_stride;
  const T *v;
  long v_stride;
  const int64_t *slots;
  long tokens;
};

// Compute attention for q [T, heads, D] into out [T, heads, E], rows `q_stride` and `out_stride` elements apart. Pages
// are [blocks, kv_heads, block_size / 16] groups. sinks [heads], or null: a score per head that joins the scores of the
// positions after the softcap, but has no value. If `rows` is given, store these keys and values in the pages first.
// Call it outside of parallel regions: it uses all threads, and the arena of the calling thread.
template <class T>
void attend(const AttentionStep &step, const AttentionLayer &layer, const T *q, long q_stride, T *out, long out_stride,
            void *k_pages, void *v_pages, const float *sinks, const NewRows<T> *rows = nullptr);

// Store `rows`. Writing the first slot of a page first clears its values (int8: the scales of its values). Positions
// with weight zero are multiplied too, and the data that an earlier sequence left there may be NaN: zero times NaN is
// not zero.
template <class T>
void write_kv(const AttentionLayer &layer, const NewRows<T> &rows, void *k_pages, void *v_pages);

// Store the key and the value of row `token` for one KV head, like `write_kv`. Calling it for all heads stores the row.
template <class T>
void write_head(const AttentionLayer &layer, const NewRows<T> &rows, long token, long head, void *k_pages, void *v_pages);
