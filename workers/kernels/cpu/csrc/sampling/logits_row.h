// Queries of sampling on one row of logits, in few passes and without sorting the row. One thread computes a row, in an
// order that depends only on the ISA level.
//
// Blocks have 128 ids, as in `workers/sampling/candidates.py`; `blocks` is ceil(width / 128). Rows with NaN or +inf are
// broken: their largest logit is NaN, and other queries have no result. A cut (low, end) keeps the ids with a logit
// above `low`, and the ids with logit `low` and a local id below `end`. This is a prefix of the row in the order of its
// logits.
#pragma once
#include <algorithm>
#include <array>
#include <functional>

#include "sampling/noise.h"
#include "simd/vector_math.h"

namespace sampling {

using namespace simd;
using noise::kBlock;
using noise::Key;
using noise::Words;

constexpr float kInfinity = __builtin_inff();

constexpr long kSlices = 8;  // slices of a vocabulary; also VOCAB_SLICES in workers/distributed/topology.py
inline long slice_of(long vocab_size) { return (vocab_size + kSlices - 1) / kSlices; }

struct Logits {
  const float *x;
  long width;
  const float *maxima;  // [blocks]
  float top;            // the largest logit of all ranks; masses are relative to it
  long slice;           // ids per slice; the masses of slices are summed separately

  long blocks() const { return (width + kBlock - 1) / kBlock; }
  bool broken() const { return !(top > -kInfinity && top < kInfinity); }
  // Return the logits from `at` on; -inf beyond the end of the row.
  Vec vector(long at) const {
    if (at + kLanes <= width) return load(x + at);
    return select(first(width - at), load(x + at, width - at), broadcast(-kInfinity));
  }
};

struct Cut {
  float low;
  long end;

  float below() const { return __builtin_nextafterf(low, -kInfinity); }  // `x >= low` is `x > below()`
};

// Return 1 / temperature, limited to finite values. Differences of logits are 0, or large enough for the lowest
// temperature.
inline float inverse_of(double temperature) { return static_cast<float>(std::min(1.0 / temperature, 3.4028234e38)); }

// Write the maximum of each block. Return the largest, or NaN if any logit is NaN or +inf.
inline float find_maxima(const float *x, long width, float *maxima) {
  const Logits row{x, width, maxima, 0, width};
  const Vec infinity = broadcast(kInfinity);
  float top = -kInfinity;
  bool finite = true;
  for (long b = 0; b < row.blocks(); b++) {
    Vec most = broadcast(-kInfinity);
    Mask below = first(kLanes);
    for (int i = 0; i < noise::kVectors; i++) {
      const Vec value = row.vector(b * kBlock + i * kLanes);
      below = both(below, less(value, infinity));  // false for NaN too
      most = max(value, most);
    }
    finite &= to_bits(below) == to_bits(first(kLanes));
    maxima[b] = largest(most);
    top = std::max(top, maxima[b]);
  }
  return finite ? top : __builtin_nanf("");
}

// Return sum(exp((x - top) / temperature)) over the ids from `begin` to `end` that each cut keeps, in one pass. Blocks
// are summed in float32, and their sums in float64. The sum of a cut does not depend on the other cuts.
template <int N>
std::array<double, N> slice_masses(const Logits &row, long begin, long end, double temperature,
                                   const std::array<Cut, N> &cuts) {
  std::array<double, N> totals = {};
  if (row.broken()) return totals;
  const float factor = static_cast<float>(std::min(kLog2E / temperature, 3.4028234e38));
  const Vec top = broadcast(row.top), scale = broadcast(factor);
  float least = kInfinity;
  for (const Cut &cut : cuts) least = std::min(least, cut.low);
  for (long start = begin; start < end; start += kBlock) {
    const long last = std::min((start + kBlock - 1) / kBlock, row.blocks() - 1);
    const float most = std::max(row.maxima[start / kBlock], row.maxima[last]);
    if (most < least || (most - row.top) * factor < -126.0f) continue;
    Vec sums[N][2];
    for (auto &sum : sums) sum[0] = sum[1] = zero();
    const auto add = [&](int i, Vec value, const auto &bound_of) {
      const Vec power = power_of_2((value - top) * scale);
#pragma GCC unroll 2
      for (int n = 0; n < N; n++) sums[n][i % 2] = sums[n][i % 2] + select(less(bound_of(n), value), power, zero());
    };
    bool uniform = start + kBlock <= end;  // each cut has one bound for the whole block
    for (const Cut &cut : cuts) uniform &= cut.end <= start || start + kBlock <= cut.end;
    if (uniform) {
      Vec bounds[N];
      for (int n = 0; n < N; n++) bounds[n] = broadcast(start < cuts[n].end ? cuts[n].below() : cuts[n].low);
      for (int i = 0; i < noise::kVectors; i++)
        add(i, load(row.x + start + i * kLanes), [&](int n) { return bounds[n]; });
    } else {
      for (int i = 0; i < noise::kVectors; i++) {
        const long at = start + i * kLanes;
        add(i, select(first(end - at), row.vector(at), broadcast(-kInfinity)), [&](int n) {
          return select(first(cuts[n].end - at), broadcast(cuts[n].below()), broadcast(cuts[n].low));
        });
      }
    }
    for (int n = 0; n < N; n++) totals[n] += sum(sums[n][0] + sums[n][1]);
  }
  return totals;
}

// Return the same sums over all ids, slice by slice, so that the bits do not depend on which rank has which slices of
// the vocabulary.
template <int N>
std::array<double, N> masses_of(const Logits &row, double temperature, const std::array<Cut, N> &cuts) {
  std::array<double, N> totals = {};
  for (long begin = 0; begin < row.width; begin += row.slice) {
    const auto masses = slice_masses<N>(row, begin, std::min(begin + row.slice, row.width), temperature, cuts);
    for (int n = 0; n < N; n++) totals[n] += masses[n];
  }
  return totals;
}

inline double mass_of(const Logits &row, double temperature, Cut cut) {
  return masses_of<1>(row, temperature, {cut})[0];
}

// Return the lowest local id with the largest logit. The row must not be broken.
inline long lowest_largest(const Logits &row) {
  const long start = (std::find(row.maxima, row.maxima + row.blocks(), row.top) - row.maxima) * kBlock;
  return std::find(row.x + start, row.x + row.width, row.top) - row.x;
}

// The id with the largest x / temperature + noise among the ids that a cut keeps; the lowest id among equals.
struct Draw {
  double score = -__builtin_inf();
  long id = 0;  // local
};

class Drawing {
 public:
  Drawing(const Logits &row, long first_id, double temperature, Key key, Cut cut)
      : row_(row), first_id_(first_id), temperature_(temperature), scale_(inverse_of(temperature)), key_(key), cut_(cut),
        least_(0.04f) {}  // exp(-3.2): noise is above -3.14, and a cut that keeps any id keeps the largest logit

  // Draw an id. `distances` [blocks]: the distance of the largest noise in each block; overwritten as scratch memory.
  Draw run(uint32_t *distances) {
    if (row_.broken() || row_.top < cut_.low) return best_;
    // Compute an upper bound of exp(score - top / temperature) for each block. The block with the highest bound is
    // visited first, which rules out many other blocks. The bound is exact to about 1e-5, and compared with a margin of
    // 1e-3.
    float *bounds = reinterpret_cast<float *>(distances);
    const long blocks = row_.blocks();
    long first_block = 0;
    float highest = -1;
    for (long b = 0; b < blocks; b += kLanes) {
      const long count = std::min<long>(kLanes, blocks - b);
      Words words = {};
      memcpy(&words, distances + b, count * sizeof(uint32_t));
      float here[kLanes];
      store(here, bound_of(load(row_.maxima + b, count), words));
      for (long i = 0; i < count; i++) {
        if (row_.maxima[b + i] < cut_.low) here[i] = 0;
        if (here[i] > highest) highest = here[i], first_block = b + i;
      }
      memcpy(bounds + b, here, count * sizeof(float));
    }
    visit(first_block, 0, -kInfinity);
    for (long b = 0; b < blocks; b++)
      if (b != first_block && bounds[b] >= least_ * kMargin) visit(b, bounds[b], row_.maxima[b]);
    return best_;
  }

 private:
  static constexpr float kMargin = 0.999f;

  Vec bound_of(Vec value, Words distance) const {
    return exp((value - broadcast(row_.top)) * broadcast(scale_)) / noise::tail(distance);
  }

  // Score in float64 the ids of a block that could win. If `bound` is above 0, it is the bound of the block, whose
  // largest logit is `most`. Then logits that are far below `most` cannot win, even with the largest noise of the
  // block.
  void visit(long block, float bound, float most) {
    const long start = block * kBlock;
    float lowest = -kInfinity;
    if (bound > 0) {
      const double far = temperature_ * std::log(static_cast<double>(least_ * kMargin) / bound);
      lowest = static_cast<float>(most + far - (std::fabs(most) + temperature_) * 1e-5);
    }
    const float below = cut_.below();
    alignas(64) float bounds[kBlock], values[kBlock];
    alignas(64) uint32_t distances[kBlock];
    int likely[kBlock], count = 0;
    for (int i = 0; i < kBlock; i += kLanes) {
      const Vec value = row_.vector(start + i);
      const Vec cut = select(first(cut_.end - start - i), broadcast(below), broadcast(cut_.low));
      uint32_t bits = to_bits(both(less(broadcast(lowest), value), less(cut, value)));
      if (!bits) continue;
      const Words ids = noise::ids_from(static_cast<uint32_t>(first_id_ + start + i));
      const Words distance = noise::distance(noise::mixed(ids), key_);
      memcpy(distances + i, &distance, sizeof distance);
      store(values + i, value);
      store(bounds + i, bound_of(value, distance));
      for (; bits; bits &= bits - 1) {
        const int index = i + __builtin_ctz(bits);
        if (bounds[index] < least_ * kMargin) continue;
        likely[count++] = index;
        if (bounds[index] > bounds[likely[0]]) std::swap(likely[0], likely[count - 1]);  // the best first
      }
    }
    for (int n = 0; n < count; n++) {
      const int i = likely[n];
      if (bounds[i] >= least_ * kMargin) consider(values[i], distances[i], start + i);
    }
  }

  void consider(float value, uint32_t distance, long id) {
    const double score = static_cast<double>(value) / temperature_ + noise::gumbel(distance);
    if (score < best_.score || (score == best_.score && id >= best_.id)) return;
    best_ = {score, id};
    least_ = std::max(least_, static_cast<float>(std::exp(score - static_cast<double>(row_.top) / temperature_)));
  }

  const Logits &row_;
  const long first_id_;
  const double temperature_;
  const float scale_;
  const Key key_;
  const Cut cut_;
  float least_;  // exp(score - top / temperature) that the winner must reach
  Draw best_;
};

// Encode like `candidates.encode`.
inline int64_t key_of(float value, long id) {
  value += 0.0f;  // turns -0 into 0
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const int32_t ordered = ((bits >> 31) & 0x7fffffff) ^ bits;
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(ordered)) << 32) | (0x7fffffff - id);
}

inline float value_of(int64_t key) {
  const int32_t ordered = static_cast<int32_t>(key >> 32), bits = ordered ^ ((ordered >> 31) & 0x7fffffff);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline int32_t id_of(int64_t key) { return 0x7fffffff - static_cast<int32_t>(key); }

// Return the buffer size for the `count` best ids: fewer than `count` blocks are above the count-th best maximum, and
// up to `count` ids equal it.
inline long keys_needed(long width, long count) { return std::min(count * kBlock, width) + count; }

// Find the keys of the `count` largest logits, best first, padded. `some`: buffer of `keys_needed`; `order`: of
// `blocks`.
inline void find_best(const Logits &row, long first_id, long count, int64_t *some, float *order, int64_t *best) {
  long found = 0, equals = 0;
  if (row.top == row.top) {
    // If an id is below the count-th largest maximum, `count` ids are better, one in each of those blocks.
    float least = -kInfinity;
    if (count <= row.blocks()) {
      memcpy(order, row.maxima, row.blocks() * sizeof(float));
      std::nth_element(order, order + count - 1, order + row.blocks(), std::greater<float>());
      least = order[count - 1];
    }
    for (long b = 0; b < row.blocks(); b++) {
      if (row.maxima[b] < least) continue;
      for (long at = b * kBlock; at < std::min((b + 1) * kBlock, row.width); at += kLanes) {
        uint32_t bits = ~to_bits(less(row.vector(at), broadcast(least))) & to_bits(first(row.width - at));
        for (; bits; bits &= bits - 1) {
          const long id = at + __builtin_ctz(bits);
          if (row.x[id] > least || equals++ < count) some[found++] = key_of(row.x[id], first_id + id);
        }
      }
    }
  }
  const long kept = std::min(found, count);
  std::nth_element(some, some + kept, some + found, std::greater<int64_t>());
  std::sort(some, some + kept, std::greater<int64_t>());
  std::copy(some, some + kept, best);
  std::fill(best + kept, best + count, key_of(-kInfinity, 0x7fffffff));
}

inline long count_above(const Logits &row, float value) {
  long count = 0;
  for (long b = 0; b < row.blocks(); b++) {
    if (!(row.maxima[b] > value)) continue;
    for (long at = b * kBlock; at < std::min((b + 1) * kBlock, row.width); at += kLanes)
      count += __builtin_popcount(to_bits(less(broadcast(value), row.vector(at))));
  }
  return count;
}

}  // namespace sampling
