// Sums over the ranks of one host through shared memory. The layout and the protocol are those of
// `workers/distributed/all_reduce.py`, the reference; ranks may mix both forms, even in one collective.
#pragma once
#include <cstdint>

struct RankGroup {
  char *flags;         // [size, 64 bytes]   in the first 8 of each line the collective that the rank has published
  char *inputs;        // [2, size, buffer_bytes]
  long buffer_bytes, rank, size;
  uint64_t collective;  // the latest that this rank has entered, counted by both forms
  double spin_s;        // a wait spins for so long, then
  long yields;          // offers its core so often, then sleeps between looks, until
  double timeout_s;     // is over
};

constexpr int kAllCame = -1;

// x [count] = the sum of all ranks' x, added in a tree: the same bits on each, and at the numbers of ranks that have the
// branches of the tree whole (gemm/slices.h). Returns kAllCame, or the rank that did not reach the collective in time.
int all_reduce(RankGroup &group, float *x, long count);

extern "C" int oarlock_all_reduce(RankGroup *group, float *x, long count);
