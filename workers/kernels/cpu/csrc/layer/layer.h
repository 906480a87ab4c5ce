// The layers of a decoder as a program. After loading, the layers are described once, as a list of branches; each step
// is described once for all of them. One call runs any number of branches; intermediate results are in the arena.
//
// A branch is a sublayer (attention, an MLP) with the norms around it, which adds its result to the residual. Its
// operations are the same calls in the same order as with separate kernels, so every row has the same bits.
#pragma once
#include "attention/attention.h"
#include "runtime/collective.h"
#include "elementwise/norm.h"
#include "gemm/adapter_pairs.h"
#include "gemm/experts.h"
#include "gemm/fp8.h"
#include "gemm/grouped.h"
#include "gemm/heads.h"
#include "layer/router.h"
#include "recurrent/convolution.h"
#include "recurrent/gated_delta.h"
#include "recurrent/gates.h"
#include "recurrent/mamba2.h"

struct PackedWeight {
  const void *weight, *bias;  // see gemm::MatmulArgs
  long columns, inputs;
  int epilogue;
  int kind;    // a gemm::WeightKind
  int slices;  // see gemm::MatmulArgs
};

struct Norm {
  const float *scale, *shift;  // [width]   of a LayerNorm each may be null, and `shift` of an RMSNorm is null
  long width;
  float eps;
  int is_layer_norm;  // otherwise RMSNorm
};

// Operations on queries, keys and values between the QKV projection and the output projection.
struct HeadsAndPages {
  const AttentionLayer *attention;
  const float *head_norm;  // [heads + kv_heads, head_dim]   scale of the RMSNorm of each query and key head; or null
  void *k_pages, *v_pages;
  int rotary;       // index of the step's rotary table; -1: heads are not rotated
  int interleaved;  // pairs are neighbours: see rotate_neighbours
  float eps;        // epsilon of `head_norm`
  const HeadsOfRank *row_norm;  // norm over all heads of a row; null: each head has its own norm
  const float *sinks;           // the argument of `attend`; or null
  int norms_last;   // heads are normed after the rotation
  int query_scale;  // index of the step's query scale; -1: queries are not scaled
  int pages;        // index of the step's slots and attention of the layer's group of pages
  int has_keys;     // 0: rows hold queries only, and the pages are another layer's
};

struct Addition {
  const Norm *norm;  // norm of the added rows; or null
  long width;
  float scale;
};

struct Clamp {
  long width;
  float limit;
};

// An MoE layer. The sums over a row's routed experts and the shared expert's result are all-reduced together. Every rank
// then adds the results of experts without matrices, which are multiples of the input.
struct MoELayer {
  const Router *router;
  const gemm::Experts *routed, *shared;  // shared: one expert that every row has; or null
  const Router *shared_gate;             // one logit, whose sigmoid scales the shared expert's result; or null
  const Norm *router_norm, *norm;        // norms of the rows that the router and the experts read; each may be null
  const float *expert_scale;             // [experts]   factors of the routed experts' weights; or null
  const gemm::ExpertPairs *routed_pairs, *shared_pairs;  // [count]   updates of experts in steps with adapters; or null
  long first_identity;  // id of the first expert whose result is its input; -1: there are none
  int identity_rows;    // Rows with this input, which are kept until the branch ends
};

// A linear layer with its updates.
struct AdaptedWeight {
  PackedWeight weight;
  const AdapterPairs *pairs;
};

// Some columns of the rows in a buffer.
struct Columns {
  int rows;            // Rows
  long first, stride;  // index of the first column, and elements between two rows
};

// The convolution of a recurrent layer. All rows at once, as for the next two.
struct ConvolutionLayer {
  recurrent::Convolution convolution;
  void *states;    // [slots, channels, taps - 1]
  Columns inputs;  // [channels]
};

// The gated delta rule of convolved rows, each [queries, keys, values].
struct DeltaLayer {
  recurrent::DeltaHeads heads;
  float *states;
  const float *a_log, *dt_bias;  // [value_heads]
  float beta_scale;
  int gates;  // Rows, with float [2 value_heads] in each: the projections b, then a
};

// The gated delta rule with decays of channels, of convolved rows, each [queries, keys, values].
struct KimiDeltaLayer {
  recurrent::DeltaHeads heads;
  recurrent::KimiGates gates;
  float *states;
  int decays;  // Rows, with float [heads, key_width] in each, which are overwritten: the projections f
  int rates;   // Rows, with float [heads] in each: the projections b. They may be the target
};

// Mamba 2's recurrence of convolved rows, each [x, b, c].
struct MambaLayer {
  recurrent::MambaHeads heads;
  float *states;
  const float *step_bias;  // [heads]   or null
  float least, most, scale;
  Columns steps;  // [heads]   projected step sizes, which are multiplied by `scale`
};

struct GatedNormLayer {
  recurrent::GatedNorm norm;
  Columns gate;  // [heads, width]
};

// left[i] * right[i], or left[i] + right[i], for i < width.
struct ColumnProduct {
  Columns left, right;
  long width;
};

// Heads of `width` elements among the columns of a row, and the scale of their RMSNorm.
struct HeadColumns {
  Columns columns;    // [heads, width]
  const float *norm;  // [heads, width]
  long heads, width;
  float eps;
};

// Gates of a result: each is for `width` columns. Their factors are their softplus or their sigmoid.
struct HeadGate {
  long gates, width;
  int is_softplus;
};

// Queries [heads, nope_width + rope_width] and the rows of pages of latent attention, [kv_rank + rope_width] each.
struct LatentHeads {
  const float *norm;  // [kv_rank]   scale of the latent's RMSNorm
  long heads, nope_width, rope_width, kv_rank;
  float eps;
  int rotary;       // index of the step's rotary table; -1: nothing is rotated
  int interleaved;  // pairs are neighbours: see rotate_neighbours
  int rows;         // Rows, with the projected latent and the key that is rotated in each
};

// The matmul of each head: heads are `x_width` elements apart in the source, and `y_width` in the target.
struct HeadMatmulLayer {
  gemm::HeadMatmul matmul;
  long x_width, y_width;
};

struct LatentPages {
  const AttentionLayer *attention;
  void *k_pages;
  int pages;  // index of the step's slots and attention of the layer's group of pages
  int rows;   // Rows, with the new rows of pages
};

struct ColumnScale {
  Columns columns;
  long width;
  float scale;
};

// Sources and destinations of an operation's rows. Scratch rows are in the arena; their number is the number of rows
// that the branch processes at once.
enum Rows {
  kResidual = 0, kNormed0 = 1, kNormed1 = 2, kPartial = 3, kScratch0 = 4, kScratch1 = 5, kScratch2 = 6, kScratch3 = 7,
  kLayerInputs = 8  // only as `Columns` that are read
};

constexpr int kScratchBuffers = 4;

enum OperationKind {
  // kind              computation                                                            type of `parameters`
  kNormRows = 0,       // target = norm(source)                                                      Norm
  kMultiply = 1,       // target = source w; added to a residual; to `partial` without its bias      PackedWeight
  kApplyRope = 2,      // normalises, rotates and scales queries and keys in target                  HeadsAndPages
  kAttend = 3,         // writes keys and values, target = attention of source; all rows at once     HeadsAndPages
  kFinishMatmul = 4,   // target = all-reduced `partial`, and the bias; added to a residual          PackedWeight
  kAddRows = 5,        // residual += scale * norm(source), which is overwritten                     Addition
  kRunExperts = 6,     // partial = the experts' results of source; all rows at once                 MoELayer
  kFinishExperts = 7,  // target = the sums in `partial`; added to a residual                        MoELayer
  kClampRows = 8,      // limits the size of the values in target                                    Clamp
  kGateRows = 9,       // target *= sigmoid(source), for the values of all query heads               HeadsAndPages
  kConvolve = 10,      // target = convolution of columns                                            ConvolutionLayer
  kGatedDelta = 11,    // target = gated delta rule of source                                        DeltaLayer
  kMamba2 = 12,        // target = Mamba 2's recurrence of source                                    MambaLayer
  kGatedNorm = 13,     // target = norm of source, gated                                             GatedNormLayer
  kMultiplyColumns = 14,  // target = product of columns                                             ColumnProduct
  kScaleColumns = 15,  // columns *= scale                                                           ColumnScale
  kNormHeads = 16,     // columns = norm of each head                                                HeadColumns
  kGateHeads = 17,     // target *= function of source, for the columns of each gate                 HeadGate
  kAddColumns = 18,    // target = sum of columns                                                    ColumnProduct
  kMultiplyAdapted = 19,  // kMultiply with the updates of rows that have adapters, or A x for the next  AdaptedWeight
  kFinishAdapted = 20,  // kFinishMatmul with updates from all-reduced A x                           AdaptedWeight
  kPrepareLatent = 21,  // norms and rotates rows of pages; target = rotated parts of queries        LatentHeads
  kMultiplyHeads = 22,  // target = source w of each head                                            HeadMatmulLayer
  kAttendLatent = 23,  // writes rows of pages, target = attention of source; all rows at once       LatentPages
  kKimiDelta = 24,     // target = gated delta rule of source, with decays of channels               KimiDeltaLayer
};

struct Operation {
  int kind, source, target;  // an OperationKind; Rows
  const void *parameters;
};

struct Branch {
  const Operation *operations;
  long count, before_all_reduce;  // number of operations; number of them before the all-reduce of `partial`
  long rows_at_once;  // limits scratch memory; 0: all
  long widths[kScratchBuffers];  // elements of a row of each scratch buffer
  long sums;          // number of sums in `partial`, one after the other
  long low;           // values of A x for each adapted row in `partial`, after the sums; 0: nothing
};

struct RotaryRows {
  const float *rows;  // [positions, width]   cosines of a position's pairs of elements, then their sines
  long width;         // elements of a head that are rotated
};

constexpr int kMostRotaries = 4, kMostQueryScales = 4, kMostPagesGroups = 4;

// Inputs shared by all layers of a step. T rows.
struct LayerStep {
  void *hidden;               // [T, hidden size]   the residual, to which each branch adds
  void *normed[2];            // [T, hidden size]   normed rows that several branches of a layer read; or null
  float *partial;             // [sums, T, hidden size]   with several ranks: this rank's share of a branch's result
                              // followed by [entries, low] of a branch whose output is adapted
  long rows;                  // T
  long width;                 // hidden size
  int type;                   // an ElementType: dtype of weights, pages and `hidden`
  const int64_t *positions;   // [T]
  const int64_t *slots[kMostPagesGroups];  // [T] each   see write_kv
  RotaryRows rotary[kMostRotaries];
  const float *query_scales[kMostQueryScales];  // [T]   factors of the queries
  const AttentionStep *attention[kMostPagesGroups];
  const recurrent::StateStep *states;  // slots of recurrent state; null: no layer has states
  const void *layer_inputs;   // [T, inputs_width]   inputs that layers get from the tokens; or null
  long inputs_width;
  const AdapterRows *adapters;  // null: no operation reads them
  float *identity_weights;    // [T]   sum of the weights of a row's experts whose result is their input; or null
  RankGroup *group;           // group for the all-reduce of `partial`; null with one rank, or if the caller does it
};

// Run branches `first` to `last`, in order. Return kAllArrived, or the rank that did not reach an all-reduce in time.
// Without a group, a branch with an all-reduce stops before it. The caller all-reduces `partial` and calls the function
// below.
extern "C" int oarlock_run_branches(const Branch *branches, long first, long last, const LayerStep *step);

// Run the rest of a branch, after `partial` has been all-reduced.
extern "C" void oarlock_finish_branch(const Branch *branch, const LayerStep *step);
