// What sampling asks of one rank's logits [rows, width]: see `workers/kernels/cpu/sampling.py`, and `logits_row.h` for words.
#include "runtime/arena.h"
#include "sampling/logits_processors.h"
#include "sampling/sample_row.h"
#include "sampling/threads.h"

namespace {

using namespace sampling;

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

// Of each of `count` rows: the block maxima and the largest logit.
extern "C" void oarlock_logits_maxima(const float *x, long stride, long width, long count, float *maxima, float *tops) {
  const long blocks = (width + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(dynamic)
  for (long i = 0; i < count; i++) tops[i] = find_maxima(x + i * stride, width, maxima + i * blocks);
}

// The lowest local id of the largest logit; 0 for broken rows.
extern "C" void oarlock_logits_argmax(const float *x, long stride, long width, const float *maxima, const float *tops,
                                      const int64_t *rows, long count, int64_t *ids) {
  const Table table{x, stride, width, maxima, tops};
  for (long i = 0; i < count; i++) {
    const Logits row = table.row(rows[i]);
    ids[i] = row.broken() ? 0 : lowest_largest(row);
  }
}

// keys [count, most]: of the `most` largest logits of each row, best first.
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

// The largest x / temperature + noise of what each cut keeps, and its local id: -inf and 0 where nothing is left.
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

// masses [count, slices]: sum(exp((x - peak) / temperature)) of what each cut keeps, of each `slice` ids.
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

// How many logits of each row are above a value.
extern "C" void oarlock_logits_above(const float *x, long stride, long width, const float *maxima, const float *tops,
                                     const int64_t *rows, long count, const float *values, int64_t *counts) {
  const Table table{x, stride, width, maxima, tops};
#pragma omp parallel for schedule(dynamic)
  for (long i = 0; i < count; i++) counts[i] = count_above(table.row(rows[i]), values[i]);
}

// Of each row, a token from its candidates, keys [count, length] with the best first, and whether they were enough.
extern "C" void oarlock_draw_from_lists(const int64_t *keys, long length, long count, const double *temperature,
                                        const double *top_p, const int64_t *top_k, const double *min_p, const Key *noise,
                                        const double *totals, int64_t *ids, bool *enough) {
  const Arena::Mark mark = arena().mark();
  double *masses = arena().take<double>(length);
  for (long i = 0; i < count; i++) {
    const Filters filters{temperature[i], top_p[i], min_p[i], top_k[i]};
    const Choice choice = draw_from_list(keys + i * length, length, filters, totals[i], noise[i], masses);
    ids[i] = choice.id;
    enough[i] = choice.enough;
  }
  arena().release(mark);
}

// The smallest logit of each row that min-p keeps, from the largest.
extern "C" void oarlock_lowest_kept(long count, const double *peaks, const double *temperature, const double *min_p,
                                    double *lowest) {
  for (long i = 0; i < count; i++) lowest[i] = Filters{temperature[i], 1, min_p[i], 0}.lowest(peaks[i]);
}

extern "C" void oarlock_log_totals(long count, const double *peaks, const double *masses, double *totals) {
  for (long i = 0; i < count; i++) totals[i] = log_total(peaks[i], masses[i]);
}

// Row i of `words` [count, num_words] is the mask of row `rows[i]` of x [., width], whose ids begin at `first_id`.
extern "C" void oarlock_mask(float *x, long stride, const int32_t *rows, const uint32_t *words, long count,
                             long num_words, long first_id, long width) {
#pragma omp parallel for schedule(static)
  for (long i = 0; i < count; i++) mask_row(x + rows[i] * stride, width, first_id, words + i * num_words, num_words);
}
