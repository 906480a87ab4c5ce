// Work that is divided evenly among the threads of a parallel region, where a thread that is done helps the others.
//
// Each thread takes from its own share in order, as weights are fetched best, and then from those of others. A thread that
// the system has taken off its processor then costs the time of one piece and not that of its whole share.
#pragma once
#include <omp.h>

#include <atomic>
#include <new>

#include "runtime/arena.h"

class Shares {
 public:
  // `count` pieces, for a region that begins now; the caller releases the arena after it.
  explicit Shares(long count) : count_(count), threads_(omp_get_max_threads()) {
    next_ = arena().take<Next>(threads_);
    for (long thread = 0; thread < threads_; thread++) new (next_ + thread) Next{begin(thread)};
  }

  // Called by every thread of the region: visit(piece) for those it takes.
  template <class Visit>
  void visit(const Visit &visit) const {
    for (long i = 0, own = omp_get_thread_num(); i < threads_; i++) {
      const long share = (own + i) % threads_, end = begin(share + 1);
      for (long piece; (piece = next_[share].piece.fetch_add(1, std::memory_order_relaxed)) < end;) visit(piece);
    }
  }

 private:
  struct alignas(64) Next {
    std::atomic<long> piece;  // the first one of the share that nobody took
  };
  long begin(long share) const { return count_ * share / threads_; }

  long count_, threads_;
  Next *next_;
};
