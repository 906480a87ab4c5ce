// Work that is divided evenly among the threads of a parallel region. A thread that is done helps the others.
//
// Each thread takes the pieces of its own share in order, which suits prefetching, and then pieces of other shares. So
// if the system takes a thread off its processor, the others wait for one piece and not for its whole share.
#pragma once
#include <omp.h>

#include <atomic>
#include <new>

#include "runtime/arena.h"

class Shares {
 public:
  // Divide `count` pieces for a region that begins now. The caller releases the arena after it.
  explicit Shares(long count) : count_(count), threads_(omp_get_max_threads()) {
    next_ = arena().take<Next>(threads_);
    for (long thread = 0; thread < threads_; thread++) new (next_ + thread) Next{begin(thread)};
  }

  // Call visit(piece) for each piece that this thread takes. Every thread of the region calls this.
  template <class Visit>
  void visit(const Visit &visit) const {
    for (long i = 0, own = omp_get_thread_num(); i < threads_; i++) {
      const long share = (own + i) % threads_, end = begin(share + 1);
      for (long piece; (piece = next_[share].piece.fetch_add(1, std::memory_order_relaxed)) < end;) visit(piece);
    }
  }

 private:
  struct alignas(64) Next {
    std::atomic<long> piece;  // the first piece of the share that no thread took
  };
  long begin(long share) const { return count_ * share / threads_; }

  long count_, threads_;
  Next *next_;
};
