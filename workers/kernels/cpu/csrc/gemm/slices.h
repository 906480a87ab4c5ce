// The inputs of a matmul, cut into slices of equal length (`MatmulArgs::slices`), and the slices cut into blocks.
//
// If ranks share a weight along its inputs, each rank has neighbouring slices. Each slice is summed separately, in
// blocks that start at the beginning of the slice. The sums of slices are added in a balanced binary tree, ((0 + 1) +
// (2 + 3)) + ..., first within each rank and then over the ranks. So the bits of a total do not depend on the number of
// ranks.
#pragma once
#include <algorithm>

#include "simd/simd.h"

namespace gemm {

constexpr long kMostSlices = 8;
constexpr long kPending = 4;  // most sums of slices kept at a time: sums of 4, 2 and 1 slices, and of the newest

struct Slices {
  long count, length;  // number of slices, and inputs of a slice
  long block, blocks;  // inputs of a block, and blocks of a slice

  // Cut slices into blocks of at most `most` inputs.
  Slices(long inputs, long count, long most)
      : count(count), length(inputs / count), block(most), blocks((length + most - 1) / most) {}

  // Return the same slices with blocks of about equal length, a multiple of `step`: while one block is multiplied, the
  // next is prefetched.
  Slices even(long step) const {
    Slices other = *this;
    other.block = (length + blocks * step - 1) / (blocks * step) * step;
    other.blocks = (length + other.block - 1) / other.block;
    return other;
  }
  long all_blocks() const { return count * blocks; }
  // Return the slice of a block, and its index in that slice. Most slices are one block, and then the slow division is
  // avoided.
  long slice_of(long index) const { return blocks == 1 ? index : index / blocks; }
  long in_slice(long index) const { return blocks == 1 ? 0 : index % blocks; }
  long first_input(long index) const { return slice_of(index) * length + in_slice(index) * block; }
  long inputs_of(long index) const { return std::min(block, length - in_slice(index) * block); }
};

// Return the number of pending partial sums before slice `slice` (the number of set bits of its index). This is its
// index in the stack.
inline long pending_before(long slice) { return __builtin_popcountl(slice); }

// Add the sums of slice `slice` to the previous sums in the same branch of the tree, and continue up the tree while
// branches are complete. sums [kPending][size]; after the last slice, the first holds the total. `size` is a multiple
// of kLanes.
inline void add_slice(float *sums, long slice, long size) {
  for (float *here = sums + pending_before(slice) * size; slice & 1; slice >>= 1, here -= size)
    for (long at = 0; at < size; at += simd::kLanes)
      simd::store(here - size + at, simd::load(here - size + at) + simd::load(here + at));
}

}  // namespace gemm
