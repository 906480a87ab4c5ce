// Entry points of sampling for `workers/kernels/cpu/sampling.py`. `logits_row.h` explains the terms.
//
// For several ranks: queries of sampling on one rank's logits [rows, width]. For a rank with the whole vocabulary: a
// complete sampling step. It changes the logits as requests ask, chooses a token and reports its log-probability, one
// row after the other, so that a row is read from memory once. The steps are the same as in
// `workers/sampling/sampler.py`.
#include "runtime/arena.h"
#include "sampling/logits_processors.h"
#include "sampling/sample_row.h"
#include "sampling/step.h"
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

using namespace sampling;

// Return the number of threads that share the rows of a call.
int threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

int this_thread() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// The logits of a call: rows of x [., width], each with its maxima [., blocks] and its largest logit.
struct Table {
  const float *x;
  long stride, width;
  const float *maxima, *tops;

  Logits row(long i) const {
    return {x + i * stride, width, maxima + i * ((width + kBlock - 1) / kBlock), tops[i], width};
  }
};

}  // namespace

// Compute the block maxima and the largest logit of each of `count` rows.
extern "C" void oarlock_logits_maxima(const float *x, long stride, long width, long count, float *maxima, float *tops) {
  const long blocks = (width + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(dynamic)
  for (long i = 0; i < count; i++) tops[i] = find_maxima(x + i * stride, width, maxima + i * blocks);
}

// Find the lowest local id of the largest logit; 0 for broken rows.
extern "C" void oarlock_logits_argmax(const float *x, long stride, long width, const float *maxima, const float *tops,
                                      const int64_t *rows, long count, int64_t *ids) {
  const Table table{x, stride, width, maxima, tops};
  for (long i = 0; i < count; i++) {
    const Logits row = table.row(rows[i]);
    ids[i] = row.broken() ? 0 : lowest_largest(row);
  }
}

// Find keys [count, most]: the `most` largest logits of each row, best first.
extern "C" void oarlock_logits_best(const float *x, long stride, long width, const float *maxima, const float *tops,
                                    const int64_t *rows, long count, long most, long first_id, int64_t *keys) {
  const Table table{x, stride, width, maxima, tops};
  const long blocks = (width + kBlock - 1) / kBlock, needed = keys_needed(width, most);
  const Arena::Mark mark = arena().mark();
  int64_t *some = arena().take<int64_t>(needed * threads());
  float *order = arena().take<float>(blocks * threads());
#pragma omp parallel for schedule(dynamic)
  for (long i = 0; i < count; i++)
    find_best(table.row(rows[i]), first_id, most, some + needed * this_thread(), order + blocks * this_thread(),
              keys + i * most);
  arena().release(mark);
}

// Find the largest x / temperature + noise among the ids that each cut keeps, and its local id; -inf and 0 if there is
// none.
extern "C" void oarlock_logits_draw(const float *x, long stride, long width, const float *maxima, const float *tops,
                                    const int64_t *rows, long count, long first_id, const double *temperature,
                                    const Key *keys, const float *lows, const int64_t *ends, double *scores,
                                    int64_t *ids) {
  const Table table{x, stride, width, maxima, tops};
  const long blocks = (width + kBlock - 1) / kBlock;
  const Arena::Mark mark = arena().mark();
  uint32_t *distances = arena().take<uint32_t>(count * blocks);
#pragma omp parallel
  {
    // Ids are mixed once for all rows.
#pragma omp for schedule(static)
    for (long b = 0; b < blocks; b++) {
      Words mixed[noise::kVectors];
      for (int i = 0; i < noise::kVectors; i++)
        mixed[i] = noise::mixed(noise::ids_from(static_cast<uint32_t>(first_id + b * kBlock + i * kLanes)));
      for (long r = 0; r < count; r++) distances[r * blocks + b] = noise::least_distance(mixed, keys[r]);
    }
#pragma omp for schedule(dynamic)
    for (long i = 0; i < count; i++) {
      const Logits row = table.row(rows[i]);
      const Draw draw = Drawing(row, first_id, temperature[i], keys[i], {lows[i], ends[i]}).run(distances + i * blocks);
      scores[i] = draw.score;
      ids[i] = draw.id;
    }
  }
  arena().release(mark);
}

// Compute masses [count, slices]: sum(exp((x - peak) / temperature)) over the ids that each cut keeps, per `slice` ids.
extern "C" void oarlock_logits_mass(const float *x, long stride, long width, const float *maxima, const float *tops,
                                    const int64_t *rows, long count, const double *temperature, const float *peaks,
                                    const float *lows, const int64_t *ends, long slice, double *masses) {
  const Table table{x, stride, width, maxima, tops};
  const long slices = (width + slice - 1) / slice;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (long i = 0; i < count; i++)
    for (long s = 0; s < slices; s++) {
      Logits row = table.row(rows[i]);
      row.top = peaks[i];
      const long begin = s * slice, end = std::min(begin + slice, width);
      masses[i * slices + s] = slice_masses<1>(row, begin, end, temperature[i], {Cut{lows[i], ends[i]}})[0];
    }
}

// Count the logits of each row that are above a value.
extern "C" void oarlock_logits_above(const float *x, long stride, long width, const float *maxima, const float *tops,
                                     const int64_t *rows, long count, const float *values, int64_t *counts) {
  const Table table{x, stride, width, maxima, tops};
#pragma omp parallel for schedule(dynamic)
  for (long i = 0; i < count; i++) counts[i] = count_above(table.row(rows[i]), values[i]);
}

// Draw a token for each row from its candidates, keys [count, length], best first. `enough`: whether these were enough.
extern "C" void oarlock_draw_from_lists(const int64_t *keys, long length, long count, const double *temperature,
                                        const double *top_p, const int64_t *top_k, const double *floors, const Key *noise,
                                        const double *totals, int64_t *ids, bool *enough) {
  const Arena::Mark mark = arena().mark();
  double *masses = arena().take<double>(length);
  for (long i = 0; i < count; i++) {
    const Filters filters{temperature[i], top_p[i], top_k[i], floors[i]};
    const Choice choice = draw_from_list(keys + i * length, length, filters, totals[i], noise[i], masses);
    ids[i] = choice.id;
    enough[i] = choice.enough;
  }
  arena().release(mark);
}

// Compute spreads [count, slices]: statistics of each row, per `slice` ids.
extern "C" void oarlock_logits_spread(const float *x, long stride, long width, const float *maxima, const float *tops,
                                      const int64_t *rows, long count, long slice, Spread *spreads) {
  const long slices = (width + slice - 1) / slice;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (long i = 0; i < count; i++)
    for (long s = 0; s < slices; s++)
      spreads[i * slices + s] = slice_spread(x + rows[i] * stride, s * slice, std::min((s + 1) * slice, width));
}

// Compute the floor of each row, from its largest logit, its parameters and its spread.
extern "C" void oarlock_floors(long count, const double *peaks, const double *temperature, const double *min_p,
                               const double *top_n_sigma, const Spread *spreads, double *floors) {
  for (long i = 0; i < count; i++)
    floors[i] = Floors{min_p[i], top_n_sigma[i]}.of(peaks[i], temperature[i], spreads[i]);
}

extern "C" void oarlock_log_totals(long count, const double *peaks, const double *masses, double *totals) {
  for (long i = 0; i < count; i++) totals[i] = log_total(peaks[i], masses[i]);
}

// Apply masks. Row i of `words` [count, num_words] is the mask of row `rows[i]` of x [., width], whose ids begin at
// `first_id`.
extern "C" void oarlock_mask(float *x, long stride, const int32_t *rows, const uint32_t *words, long count,
                             long num_words, long first_id, long width) {
#pragma omp parallel for schedule(static)
  for (long i = 0; i < count; i++) mask_row(x + rows[i] * stride, width, first_id, words + i * num_words, num_words);
}

namespace {

// Buffers of one thread in addition to the buffers of `choose`.
struct RowMemory {
  Scratch scratch;
  float *changed;              // [width]   a row after its changes
  float *maxima, *raw_maxima;  // [blocks]

  RowMemory(long width, long longest) {
    const long blocks = (width + kBlock - 1) / kBlock;
    scratch = {arena().take<uint32_t>(blocks), arena().take<float>(blocks),
               arena().take<int64_t>(keys_needed(width, longest)), arena().take<int64_t>(longest),
               arena().take<double>(longest)};
    changed = arena().take<float>(width);
    maxima = arena().take<float>(blocks);
    raw_maxima = arena().take<float>(blocks);
  }
};

// Write the log-probability and the rank of `token` in row `i`, and the likeliest ids.
void report(const Logits &raw, const SamplingStep &step, long i, long token, const Scratch &scratch,
            const SamplingOutput &out) {
  const double total = log_total(raw.top, mass_of(raw, 1.0, {-kInfinity, 0}));
  const float value = raw.x[token];
  out.logprobs[i] = static_cast<float>(value - total);
  out.ranks[i] = 1 + static_cast<int32_t>(count_above(raw, value));
  const long wanted = std::min<long>(step.num_logprobs[i], out.top_columns);
  if (wanted <= 0) return;
  find_best(raw, 0, wanted, scratch.some, scratch.order, scratch.keys);
  for (long k = 0; k < wanted; k++) {
    out.top_ids[i * out.top_columns + k] = id_of(scratch.keys[k]);
    out.top_logprobs[i * out.top_columns + k] = static_cast<float>(value_of(scratch.keys[k]) - total);
  }
}

void sample_row(const float *x, long width, const SamplingStep &step, long i, const RowMemory &memory,
                const SamplingOutput &out) {
  const RowChanges changes(step.changes, i);
  const long slice = slice_of(step.vocab_size);
  const Logits raw{x, width, memory.raw_maxima, find_maxima(x, width, memory.raw_maxima), slice};
  Logits row = raw;
  if (changes.any()) {
    std::copy(x, x + width, memory.changed);
    changes.apply(memory.changed, width, 0);
    row = {memory.changed, width, memory.maxima, find_maxima(memory.changed, width, memory.maxima), slice};
  }
  out.tops[i] = row.top;
  long token = step.target_ids[i];
  if (token < 0) {
    const Key key = row_key(step.seeds[i], step.sample_positions[i]);
    Filters filters = step.filters(i);
    if (!filters.greedy() && !row.broken()) {
      const Floors floors = step.floors(i);
      filters.floor = floors.of(row.top, filters.temperature, floors.needs_spread() ? spread_of(row) : Spread());
    }
    token = choose(row, 0, filters, key, memory.scratch);
  }
  out.token_ids[i] = static_cast<int32_t>(token);
  if (step.reports(i)) report(raw, step, i, token, memory.scratch, out);
}

}  // namespace

// Return the largest number of logprobs that a row of `step` wants, 0 if it is only the token's own; -1 if no row
// reports any.
extern "C" long oarlock_most_logprobs(const SamplingStep *step) {
  long most = -1;
  for (long i = 0; i < step->rows; i++)
    if (step->reports(i)) most = std::max<long>({most, step->num_logprobs[i], 0});
  return most;
}

// Sample x [step.rows, width]: logits of all ids and, from `vocab_size` on, padding of -inf. Return the number of rows
// whose largest changed logit is not finite.
extern "C" long oarlock_sample(const float *x, long stride, long width, const SamplingStep *step,
                               const SamplingOutput *out) {
  long longest = std::max(kCandidates, out->top_columns);
  for (long i = 0; i < step->rows; i++) longest = std::max(longest, step->filters(i).top_k);
  const Arena::Mark mark = arena().mark();
  RowMemory *memories = arena().take<RowMemory>(threads());
  for (int thread = 0; thread < threads(); thread++) memories[thread] = RowMemory(width, longest);
#pragma omp parallel for schedule(dynamic)
  for (long i = 0; i < step->rows; i++) sample_row(x + i * stride, width, *step, i, memories[this_thread()], *out);
  arena().release(mark);
  return std::count_if(out->tops, out->tops + step->rows, [](float top) { return !std::isfinite(top); });
}
