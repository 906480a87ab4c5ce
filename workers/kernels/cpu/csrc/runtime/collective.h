// All-reduce over the ranks of one host through shared memory. The memory layout and the protocol follow
// `workers/distributed/all_reduce.py`, the reference. Ranks may mix the two implementations, even in one collective.
#pragma once
#include <cstdint>

struct RankGroup {
  char *flags;  // [size, 64 bytes]   the first 8 bytes of each line: the latest collective that the rank has published
  char *inputs;        // [2, size, buffer_bytes]
  long buffer_bytes, rank, size;
  uint64_t collective;  // the latest collective that this rank has entered, counted by both implementations
  double spin_s;        // a wait spins for this time,
  long yields;          // then yields its core this number of times, then sleeps between checks until the timeout
  double timeout_s;     // timeout of a wait; then the rank counts as missing
};

constexpr int kAllArrived = -1;

// Replace x [count] by the sum over all ranks, added in a tree. The result has the same bits on every rank, and for
// every number of ranks that keeps the branches of the tree whole (gemm/slices.h). Return kAllArrived, or the rank that
// did not reach the collective in time.
int all_reduce(RankGroup &group, float *x, long count);

extern "C" int oarlock_all_reduce(RankGroup *group, float *x, long count);
