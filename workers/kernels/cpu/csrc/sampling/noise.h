// The noise of `workers/sampling/noise.py`: a hash of (row key, vocabulary id), with the same bits.
//
// A hashed word is represented by its distance from the largest word: 0 is the largest noise, 2^32 - 1 the smallest.
#pragma once
#include <cmath>

#include "simd/simd.h"

namespace noise {

// A 32-bit word for each lane of a register of floats. The operators of GCC and Clang work on them.
typedef uint32_t Words __attribute__((vector_size(sizeof(simd::Vec))));
constexpr int kBlock = 128;  // ids
constexpr int kVectors = kBlock / simd::kLanes;

struct Key {
  uint32_t first, second;  // the second is odd
};

// Return the part of the hash that depends only on the id, for one word or for each word of a register.
template <class Word>
inline Word mixed(Word id) {
  id = (id ^ (id >> 16)) * 0x7feb352du;
  id = (id ^ (id >> 15)) * 0x846ca68bu;
  return id ^ (id >> 16);
}

template <class Word>
inline Word distance(Word mixed_id, Key key) {
  Word word = (mixed_id ^ key.first) * key.second;
  word = (word ^ (word >> 16)) * 0x7feb352du;
  word = (word ^ (word >> 15)) * 0x846ca68bu;
  return word ^ 0x7fffffffu;  // words are compared as signed integers: the largest is 0x7fffffff
}

inline Words ids_from(uint32_t first) {
  alignas(64) static const uint32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Words ids;
  memcpy(&ids, lanes, sizeof ids);
  return ids + first;
}

// Return the distance of the largest noise in a block. The ids are already mixed.
inline uint32_t least_distance(const Words *mixed_ids, Key key) {
  Words least = distance(mixed_ids[0], key);
  for (int i = 1; i < kVectors; i++) {
    const Words other = distance(mixed_ids[i], key);
    least = other < least ? other : least;
  }
  uint32_t most = least[0];
  for (int i = 1; i < simd::kLanes; i++) most = least[i] < most ? least[i] : most;
  return most;
}

// Return standard Gumbel noise -log(-log(u)) with u = 1 - tail(distance).
inline double gumbel(uint32_t distance) {
  const double uniform = (4294967295.5 - static_cast<double>(distance)) * 0x1p-32;
  return -std::log(-std::log(uniform));
}

// Return the probability that noise is larger, in float32. Its -log is an upper bound of the noise, because 1 - u <=
// -log(u).
inline simd::Vec tail(Words distance) {
  typedef float Floats __attribute__((vector_size(sizeof(simd::Vec))));
  const Floats numbers = __builtin_convertvector(distance, Floats);
  return ((simd::Vec)numbers + simd::broadcast(0.5f)) * simd::broadcast(0x1p-32f);
}

}  // namespace noise
