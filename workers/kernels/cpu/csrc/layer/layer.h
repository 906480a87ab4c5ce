// The layers of a decoder as a program: what they are made of is written down once, after loading, as a list of
// branches, and a step once for all of them. One call runs any number of branches; results in between lie in the arena.
//
// A branch is a sublayer (attention, an MLP) with the norms around it, which adds its result to the residual. Its
// operations are those of the separate kernels, one call each, in the same order: every row has the same bits.
#pragma once
#include "attention/attention.h"
#include "runtime/collective.h"
#include "elementwise/norm.h"
#include "gemm/experts.h"
#include "gemm/fp8.h"
#include "gemm/grouped.h"
#include "layer/router.h"

struct PackedWeight {
  const void *weight, *bias;  // as in gemm::Product
  long columns, inputs;
  int epilogue;
  int kind;    // a gemm::WeightKind
  int slices;  // as in gemm::Product
};

struct Norm {
  const float *scale, *shift;  // [width]   `shift` of a LayerNorm, or null
  long width;
  float eps;
  int is_layer_norm;  // else RMSNorm
};

// What becomes of queries, keys and values between the projection and the output projection.
struct HeadsAndPages {
  const AttentionLayer *attention;
  const float *head_norm;  // [heads + kv_heads, head_dim]   scale of the RMSNorm of each query and key head; or null
  void *k_pages, *v_pages;
  int rotary;       // which of the step's tables; -1: heads are not rotated
  int interleaved;  // pairs are neighbours: see rotate_neighbours
  float eps;        // of `head_norm`
  const HeadsOfRank *of_rows;  // the norm is over the rows of all heads, not over each by itself; or null
  const float *sinks;          // as `attend` takes them; or null
};

struct Addition {
  const Norm *norm;  // of what is added; or null
  long width;
  float scale;
};

// A mixture of experts. The results of a row's own experts and of the shared one are summed over the ranks side by side.
struct Mixture {
  const Router *router;
  const gemm::Experts *routed, *shared;  // shared: one expert, which every row has; or null
  const Router *shared_gate;             // one logit, whose sigmoid scales the shared expert's result; or null
};

// Where rows of an operation come from and go to. Rows of scratch lie in the arena, as many as the branch takes at once.
enum Rows { kResidual = 0, kKept = 1, kKeptToo = 2, kPartial = 3, kScratch = 4, kScratchToo = 5 };

enum OperationKind {
  kNormRows = 0,   // `to` = norm(`from`)                                                   of: a Norm
  kMultiply = 1,   // `to` = `from` w; added to a residual; to partial without its bias     of: a PackedWeight
  kTurnHeads = 2,  // norms and rotates queries and keys in `to`                            of: a HeadsAndPages
  kAttend = 3,     // writes keys and values, `to` = attention of `from`; all rows at once  of: a HeadsAndPages
  kTotal = 4,      // `to` = the ranks' sum in `partial`, and the bias; added to a residual of: the PackedWeight
  kAddRows = 5,    // residual += scale * norm(`from`), whose contents are lost             of: an Addition
  kMix = 6,        // partial = the experts' results of `from`; all rows at once            of: a Mixture
  kMixTotal = 7,   // `to` = the sums in `partial`; added to a residual                     of: the Mixture
};

struct Operation {
  int kind, from, to;
  const void *of;
};

struct Branch {
  const Operation *operations;
  long count, before_sum;  // operations in all, and before what the ranks have in `partial` is added up
  long rows_at_once;       // so that scratch memory stays small; 0: all
  long widths[2];          // elements of a row of each scratch
  long sums;               // of a row in `partial`, one after the other
};

struct RotaryRows {
  const float *rows;  // [positions, width]   cosines of a position's pairs of elements, then their sines
  long width;         // elements of a head that are rotated
};

constexpr int kMostRotaries = 4;

// What all layers of a step share. T rows.
struct LayerStep {
  void *hidden;               // [T, hidden size]   the residual, to which each branch adds
  void *kept[2];              // [T, hidden size]   normed rows that several branches of a layer read; or null
  float *partial;             // [sums, T, hidden size]   with several ranks: this rank's share of a branch's result
  long rows;                  // T
  long width;                 // hidden size
  int type;                   // an ElementType: of weights, pages and `hidden`
  const int64_t *positions;   // [T]
  const int64_t *slots;       // [T]   see write_kv
  RotaryRows rotary[kMostRotaries];
  const AttentionStep *attention;
  RankGroup *group;           // where `partial` is summed over the ranks; null with one rank, or where the caller sums
};

// Runs branches `first` to `last`, in order. Returns kAllCame, or the rank that did not reach a sum in time. Without a
// group, a branch whose result is summed stops before the sum; the caller sums `partial` and calls the function below.
extern "C" int oarlock_run_branches(const Branch *branches, long first, long last, const LayerStep *step);

// The rest of a branch, once `partial` holds the sum over the ranks.
extern "C" void oarlock_finish_branch(const Branch *branch, const LayerStep *step);
