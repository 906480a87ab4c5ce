// The complete choice of a token if one rank has the whole vocabulary: greedy, drawn from all ids, or from the ids that
// floors, top-k and top-p keep.
//
// The steps and their order are the same as in `workers/sampling/sampler.py` and `top_k_top_p.py` for several ranks,
// and every rounded value comes from the same functions. So a token does not depend on the number of ranks.
#pragma once
#include "sampling/logits_row.h"

namespace sampling {

constexpr long kCandidates = 64;  // CANDIDATES of `top_k_top_p.py`

struct Filters {
  double temperature, top_p;   // 0: greedy; 1: off
  long top_k;                  // off at 0
  double floor = -kInfinity;   // smaller logits are dropped; off at -inf

  bool greedy() const { return temperature == 0 || top_k == 1; }
  bool floored() const { return floor > -kInfinity; }
  bool filtering() const { return top_p < 1 || floored() || top_k > 0; }
  bool only_top_p() const { return top_p < 1 && !floored() && top_k == 0; }
};

// Statistics of a row's logits: sums over all logits except -inf. Squares of float32 are exact in float64, and sums
// have one order on every code path: each of 128 lanes adds every 128th id of a slice of the vocabulary, the lanes are
// folded by halves, and the slices are added in order. So the bits depend neither on the ISA level nor on the number of
// ranks.
struct Spread {
  double count = 0, sum = 0, squares = 0;

  void add(const Spread &other) { count += other.count, sum += other.sum, squares += other.squares; }
  double deviation() const {
    const double mean = sum / count;
    const volatile double square = mean * mean;  // rounded separately: fused operations would differ between ISA levels
    return std::sqrt(std::max(squares / count - square, 0.0));
  }
};

inline Spread slice_spread(const float *x, long begin, long end) {
  double sums[kBlock] = {}, squares[kBlock] = {};
  long count = 0;
  for (long start = begin; start < end; start += kBlock) {
    const long lanes = std::min<long>(kBlock, end - start);
    for (long i = 0; i < lanes; i++) {
      const bool counts = x[start + i] > -kInfinity;
      const double value = counts ? x[start + i] : 0.0f;
      sums[i] += value;
      squares[i] += value * value;
      count += counts;
    }
  }
  for (long half = kBlock / 2; half > 0; half /= 2)
    for (long i = 0; i < half; i++) sums[i] += sums[i + half], squares[i] += squares[i + half];
  return {static_cast<double>(count), sums[0], squares[0]};
}

inline Spread spread_of(const Logits &row) {
  Spread all;
  for (long begin = 0; begin < row.width; begin += row.slice)
    all.add(slice_spread(row.x, begin, std::min(begin + row.slice, row.width)));
  return all;
}

// Parameters that set a lower bound for a row's logits.
struct Floors {
  double min_p, top_n_sigma;  // off at 0; off at 0 and below

  bool needs_spread() const { return top_n_sigma > 0; }
  double of(double peak, double temperature, const Spread &spread) const {
    const double likely = std::fma(temperature, std::log(min_p), peak);
    if (!needs_spread()) return likely;
    const volatile double distance = top_n_sigma * spread.deviation();
    return std::max(likely, peak - distance);
  }
};

// Buffers of one thread.
struct Scratch {
  uint32_t *distances;  // [blocks]
  float *order;         // [blocks]
  int64_t *some;        // [keys_needed]
  int64_t *keys;        // [longest list]
  double *masses;       // [longest list]
};

// Mix a word like `row_keys` of noise.py.
inline uint64_t mixed64(uint64_t word) {
  word += 0x9e3779b97f4a7c15u;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

inline Key row_key(int64_t seed, int32_t position) {
  const uint64_t step = static_cast<uint64_t>(static_cast<int64_t>(position)) * 0x9e3779b97f4a7c15u;
  const uint64_t word = mixed64(mixed64(static_cast<uint64_t>(seed)) + step);
  return {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32) | 1};
}

// Return the value to subtract from a raw logit to get its log-probability. `mass` is at temperature 1.
inline double log_total(double peak, double mass) { return peak + std::log(mass); }

struct Choice {
  long id;
  bool enough;
};

// Draw a token like `draw_from_list` of `top_k_top_p.py`. keys [count] are the best ids, `total` is the mass of all
// ids. The result has a global id.
inline Choice draw_from_list(const int64_t *keys, long count, const Filters &filters, double total, Key key,
                             double *masses) {
  const double peak = value_of(keys[0]), last = value_of(keys[count - 1]), lowest = filters.floor;
  long kept = 0;  // the ids that floor and top-k keep are a prefix
  double sum = 0;
  for (; kept < count && (kept < filters.top_k || filters.top_k == 0); kept++) {
    const double value = value_of(keys[kept]);
    if (!(value >= lowest && value > -kInfinity)) break;
    masses[kept] = std::exp((value - peak) / filters.temperature);
    sum += masses[kept];
  }
  const bool whole = last < lowest || last == -kInfinity || (filters.top_k > 0 && filters.top_k <= count);
  const double target = filters.top_p * (whole ? sum : total);
  double before = 0, best = 0;
  long winner = -1, index = 0;
  for (; index < kept && (before < target || filters.top_p >= 1 || index == 0); index++) {
    const uint32_t id = id_of(keys[index]);
    const double score = (value_of(keys[index]) - peak) / filters.temperature +
                         noise::gumbel(noise::distance(noise::mixed(id), key));
    if (winner < 0 || score > best) best = score, winner = id;
    before += masses[index];
  }
  const bool ends_within = filters.top_k == 0 && !filters.floored() && index < count;
  return {winner, whole || ends_within};
}

inline Draw draw(const Logits &row, long first_id, double temperature, Key key, Cut cut, uint32_t *distances) {
  for (long b = 0; b < row.blocks(); b++) {
    const uint32_t start = static_cast<uint32_t>(first_id + b * kBlock);
    Words mixed[noise::kVectors];
    for (int i = 0; i < noise::kVectors; i++) mixed[i] = noise::mixed(noise::ids_from(start + i * kLanes));
    distances[b] = noise::least_distance(mixed, key);
  }
  return Drawing(row, first_id, temperature, key, cut).run(distances);
}

// Draw like `draw_in_rounds` of `top_k_top_p.py`, for one rank. If a token is not in the nucleus, draw again from the
// ids that come before it.
inline long draw_in_rounds(const Logits &row, long first_id, const Filters &filters, Key key, uint32_t *distances) {
  float low = static_cast<float>(filters.floor);
  if (low < filters.floor) low = __builtin_nextafterf(low, kInfinity);
  const Cut all{low, low == -kInfinity ? 0 : row.width};  // ids that the floor keeps
  long id = draw(row, first_id, filters.temperature, key, all, distances).id;
  if (filters.top_p >= 1) return id;
  auto [total, before] = masses_of<2>(row, filters.temperature, {all, Cut{row.x[id], id}});
  while (before >= filters.top_p * total && before > 0) {
    const Cut cut{row.x[id], id};
    id = draw(row, first_id, filters.temperature, key, cut, distances).id;
    before = mass_of(row, filters.temperature, {row.x[id], id});
  }
  return id;
}

// Return whether the block maxima already show that the candidates will not be enough for `draw_from_list`. This is
// true if a floor keeps at least kCandidates ids, or if the candidates, whose weight is at most 1, have less than the
// mass of top-p. It avoids the search for candidates in flat rows. The token is the same either way.
inline bool surely_not_enough(const Logits &row, const Filters &filters) {
  if (filters.top_k > 0 || row.blocks() <= kCandidates) return false;
  if (filters.floored()) {
    const auto keeps = [&](float most) { return most >= filters.floor && most > -kInfinity; };
    return std::count_if(row.maxima, row.maxima + row.blocks(), keeps) >= kCandidates;
  }
  const Vec top = broadcast(row.top), scale = broadcast(inverse_of(filters.temperature));
  Vec sums = zero();  // the likeliest id of each block: a lower bound of the mass
  for (long b = 0; b + kLanes <= row.blocks(); b += kLanes)
    sums = sums + exp((load(row.maxima + b) - top) * scale);
  return filters.top_p * sum(sums) > 1.01 * kCandidates;
}

// Return the local id of the chosen token; 0 for broken rows.
inline long choose(const Logits &row, long first_id, const Filters &filters, Key key, const Scratch &scratch) {
  if (row.broken()) return 0;
  if (filters.greedy()) return lowest_largest(row);
  if (!filters.filtering())
    return draw(row, first_id, filters.temperature, key, {-kInfinity, 0}, scratch.distances).id;
  if (surely_not_enough(row, filters)) return draw_in_rounds(row, first_id, filters, key, scratch.distances);
  const double total = filters.only_top_p() ? mass_of(row, filters.temperature, {-kInfinity, 0}) : 0;
  find_best(row, first_id, kCandidates, scratch.some, scratch.order, scratch.keys);
  Choice choice = draw_from_list(scratch.keys, kCandidates, filters, total, key, scratch.masses);
  if (!choice.enough) {
    if (filters.top_k == 0) return draw_in_rounds(row, first_id, filters, key, scratch.distances);
    find_best(row, first_id, filters.top_k, scratch.some, scratch.order, scratch.keys);
    choice = draw_from_list(scratch.keys, filters.top_k, filters, total, key, scratch.masses);
  }
  return choice.id - first_id;
}

}  // namespace sampling
