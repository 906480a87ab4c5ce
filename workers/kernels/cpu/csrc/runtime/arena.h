// Scratch memory for intermediate results: grows to what the largest step needs and is kept, so that steps do not
// allocate. What a thread takes outside of parallel regions may be used by all threads, what it takes inside by itself.
#pragma once
#include <cstddef>

class Arena {
 public:
  Arena() = default;
  Arena(const Arena &) = delete;
  ~Arena();

  // `count` elements, aligned to 64 bytes and not initialised; valid until the matching `release`.
  template <class T>
  T *take(long count) {
    return static_cast<T *>(take_bytes(count * sizeof(T)));
  }

  // What was taken since `mark` may be used again.
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
  size_t used_ = 0;  // of the current chunk
};

// The arena of this thread.
Arena &arena();
