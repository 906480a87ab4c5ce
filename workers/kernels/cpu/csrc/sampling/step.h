// The arguments and the results of a sampling step.
#pragma once
#include "sampling/logits_processors.h"
#include "sampling/sample_row.h"

namespace sampling {

// Arguments of a sampling step, filled by `workers/kernels/cpu/sampling.py`; the arrays are those of `StepMetadata`.
struct SamplingStep {
  long rows, vocab_size;
  const int32_t *target_ids;
  const float *temperature, *top_p;
  const int32_t *top_k;
  const float *min_p, *top_n_sigma;
  const int64_t *seeds;
  const int32_t *sample_positions, *num_logprobs;
  LogitsChanges changes;

  bool reports(long i) const { return num_logprobs[i] >= 0 || target_ids[i] >= 0; }
  Filters filters(long i) const { return {temperature[i], top_p[i], top_k[i] < vocab_size ? top_k[i] : 0}; }
  Floors floors(long i) const { return {min_p[i], top_n_sigma[i]}; }
};

// Arrays of `StepOutput`. The arrays of logprobs are initialised for rows without logprobs, and not accessed if no row
// reports any.
struct SamplingOutput {
  long top_columns;     // K
  int32_t *token_ids;   // [rows]   0 if a row is broken
  float *tops;          // [rows]   largest changed logit; NaN if there is NaN or +inf
  float *logprobs;      // [rows]
  int32_t *ranks;       // [rows]
  int32_t *top_ids;     // [rows, K]
  float *top_logprobs;  // [rows, K]
};

}  // namespace sampling
