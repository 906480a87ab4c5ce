// The layout of the structures that Python fills, as compiled. `workers/kernels/cpu/structures.py` compares it with its
// own declarations when the library is loaded.
#include <cstddef>
#include <cstdio>
#include <type_traits>

#include "gemm/grouped_source.h"
#include "layer/layer.h"
#include "sampling/step.h"

namespace {

using gemm::Expert, gemm::ExpertAdapters, gemm::ExpertPairs, gemm::Experts, gemm::HeadMatmul;
using recurrent::Convolution, recurrent::DeltaHeads, recurrent::GatedNorm, recurrent::KimiGates, recurrent::MambaHeads,
    recurrent::StateStep;
using sampling::LogitsChanges, sampling::SamplingOutput, sampling::SamplingStep;

struct FieldLayout {
  const char *name;
  size_t offset, size;
  const char *type;
};

// Return the code of a type in ctypes. An array has the code of its elements.
template <class T>
constexpr const char *type_code() {
  using Element = std::remove_cv_t<std::remove_all_extents_t<T>>;
  if (std::is_pointer_v<Element>) return "P";
  if (std::is_floating_point_v<Element>) return sizeof(Element) == 4 ? "f" : "d";
  if (std::is_integral_v<Element>) return sizeof(Element) == 4 ? "i" : std::is_signed_v<Element> ? "l" : "L";
  return "struct";
}

char layouts[1 << 15];
size_t length_of_layouts;

template <class... Values>
void print(const char *format, Values... values) {
  length_of_layouts += snprintf(layouts + length_of_layouts, sizeof layouts - length_of_layouts, format, values...);
}

template <size_t kCount>
void add_structure(const char *structure, size_t size, const FieldLayout (&fields)[kCount]) {
  print("%s: %zu bytes\n", structure, size);
  for (const FieldLayout &f : fields)
    print("%s.%s: offset %zu, %zu bytes of type %s\n", structure, f.name, f.offset, f.size, f.type);
}

#define FIELD(name) {#name, offsetof(Of, name), sizeof(Of::name), type_code<decltype(Of::name)>()}
#define STRUCTURE(name, ...)                           \
  {                                                    \
    using Of = name;                                   \
    add_structure(#name, sizeof(name), {__VA_ARGS__}); \
  }

}  // namespace

// Return a line for each structure, followed by a line for each of its fields. Not thread-safe.
extern "C" const char *oarlock_structures() {
  length_of_layouts = 0;
  STRUCTURE(AttentionStep, FIELD(tables), FIELD(rows), FIELD(query_start_loc), FIELD(seq_lens), FIELD(seqs),
            FIELD(table_width))
  STRUCTURE(AttentionLayer, FIELD(heads), FIELD(kv_heads), FIELD(head_dim), FIELD(value_dim), FIELD(block_size),
            FIELD(window), FIELD(chunk), FIELD(scale), FIELD(softcap), FIELD(pages), FIELD(value_in_key))
  STRUCTURE(RankGroup, FIELD(flags), FIELD(inputs), FIELD(buffer_bytes), FIELD(rank), FIELD(size), FIELD(collective),
            FIELD(spin_s), FIELD(yields), FIELD(timeout_s))
  STRUCTURE(HeadsOfRank, FIELD(heads), FIELD(kv_heads), FIELD(all_heads), FIELD(all_kv_heads), FIELD(first_head),
            FIELD(first_kv_head), FIELD(sums_keys))
  STRUCTURE(Router, FIELD(weight), FIELD(bias), FIELD(correction), FIELD(outputs), FIELD(hidden), FIELD(top_k),
            FIELD(groups), FIELD(top_groups), FIELD(best_of_group), FIELD(is_sigmoid), FIELD(is_normalised),
            FIELD(corrects_logits), FIELD(is_mixer), FIELD(least_sum), FIELD(added_to_sum), FIELD(scale),
            FIELD(tolerance))
  STRUCTURE(Expert, FIELD(gate_up), FIELD(down), FIELD(gate_up_bias), FIELD(down_bias), FIELD(gate_up_kind),
            FIELD(down_kind))
  STRUCTURE(Experts, FIELD(experts), FIELD(first), FIELD(count), FIELD(hidden), FIELD(width), FIELD(slices),
            FIELD(groups), FIELD(group), FIELD(only_slice), FIELD(activation), FIELD(alpha), FIELD(limit),
            FIELD(weighs_inputs))
  STRUCTURE(GroupedSource, FIELD(values), FIELD(scales), FIELD(zeros), FIELD(factors), FIELD(value_indices),
            FIELD(input_order), FIELD(columns), FIELD(stride), FIELD(scales_per_row), FIELD(stored_group),
            FIELD(slices), FIELD(length), FIELD(bits), FIELD(group), FIELD(is_gated), FIELD(is_float), FIELD(kind))
  STRUCTURE(PackedWeight, FIELD(weight), FIELD(bias), FIELD(columns), FIELD(inputs), FIELD(epilogue), FIELD(kind),
            FIELD(slices))
  STRUCTURE(AdapterPairs, FIELD(a), FIELD(b), FIELD(scales), FIELD(ranks), FIELD(ends), FIELD(parts), FIELD(max_rank),
            FIELD(inputs), FIELD(outputs), FIELD(slices), FIELD(block), FIELD(panel))
  STRUCTURE(AdaptedWeight, FIELD(weight), FIELD(pairs))
  STRUCTURE(ExpertPairs, FIELD(gate_up), FIELD(down))
  STRUCTURE(ExpertAdapters, FIELD(pairs), FIELD(rows))
  STRUCTURE(AdapterRows, FIELD(rows), FIELD(starts), FIELD(slots), FIELD(spans))
  STRUCTURE(Norm, FIELD(scale), FIELD(shift), FIELD(width), FIELD(eps), FIELD(is_layer_norm))
  STRUCTURE(HeadsAndPages, FIELD(attention), FIELD(head_norm), FIELD(k_pages), FIELD(v_pages), FIELD(rotary),
            FIELD(interleaved), FIELD(eps), FIELD(row_norm), FIELD(sinks), FIELD(norms_last), FIELD(query_scale),
            FIELD(pages), FIELD(has_keys))
  STRUCTURE(Addition, FIELD(norm), FIELD(width), FIELD(scale))
  STRUCTURE(Clamp, FIELD(width), FIELD(limit))
  STRUCTURE(MoELayer, FIELD(router), FIELD(routed), FIELD(shared), FIELD(shared_gate), FIELD(router_norm),
            FIELD(norm), FIELD(expert_scale), FIELD(routed_pairs), FIELD(shared_pairs), FIELD(first_identity),
            FIELD(identity_rows))
  STRUCTURE(StateStep, FIELD(starts), FIELD(reads), FIELD(writes), FIELD(save_starts), FIELD(save_lens),
            FIELD(save_slots), FIELD(seqs))
  STRUCTURE(Convolution, FIELD(weight), FIELD(bias), FIELD(channels), FIELD(taps), FIELD(silu))
  STRUCTURE(DeltaHeads, FIELD(key_heads), FIELD(value_heads), FIELD(key_width), FIELD(value_width),
            FIELD(decays_channels))
  STRUCTURE(KimiGates, FIELD(a_log), FIELD(dt_bias), FIELD(heads), FIELD(width), FIELD(lower_bound))
  STRUCTURE(MambaHeads, FIELD(a), FIELD(d), FIELD(heads), FIELD(groups), FIELD(head_width), FIELD(state_width))
  STRUCTURE(GatedNorm, FIELD(weight), FIELD(heads), FIELD(width), FIELD(eps), FIELD(gates_first), FIELD(group_heads),
            FIELD(all_heads), FIELD(first_head), FIELD(sigmoid))
  STRUCTURE(Columns, FIELD(rows), FIELD(first), FIELD(stride))
  STRUCTURE(ConvolutionLayer, FIELD(convolution), FIELD(states), FIELD(inputs))
  STRUCTURE(DeltaLayer, FIELD(heads), FIELD(states), FIELD(a_log), FIELD(dt_bias), FIELD(beta_scale), FIELD(gates))
  STRUCTURE(KimiDeltaLayer, FIELD(heads), FIELD(gates), FIELD(states), FIELD(decays), FIELD(rates))
  STRUCTURE(MambaLayer, FIELD(heads), FIELD(states), FIELD(step_bias), FIELD(least), FIELD(most), FIELD(scale),
            FIELD(steps))
  STRUCTURE(GatedNormLayer, FIELD(norm), FIELD(gate))
  STRUCTURE(ColumnProduct, FIELD(left), FIELD(right), FIELD(width))
  STRUCTURE(ColumnScale, FIELD(columns), FIELD(width), FIELD(scale))
  STRUCTURE(HeadColumns, FIELD(columns), FIELD(norm), FIELD(heads), FIELD(width), FIELD(eps))
  STRUCTURE(LatentHeads, FIELD(norm), FIELD(heads), FIELD(nope_width), FIELD(rope_width), FIELD(kv_rank), FIELD(eps),
            FIELD(rotary), FIELD(interleaved), FIELD(rows))
  STRUCTURE(HeadMatmul, FIELD(weight), FIELD(heads), FIELD(columns), FIELD(inputs))
  STRUCTURE(HeadMatmulLayer, FIELD(matmul), FIELD(x_width), FIELD(y_width))
  STRUCTURE(LatentPages, FIELD(attention), FIELD(k_pages), FIELD(pages), FIELD(rows))
  STRUCTURE(HeadGate, FIELD(gates), FIELD(width), FIELD(is_softplus))
  STRUCTURE(Operation, FIELD(kind), FIELD(source), FIELD(target), FIELD(parameters))
  STRUCTURE(Branch, FIELD(operations), FIELD(count), FIELD(before_all_reduce), FIELD(rows_at_once), FIELD(widths),
            FIELD(sums), FIELD(low))
  STRUCTURE(RotaryRows, FIELD(rows), FIELD(width))
  STRUCTURE(LayerStep, FIELD(hidden), FIELD(normed), FIELD(partial), FIELD(rows), FIELD(width), FIELD(type),
            FIELD(positions), FIELD(slots), FIELD(rotary), FIELD(query_scales), FIELD(attention), FIELD(states),
            FIELD(layer_inputs), FIELD(inputs_width), FIELD(adapters), FIELD(identity_weights), FIELD(group))
  STRUCTURE(LogitsChanges, FIELD(num_bias), FIELD(bias_rows), FIELD(bias_ids), FIELD(bias_values), FIELD(num_penalties),
            FIELD(penalty_rows), FIELD(repetition), FIELD(frequency), FIELD(presence), FIELD(history_firsts),
            FIELD(history_lengths), FIELD(history_ids), FIELD(history_counts), FIELD(num_masks), FIELD(mask_words),
            FIELD(mask_rows), FIELD(mask_bits))
  STRUCTURE(SamplingStep, FIELD(rows), FIELD(vocab_size), FIELD(target_ids), FIELD(temperature), FIELD(top_p),
            FIELD(top_k), FIELD(min_p), FIELD(top_n_sigma), FIELD(seeds), FIELD(sample_positions), FIELD(num_logprobs),
            FIELD(changes))
  STRUCTURE(SamplingOutput, FIELD(top_columns), FIELD(token_ids), FIELD(tops), FIELD(logprobs), FIELD(ranks),
            FIELD(top_ids), FIELD(top_logprobs))
  return layouts;
}
