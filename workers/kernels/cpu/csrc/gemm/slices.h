// The inputs of a product, cut into slices of equal length (`Product::slices`), and these into blocks.
//
// Ranks hold neighbouring slices of a weight whose inputs are cut among them. Each slice is added up by itself, in blocks
// that begin anew with it, and the sums of slices are added in a balanced binary tree, ((0 + 1) + (2 + 3)) + ..., first by
// each rank and then over the ranks. So the bits of a total do not depend on the number of ranks.
#pragma once
#include <algorithm>

#include "simd/simd.h"

namespace gemm {

constexpr long kMostSlices = 8;
constexpr long kPending = 4;  // sums of slices that are kept at a time, at most: of 4, 2 and 1 slices, and of the newest

struct Slices {
  long count, length;  // slices, and inputs of each
  long block, blocks;  // inputs of a block, and blocks of a slice

  // Blocks of at most `most` inputs.
  Slices(long inputs, long count, long most)
      : count(count), length(inputs / count), block(most), blocks((length + most - 1) / most) {}

  // The same with blocks of about equal length, a multiple of `step`: while one is multiplied, the next is fetched.
  Slices even(long step) const {
    Slices other = *this;
    other.block = (length + blocks * step - 1) / (blocks * step) * step;
    other.blocks = (length + other.block - 1) / other.block;
    return other;
  }
  long all_blocks() const { return count * blocks; }
  // The slice of a block, and its number there. Most slices are one block: a division takes as long as eight products.
  long slice_of(long index) const { return blocks == 1 ? index : index / blocks; }
  long in_slice(long index) const { return blocks == 1 ? 0 : index % blocks; }
  long first_input(long index) const { return slice_of(index) * length + in_slice(index) * block; }
  long inputs_of(long index) const { return std::min(block, length - in_slice(index) * block); }
};

// Where the sums of slice number `slice` go, if those before it are added up as far as the tree allows: after so many others.
inline long pending_before(long slice) { return __builtin_popcountl(slice); }

// Adds the sums of slice number `slice` to those before it that belong to the same branch of the tree, and these to others:
// sums [kPending][size], of which the first holds the total after the last slice. `size` is a multiple of kLanes.
inline void add_slice(float *sums, long slice, long size) {
  for (float *here = sums + pending_before(slice) * size; slice & 1; slice >>= 1, here -= size)
    for (long at = 0; at < size; at += simd::kLanes)
      simd::store(here - size + at, simd::load(here - size + at) + simd::load(here + at));
}

}  // namespace gemm
