// A step's sampling on a rank that has the whole vocabulary: logits are changed as requests ask, a token is chosen and
// its log-probability reported, all of one row before the next, so that a row is read from memory once.
//
// The same steps as `workers/sampling/sampler.py` takes for several ranks.
#include "runtime/arena.h"
#include "sampling/logits_processors.h"
#include "sampling/sample_row.h"
#include "sampling/threads.h"

namespace {

using namespace sampling;

// As `workers/kernels/cpu/sampling.py` fills it; arrays are those of `StepMetadata`.
struct Step {
  long rows, vocab_size;
  const int32_t *target_ids;
  const float *temperature, *top_p;
  const int32_t *top_k;
  const float *min_p;
  const int64_t *seeds;
  const int32_t *sample_positions, *num_logprobs;
  Changes changes;

  bool reports(long i) const { return num_logprobs[i] >= 0 || target_ids[i] >= 0; }
  Filters filters(long i) const {
    return {temperature[i], top_p[i], min_p[i], top_k[i] < vocab_size ? top_k[i] : 0};
  }
};

// Arrays of `StepOutput`; those of logprobs hold what rows without them have, and are not read if no row reports.
struct Output {
  long top_columns;     // K
  int32_t *token_ids;   // [rows]   0 where a row is broken
  float *tops;          // [rows]   largest changed logit; NaN where there is NaN or +inf
  float *logprobs;      // [rows]
  int32_t *ranks;       // [rows]
  int32_t *top_ids;     // [rows, K]
  float *top_logprobs;  // [rows, K]
};

// Memory of one thread beside that of `choose`.
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

// Writes the log-probability and the rank of `token` in row `i`, and the likeliest ids.
void report(const Logits &raw, const Step &step, long i, long token, const Scratch &scratch, const Output &out) {
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

void sample_row(const float *x, long width, const Step &step, long i, const RowMemory &memory, const Output &out) {
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
    token = choose(row, 0, step.filters(i), key, memory.scratch);
  }
  out.token_ids[i] = static_cast<int32_t>(token);
  if (step.reports(i)) report(raw, step, i, token, memory.scratch, out);
}

}  // namespace

// x [step.rows, width]: logits of all ids and, from `vocab_size` on, padding of -inf.
extern "C" void oarlock_sample(const float *x, long stride, long width, const Step *step, const Output *out) {
  long longest = std::max(kCandidates, out->top_columns);
  for (long i = 0; i < step->rows; i++) longest = std::max(longest, step->filters(i).top_k);
  const Arena::Mark mark = arena().mark();
  RowMemory *memories = arena().take<RowMemory>(threads());
  for (int thread = 0; thread < threads(); thread++) memories[thread] = RowMemory(width, longest);
#pragma omp parallel for schedule(dynamic)
  for (long i = 0; i < step->rows; i++) sample_row(x + i * stride, width, *step, i, memories[this_thread()], *out);
  arena().release(mark);
}
