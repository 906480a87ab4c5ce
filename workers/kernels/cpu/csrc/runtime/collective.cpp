// All-reduce over ranks (see collective.h).
#include "runtime/collective.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>

#include "runtime/parallel.h"

namespace {

constexpr long kLine = 64, kLooks = 64;  // cache line in bytes; flag checks between two readings of the clock
constexpr timespec kSleep = {0, 50000};

double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Hint to the processor that this is a spin loop.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint64_t *flag(const RankGroup &group, long rank) { return reinterpret_cast<uint64_t *>(group.flags + rank * kLine); }

float *input(const RankGroup &group, long rank) {
  const long half = group.collective % 2;
  return reinterpret_cast<float *>(group.inputs + (half * group.size + rank) * group.buffer_bytes);
}

// Return whether a rank has published this collective. Acquire: data that the peer wrote before it released its flag is
// read after this load.
bool has_come(const RankGroup &group, long rank) {
  return __atomic_load_n(flag(group, rank), __ATOMIC_ACQUIRE) >= group.collective;
}

bool wait_for(const RankGroup &group, long rank) {
  if (has_come(group, rank)) return true;
  for (const double until = now_s() + group.spin_s; now_s() < until;) {
    for (long look = 0; look < kLooks; look++) {
      if (has_come(group, rank)) return true;
      relax();
    }
  }
  for (long i = 0; i < group.yields; i++) {
    if (has_come(group, rank)) return true;
    sched_yield();
  }
  const double deadline = now_s() + group.timeout_s;
  while (!has_come(group, rank)) {
    if (now_s() > deadline) return false;
    nanosleep(&kSleep, nullptr);
  }
  return true;
}

constexpr long kStretch = 1024;  // elements summed at a time; they stay in the first-level cache

// Set `to` [count] to the sum of the inputs of ranks `first` to `first + ranks`, from element `at` on, in the order of
// `tree_sum`: the first half is the largest power of two below `ranks`, the second half the remaining ranks.
void add_up(const RankGroup &group, long first, long ranks, long at, long count, float *to) {
  const float *one = input(group, first) + at;
  if (ranks == 1) {
    std::copy(one, one + count, to);
  } else if (ranks == 2) {
    const float *other = input(group, first + 1) + at;
    for (long i = 0; i < count; i++) to[i] = one[i] + other[i];
  } else {
    long half = 1;
    while (2 * half < ranks) half *= 2;
    float rest[kStretch];
    add_up(group, first, half, at, count, to);
    add_up(group, first + half, ranks - half, at, count, rest);
    for (long i = 0; i < count; i++) to[i] += rest[i];
  }
}

// Reduce one piece, which fits a buffer.
int reduce_piece(RankGroup &group, float *x, long count) {
  group.collective++;
  std::memcpy(input(group, group.rank), x, count * sizeof(float));
  // Release: the input is visible before the flag. This rank has also finished reading the inputs of the collective
  // before last, so a peer that sees the flag may overwrite its own input.
  __atomic_store_n(flag(group, group.rank), group.collective, __ATOMIC_RELEASE);
  for (long rank = 0; rank < group.size; rank++)
    if (!wait_for(group, rank)) return static_cast<int>(rank);
#pragma omp parallel for if (count > kSerial)
  for (long at = 0; at < count; at += kStretch)
    add_up(group, 0, group.size, at, std::min(kStretch, count - at), x + at);
  return kAllArrived;
}

}  // namespace

int all_reduce(RankGroup &group, float *x, long count) {
  const long piece = group.buffer_bytes / static_cast<long>(sizeof(float));
  for (long first = 0; first < count; first += piece) {
    const int missing = reduce_piece(group, x + first, std::min(piece, count - first));
    if (missing != kAllArrived) return missing;
  }
  return kAllArrived;
}

int oarlock_all_reduce(RankGroup *group, float *x, long count) { return all_reduce(*group, x, count); }
