"""Mistakes that were made before, or are hard to notice: planted one at a time, to test the tests.

    python -m tests.golden.faults        # the table: the tensor that is named, its faults

`tensor` is the first one that must be found wrong: a fault has to be named where it was made.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pytest import MonkeyPatch

from tests.golden import mutations
from tests.golden import mutations_of_latents as of_latents
from tests.golden import mutations_of_mamba as of_mamba
from tests.golden import mutations_of_states as of_states
from tests.golden import mutations_of_values as of_values
from tests.golden.cases import run_id

FILE = "tests/golden/test_layers_golden.py"
TEST = f"{FILE}::test_every_tensor_is_within_twice_transformers_own_error"


@dataclass(frozen=True)
class Fault:
    """Planted fault: its case and number of ranks, and the tensor that the comparison must name first."""

    requirement: str  # S1 ... S14
    what: str
    plant: Callable[[MonkeyPatch], None]  # one of `mutations.py`
    case: str
    size: int
    tensor: str

    @property
    def caught_by(self) -> str:
        return f"{TEST}[{run_id(self.case, self.size)}]"


FAULTS = [
    Fault("S2", "sum over ranks left out", mutations.sum_over_ranks_left_out, "llama", 4, "0.o_proj"),
    Fault("S3", "KV heads stored repeated", mutations.kv_heads_stored_repeated, "qwen2", 2, "pages"),
    Fault("S5", "mask by 0 * -inf", mutations.mask_by_zero_times_infinity, "qwen2", 1, "0.attention"),
    Fault("S5", "a token sees the one after it", mutations.future_visible, "qwen2", 1, "0.attention"),
    Fault("S5", "window one token too long", mutations.window_one_too_long, "mistral-window", 1, "0.attention"),
    Fault("S5", "chunks one token longer", mutations.chunks_one_token_longer, "llama4", 1, "0.attention"),
    Fault("S5", "chunks as a window", mutations.chunks_as_a_window, "llama4", 2, "0.attention"),
    Fault("S6", "q, k, v biases skipped", mutations.bias_skipped, "qwen2", 2, "0.q"),
    Fault("S6", "q_proj cut along the input", mutations.column_parallel_cut_along_the_input, "qwen2", 2, "0.q"),
    Fault("S6", "o_proj cut along the output", mutations.row_parallel_cut_along_the_output, "qwen2", 2, "0.o_proj"),
    Fault("S6", "fused q, k, v cut as one", mutations.qkv_cut_as_one, "phi3", 2, "0.q"),
    Fault("S6", "fused gate, up cut as one", mutations.gate_and_up_cut_as_one, "phi3", 2, "0.gate_up"),
    Fault(
        "S6",
        "row-parallel bias on every rank",
        mutations.row_parallel_bias_on_every_rank,
        "llama-all-biases",
        2,
        "0.o_proj",
    ),
    Fault("S8", "attention's gate of the first rank", of_values.rows_of_the_first_rank, "afmoe", 2, "0.attention_gate"),
    Fault("S8", "replicated KV heads dealt in turn", mutations.replicated_kv_heads_dealt_in_turn, "qwen2", 8, "0.k"),
    Fault("S8", "partitioned KV heads of the next rank", mutations.partitioned_kv_heads_shifted, "qwen2", 2, "0.k"),
    Fault(
        "S8",
        "query heads read KV heads in turn",
        mutations.query_heads_read_kv_heads_in_turn,
        "qwen2",
        2,
        "0.attention",
    ),
    Fault("S9", "rotation left out", mutations.rotation_left_out, "qwen2", 1, "0.q_rope"),
    Fault("S9", "rotation of neighbouring elements", mutations.rotation_of_neighbours, "llama", 1, "0.q_rope"),
    Fault("S9", "sine of the wrong sign", mutations.sine_of_the_wrong_sign, "qwen3", 2, "0.q_rope"),
    Fault(
        "S9", "positions begin anew in each chunk", mutations.positions_begin_anew_in_each_chunk, "qwen2", 1, "0.q_rope"
    ),
    Fault("S9", "scaling of RoPE ignored", mutations.scaling_of_rope_ignored, "llama-llama3", 2, "0.q_rope"),
    Fault("S9", "attention factor ignored", mutations.attention_factor_ignored, "phi3-longrope-short", 1, "0.q_rope"),
    Fault("S9", "short factors beyond their reach", mutations.short_factors_beyond_their_reach, "phi4", 2, "0.q_rope"),
    Fault("S9", "whole head rotated instead of a part", mutations.whole_head_rotated, "phi4", 2, "0.q_rope"),
    Fault("S9", "one rotary table for all layers", mutations.one_rotary_table_for_all_layers, "gemma3", 1, "0.q_rope"),
    Fault("S9", "every layer rotated", mutations.every_layer_rotated, "smollm3", 2, "1.q_rope"),
    Fault("S9", "layers without window rotated", mutations.every_layer_rotated, "exaone4", 1, "1.q_rope"),
    Fault("S9", "rotation of halves of a part", mutations.rotation_of_halves, "glm4", 2, "0.q_rope"),
    Fault("S9", "one base for all layers", mutations.one_rotary_table_for_all_layers, "olmo3", 1, "0.q_rope"),
    Fault("S9", "norms before the rotation", mutations.norms_before_the_rotation, "hunyuan-dense", 2, "0.q_rope"),
    Fault("S9", "query scale left out", mutations.query_scale_left_out, "ministral3", 1, "0.q_rope"),
    Fault("S9", "query scale one token late", mutations.query_scale_one_token_late, "ministral3", 2, "0.q_rope"),
    Fault("S9", "keys scaled like queries", mutations.keys_scaled_too, "ministral3", 4, "0.k_rope"),
    Fault("S10", "vocabulary head of the next rank", mutations.head_of_the_next_rank, "qwen2", 4, "logits"),
    Fault("S10", "embedding adds foreign rows", mutations.embedding_adds_foreign_rows, "qwen2", 2, "embedding"),
    Fault("S10", "positions begin one row late", mutations.positions_one_row_late, "opt", 2, "embedding"),
    Fault(
        "S10",
        "positions added on every rank",
        mutations.positions_added_before_the_sum_over_ranks,
        "gpt2",
        4,
        "embedding",
    ),
    Fault("S10", "bias of the head dropped", mutations.bias_of_the_head_dropped, "phi", 1, "logits"),
    Fault("S10", "head's bias of the first rank", mutations.bias_of_the_head_of_the_first_rank, "phi", 4, "logits"),
    Fault("S6", "Conv1D not transposed", mutations.conv1d_read_as_other_matrices, "gpt2", 2, "0.o_proj"),
    Fault("S6", "q, k, v of heads as of all", mutations.parts_of_heads_taken_as_parts_of_all, "pythia", 2, "0.q"),
    Fault("S13", "embedding scale forgotten", mutations.embedding_scale_forgotten, "gemma2", 2, "embedding"),
    Fault("S13", "norm offset forgotten", of_values.norm_offset_forgotten, "gemma3", 1, "0.input_norm"),
    Fault("S13", "scale from head_dim", mutations.scale_from_head_dim, "gemma2", 1, "0.attention"),
    Fault("S13", "gate on attention left out", mutations.gate_on_attention_left_out, "afmoe", 1, "0.attention"),
    Fault("S13", "gate without its sigmoid", mutations.gate_without_its_sigmoid, "afmoe", 4, "0.attention"),
    Fault("S13", "norms of heads left out", mutations.norms_of_heads_left_out, "llama4", 1, "0.q_rope"),
    Fault("S13", "attention softcap skipped", mutations.attention_softcap_skipped, "gemma2", 2, "0.attention"),
    Fault(
        "S13",
        "norms after half-blocks left out",
        of_values.norms_after_half_blocks_left_out,
        "gemma2",
        1,
        "0.mid_residual",
    ),
    Fault("S13", "attention multiplier ignored", mutations.scale_from_head_dim, "granite", 2, "0.attention"),
    Fault(
        "S13",
        "residual multiplier forgotten",
        of_values.residual_scale_forgotten,
        "granite",
        1,
        "0.mid_residual",
    ),
    Fault("S13", "logit scale forgotten", mutations.logit_scale_forgotten, "hyperclovax", 2, "logits"),
    Fault(
        "S13",
        "norms after half-blocks change places",
        of_values.norms_after_half_blocks_change_places,
        "hyperclovax",
        1,
        "0.mid_residual",
    ),
    Fault("S13", "biases of LayerNorm dropped", of_values.biases_of_norms_dropped, "stablelm", 2, "0.input_norm"),
    Fault("S13", "two experts change places", mutations.two_experts_change_places, "mixtral", 2, "0.experts"),
    Fault("S13", "weights not normalised", mutations.weights_of_experts_not_normalised, "qwen3-moe", 2, "0.routing"),
    Fault("S13", "experts of all groups", mutations.experts_of_all_groups, "glm4-moe", 1, "1.routing"),
    Fault("S13", "correction in the weights", mutations.correction_in_the_weights, "ernie-moe", 1, "1.routing"),
    Fault("S13", "logits not corrected", mutations.correction_after_the_scores, "kolibri1", 1, "0.routing"),
    Fault("S13", "close experts left out", mutations.close_experts_left_out, "phimoe", 1, "0.routing"),
    Fault("S13", "gate and up of experts swapped", mutations.gate_and_up_of_experts_swapped, "gpt-oss", 2, "0.experts"),
    Fault("S13", "bias of the router dropped", mutations.bias_of_the_router_dropped, "gpt-oss", 1, "0.router"),
    Fault("S8", "attention sinks of the first rank", mutations.sinks_of_the_first_rank, "gpt-oss", 4, "0.attention"),
    Fault("S13", "attention sinks dropped", mutations.attention_sinks_dropped, "gpt-oss", 2, "0.attention"),
    Fault("S13", "limit of activations ignored", mutations.limit_of_activations_ignored, "gpt-oss", 4, "0.experts"),
    Fault("S13", "shared expert dropped", mutations.shared_expert_dropped, "granite-moe-shared", 2, "0.residual"),
    Fault(
        "S6",
        "q, k, v, z of heads as of all",
        mutations.parts_of_heads_taken_as_parts_of_all,
        "qwen3-next",
        2,
        "0.delta_q",
    ),
    Fault("S13", "decay left out", of_states.decay_left_out, "qwen3-5", 1, "0.recurrence"),
    Fault("S13", "beta not doubled", of_states.beta_not_doubled, "olmo-hybrid", 2, "0.recurrence"),
    Fault("S13", "key heads shared in turn", of_states.key_heads_shared_in_turn, "qwen3-5", 2, "0.recurrence"),
    Fault("S13", "gate before the norm", of_states.gate_before_the_norm, "qwen3-next", 1, "0.gated_norm"),
    Fault("S13", "decay of the next channel", of_states.decays_of_the_next_channel, "kimi-linear", 2, "0.recurrence"),
    Fault("S6", "decays of the first rank", of_states.biases_of_the_first_rank, "kimi-linear", 2, "0.recurrence"),
    Fault("S13", "SiLU in place of the sigmoid", of_states.silu_for_the_sigmoid, "kimi-linear", 1, "0.gated_norm"),
    Fault("S13", "taps reversed", of_states.taps_reversed, "olmo-hybrid", 1, "0.q_conv"),
    Fault("S5", "state of the convolution lost", of_states.state_of_the_convolution_lost, "qwen3-5", 1, "0.q_conv"),
    Fault("S5", "state of the delta rule lost", of_states.state_of_the_rule_lost, "qwen3-5", 1, "0.recurrence"),
    Fault("S13", "B and C swapped", of_mamba.b_and_c_swapped, "mamba2", 1, "0.recurrence"),
    Fault("S13", "time steps not limited", of_mamba.steps_without_limits, "bamba", 1, "0.recurrence"),
    Fault("S6", "norm of a rank's heads", of_mamba.norm_of_the_ranks_own_heads, "granite-hybrid", 2, "0.gated_norm"),
    Fault("S13", "stage in turn", of_mamba.branches_of_a_stage_in_turn, "falcon-h1", 1, "0.mamba_gate"),
    Fault("S13", "taps of a short convolution reversed", of_states.taps_reversed, "lfm2", 2, "0.convolution"),
    Fault("S5", "its state lost", of_states.state_of_the_convolution_lost, "lfm2", 1, "0.convolution"),
    Fault(
        "S13",
        "constant in the sum of weights forgotten",
        mutations.constant_in_the_sum_of_weights_forgotten,
        "lfm2-moe",
        1,
        "1.routing",
    ),
    Fault("S13", "values not normed", of_values.values_not_normed, "gemma4", 2, "0.attention"),
    Fault("S13", "inputs of the layer before", of_values.inputs_of_the_layer_before, "gemma4", 2, "0.input_gated"),
    Fault("S13", "factor of the layer forgotten", of_values.factor_of_the_layer_forgotten, "gemma4", 1, "0.residual"),
    Fault("S13", "other pairs rotated too", mutations.other_pairs_rotated_too, "gemma4", 1, "1.q_rope"),
    Fault("S13", "scale of values forgotten", of_values.scale_of_values_forgotten, "mimo-v2-flash", 2, "0.attention"),
    Fault(
        "S13",
        "gates of heads by another function",
        of_values.gates_of_heads_by_another_function,
        "laguna",
        2,
        "0.attention",
    ),
    Fault("S13", "relu not squared", of_values.relu_not_squared, "arcee", 2, "0.up"),
    Fault("S13", "gelu without the tanh", of_values.exact_gelu_for_its_approximation, "starcoder2", 1, "0.up"),
    Fault("S6", "up_proj of the first rank", of_values.rows_of_the_first_rank, "jais2", 2, "0.up"),
    Fault(
        "S13",
        "offset of LayerNorm forgotten",
        of_values.layer_norm_offset_forgotten,
        "nemotron",
        1,
        "0.input_norm",
    ),
    Fault("S13", "LayerNorm without its mean", of_values.layer_norm_without_its_mean, "olmo", 2, "0.input_norm"),
    Fault("S13", "q, k, v not limited", of_values.queries_keys_and_values_not_limited, "olmo", 1, "0.q_rope"),
    Fault(
        "S13",
        "weights of experts on their results",
        of_values.weights_of_experts_on_their_results,
        "llama4",
        2,
        "1.experts",
    ),
    Fault("S13", "values from the wrong half", of_latents.values_from_the_wrong_half, "deepseek-v3", 1, "0.attention"),
    Fault("S9", "first elements rotated", of_latents.first_elements_of_queries_rotated, "deepseek-v3", 2, "0.q_rope"),
    Fault("S9", "the latent's elements rotated", of_latents.key_of_the_latent_rotated, "deepseek-v3", 1, "0.k_rope"),
    Fault("S8", "matrices of the next rank", of_latents.heads_of_the_next_rank, "deepseek-v3", 2, "0.attention"),
    Fault("S6", "halves of kv_b_proj exchanged", of_latents.halves_of_matrices_exchanged, "youtu", 2, "0.attention"),
    Fault("S13", "scale without mscale", of_latents.scale_without_mscale, "deepseek-v3", 2, "0.attention"),
    Fault("S13", "latent not normed", of_latents.latent_not_normed, "deepseek-v3", 1, "0.latent"),
    Fault("S13", "shortcut added too early", of_values.held_result_added_too_early, "longcat-flash", 4, "0.residual"),
    Fault("S13", "shortcut left out", of_values.held_result_left_out, "longcat-flash", 1, "1.residual"),
    Fault("S13", "no identity experts", of_values.experts_without_matrices_left_out, "longcat-flash", 2, "0.experts"),
    Fault("S13", "logit softcap skipped", mutations.logit_softcap_skipped, "gemma2", 2, "logits"),
]


def table() -> str:
    """Format the faults as a table in Markdown, by the tensor that must be named."""
    by_tensor: dict[str, list[str]] = {}
    for fault in FAULTS:
        by_tensor.setdefault(fault.tensor, []).append(fault.what)
    lines = ["| first wrong tensor | faults |", "|---|---|"]
    lines += [f"| `{tensor}` | {'; '.join(faults)} |" for tensor, faults in by_tensor.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
