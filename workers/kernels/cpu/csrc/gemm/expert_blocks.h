// The pairs (row, expert) of an MoE layer's rows, sorted by expert and cut into blocks.
#pragma once
#include <algorithm>

#include "gemm/experts.h"
#include "gemm/strips.h"
#include "runtime/arena.h"

namespace gemm {

// Rows of x sorted by expert, and within each expert in a given order.
struct Sorted {
  struct Block {
    long expert, begin, rows;  // the expert's index on this rank, and its range of pairs
  };
  long count, pairs;
  Block *blocks;
  int32_t *row_of, *own;  // [pairs]   the row of x; the index of the pair itself
  float *weight_of;       // [pairs]
  float *factor_of;       // [pairs]   factors of results: the weights, or ones if weights multiply inputs

  // `order` [rows]: the order of rows within an expert; null: by row. The caller releases the memory.
  Sorted(const Experts &e, const int32_t *ids, const float *weights, long rows, long per_row, const int32_t *order)
      : count(0), pairs(0) {
    long *next = arena().take<long>(e.count + 1);
    std::fill(next, next + e.count + 1, 0);
    for (long i = 0; i < rows * per_row; i++)
      if (const long expert = ids[i] - e.first; expert >= 0 && expert < e.count) next[expert + 1]++, pairs++;
    long most = 0;
    for (long expert = 0; expert < e.count; expert++) most += (next[expert + 1] + kMostRows - 1) / kMostRows;
    blocks = arena().take<Block>(most);
    for (long expert = 0; expert < e.count; expert++) {
      const long all = next[expert + 1], parts = (all + kMostRows - 1) / kMostRows;
      for (long part = 0; part < parts; part++) {
        const long begin = all * part / parts;
        blocks[count++] = {expert, next[expert] + begin, all * (part + 1) / parts - begin};
      }
      next[expert + 1] += next[expert];
    }
    row_of = arena().take<int32_t>(pairs);
    own = arena().take<int32_t>(pairs);
    weight_of = factor_of = arena().take<float>(pairs);
    if (e.weighs_inputs) {
      factor_of = arena().take<float>(pairs);
      std::fill(factor_of, factor_of + pairs, 1.0f);
    }
    for (long i = 0; i < rows; i++) {
      const long row = order ? order[i] : i;
      for (long choice = row * per_row; choice < (row + 1) * per_row; choice++)
        if (const long expert = ids[choice] - e.first; expert >= 0 && expert < e.count) {
          const long pair = next[expert]++;
          row_of[pair] = row;
          own[pair] = pair;
          weight_of[pair] = weights[choice];
        }
    }
  }
};

}  // namespace gemm
