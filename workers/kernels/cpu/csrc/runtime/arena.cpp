#include "runtime/arena.h"

#include <cstdlib>

namespace {

constexpr size_t kAlignment = 64, kFirst = size_t{1} << 20;

size_t rounded_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Arena::~Arena() {
  for (Chunk &chunk : chunks_) free(chunk.memory);
}

// Return `bytes` bytes. If the current chunk is too small, the next chunk is at least as large as all chunks before it,
// so there are few chunks. Once everything is released, a single chunk of their total size replaces them.
void *Arena::take_bytes(size_t bytes) {
  bytes = rounded_up(bytes);
  size_t held = 0;
  for (int chunk = 0; chunk < current_; chunk++) held += chunks_[chunk].bytes;
  for (;;) {
    Chunk &chunk = chunks_[current_];
    if (chunk.memory && used_ + bytes <= chunk.bytes) {
      char *at = chunk.memory + used_;
      used_ += bytes;
      return at;
    }
    held += chunk.bytes;
    if (chunk.memory && used_ == 0) {  // an empty chunk that is too small is replaced
      free(chunk.memory);
      chunk.memory = nullptr;
    }
    if (!chunk.memory) {
      chunk.bytes = bytes > held ? bytes : held;
      if (chunk.bytes < kFirst) chunk.bytes = kFirst;
      chunk.memory = static_cast<char *>(aligned_alloc(kAlignment, rounded_up(chunk.bytes)));
      if (!chunk.memory) abort();  // like any failed allocation in a rank: the engine reports which rank died
      continue;
    }
    if (current_ + 1 == kChunks) abort();
    current_++;
    used_ = 0;
  }
}

void Arena::release(Mark mark) {
  current_ = mark.chunk;
  used_ = mark.used;
  if (current_ != 0 || used_ != 0 || !chunks_[1].memory) return;
  size_t all = 0;
  for (Chunk &chunk : chunks_) {
    all += chunk.bytes;
    free(chunk.memory);
    chunk = Chunk{};
  }
  chunks_[0].memory = static_cast<char *>(aligned_alloc(kAlignment, rounded_up(all)));
  if (!chunks_[0].memory) abort();
  chunks_[0].bytes = all;
}

Arena &arena() {
  static thread_local Arena own;
  return own;
}
