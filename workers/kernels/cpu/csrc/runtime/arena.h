// Scratch memory for intermediate results. It grows to the size that the largest step needs and is kept, so that later
// steps do not allocate. Memory taken outside of parallel regions may be used by all threads. Memory taken inside a
// parallel region belongs to the thread that took it.
#pragma once
#include <cstddef>

class Arena {
 public:
  Arena() = default;
  Arena(const Arena &) = delete;
  ~Arena();

  // Return memory for `count` elements, aligned to 64 bytes and not initialised. Valid until the matching `release`.
  template <class T>
  T *take(long count) {
    return static_cast<T *>(take_bytes(count * sizeof(T)));
  }

  // A position in the arena. `release(mark)` frees all memory taken since.
  struct Mark {
    int chunk;
    size_t used;
  };
  Mark mark() const { return {current_, used_}; }
  void release(Mark mark);

 private:
  static constexpr int kChunks = 16;
  struct Chunk {
    char *memory = nullptr;
    size_t bytes = 0;
  };
  void *take_bytes(size_t bytes);

  Chunk chunks_[kChunks];
  int current_ = 0;
  size_t used_ = 0;  // bytes used of the current chunk
};

// Return the arena of the calling thread.
Arena &arena();
