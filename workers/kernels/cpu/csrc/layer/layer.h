// The two halves of a decoder layer, each as one call: attention or the gated MLP, with the norm before it, its products
// and its residual. What a layer is made of is described once, after loading, and a step once for all layers; results in
// between lie in the arena.
//
// Every row has the same bits as from the separate kernels, one call each: these are the same functions in the same order.
#pragma once
#include "attention/attention.h"
#include "runtime/collective.h"
#include "gemm/fp8.h"
#include "gemm/grouped.h"

struct PackedWeight {
  const void *weight, *bias;  // as in gemm::Product
  long columns, inputs;
  int epilogue;
  int kind;    // a gemm::WeightKind
  int slices;  // as in gemm::Product
};

struct LayerHalf {
  const float *norm;       // [hidden size]   scale of the RMSNorm before the half
  const float *post_norm;  // [hidden size]   of the one on its result, before the residual is added; or null
  PackedWeight in;         // q, k and v; or gate and up
  PackedWeight out;        // epilogue kFloat: the products of all ranks are to be added up first, without its bias
  float eps;               // of all norms
  int type;                // an ElementType: of weights, pages and `hidden`
};

struct AttentionHalf {
  LayerHalf half;
  const AttentionLayer *attention;
  const float *head_norm;  // [heads + kv_heads, head_dim]   scale of the RMSNorm of each query and key head; or null
  void *k_pages, *v_pages;
  int rotary;  // which of the step's tables
};

struct RotaryRows {
  const float *rows;  // [positions, width]   cosines of a position's pairs of elements, then their sines
  long width;         // elements of a head that are rotated
};

// What all layers of a step share. T rows.
struct LayerStep {
  void *hidden;               // [T, hidden size]   each half adds its result
  float *partial;             // [T, hidden size]   with several ranks: this rank's share of a half's result
  long rows;                  // T
  const int64_t *positions;   // [T]
  const int64_t *slots;       // [T]   see write_kv
  RotaryRows rotary[2];       // layers with a window may have a table of their own
  const AttentionStep *attention;
  RankGroup *group;           // where `partial` is summed over the ranks; null with one rank, or where the caller sums
};

// Each adds its result to `hidden`; with several ranks and no group it writes its share to `partial` instead. Returns
// kAllCame, or the rank that did not reach the sum in time.
extern "C" int oarlock_attention_half(const AttentionHalf *attention, const LayerStep *step);
extern "C" int oarlock_mlp_half(const LayerHalf *mlp, const LayerStep *step);

// Adds `total` [T, hidden size], the sum of all ranks' shares of a half, and the bias.
extern "C" void oarlock_add_total(const LayerHalf *half, const LayerStep *step, const float *total);
