"""Table of planted faults: the tests that stand for each concern of the code, and the edits in `faults.txt`."""

from dataclasses import dataclass
from pathlib import Path

# Concern -> arguments of pytest. Kernels in C++ are compiled anew for each fault, so they are tried at one level.
_AVX2 = ("-k", "avx2")
CONCERNS: dict[str, tuple[str, ...]] = {
    "attention": ("tests/unit/workers/attention/test_attention.py", *_AVX2),
    "layer-layouts": ("tests/unit/workers/layers/test_layer_layouts.py", "-k", "limited and rms"),
    "latent-layouts": ("tests/unit/workers/layers/test_layer_layouts.py", "-k", "latent and bfloat16"),
    "attention-forms": ("tests/unit/workers/attention/test_attention.py", "-k", "backends_agree"),
    "latents": (
        "tests/unit/workers/layers/test_latent_attention.py",
        "tests/golden/test_quantised_latents.py",
        "tests/parallel/test_plan_memory.py",
        "-k",
        "latent or deepseek",
    ),
    "decoded-alone": ("tests/unit/workers/layers/test_halves.py", "-k", "alone or is_shared"),
    "elementwise": ("tests/unit/workers/kernels/cpu/test_elementwise.py", *_AVX2),
    "recurrent": ("tests/unit/workers/kernels/cpu/test_recurrent.py", *_AVX2),
    "recurrent-layers": ("tests/unit/workers/layers/test_layer_layouts.py", "-k", "recurrent and bfloat16"),
    "products": (
        "tests/unit/workers/quantization/test_slices.py",
        "tests/unit/workers/quantization/test_matmul.py",
        *_AVX2,
    ),
    "quantised-kernels": (
        "tests/unit/workers/quantization/test_int8.py",
        "tests/unit/workers/quantization/test_grouped.py",
        *_AVX2,
    ),
    "experts": (
        "tests/unit/workers/quantization/test_expert_matmul.py",
        "-k",
        "(separate_products and float32) or multiply_inputs",
    ),
    "adapted-experts": ("tests/unit/workers/lora/test_adapted_experts.py", "-k", "avx2"),
    "adapted-layers": ("tests/unit/workers/lora/test_adapted_layers.py", "-k", "avx2 or quantised or slots"),
    "adapted-models": ("tests/golden/test_adapters_golden.py", "-k", "llama and (none or merged)"),
    "adapter-ranks": (
        "tests/parallel/test_adapter_ranks.py",
        "tests/unit/workers/lora/test_loaded_adapters.py",
        "tests/unit/workers/test_adapters.py",
    ),
    "class-experts": ("tests/unit/workers/transformers_backend/test_experts.py",),
    "router": ("tests/unit/workers/layers/test_router.py", *_AVX2),
    "sampling-kernels": (
        "tests/unit/workers/sampling/test_sampling.py",
        *_AVX2,
    ),
    "logits-processors": ("tests/unit/workers/sampling/test_logits_processors.py",),
    "triton": (
        "tests/unit/workers/kernels/triton/test_triton_rotation.py",
        "tests/unit/workers/kernels/triton/test_triton_sampling.py",
        "tests/unit/workers/kernels/triton/test_triton_layers.py",
        "tests/unit/workers/kernels/triton/test_triton_attention.py",
        "tests/unit/workers/kernels/triton/test_triton_weight_only.py",
    ),
    "triton-adapters": ("tests/unit/workers/kernels/triton/test_triton_low_rank.py",),
    "triton-latent": ("tests/unit/workers/kernels/triton/test_triton_latent.py",),
    "triton-recurrent": ("tests/unit/workers/kernels/triton/test_triton_recurrent.py",),
    "sharding": (
        "tests/unit/workers/layers/test_sharding.py",
        "tests/unit/workers/distributed/test_topology.py",
        "tests/unit/workers/distributed/test_pipeline_stage.py",
        "tests/unit/workers/layers/test_stage_layers.py",
        "tests/parallel/test_collectives.py",
    ),
    "ring": (
        "tests/unit/workers/distributed/test_shm_ring.py",
        "tests/unit/workers/distributed/test_control_channel.py",
    ),
    "protocol": (
        "tests/unit/workers/test_protocol.py",
        "tests/unit/engine/ipc/test_messages.py",
        "tests/unit/engine/ipc/test_frames.py",
        "tests/unit/engine/input_batch/test_input_batch.py",
    ),
    "quantisation": (
        "tests/unit/workers/quantization/test_quantised_weights.py",
        "tests/unit/workers/quantization/test_quantised_refusals.py",
    ),
    "graphs": (
        "tests/unit/workers/runner/test_step_inputs.py",
        "tests/parallel/test_made_up_cuda.py",
    ),
    "captured-states": ("tests/parallel/test_captured_states.py", "-m", "soak", "-k", "graphs and mamba2"),
    "sampling": (
        "tests/unit/workers/sampling",
        "-k",
        "not avx512",
    ),
    "scheduler": (
        "tests/unit/engine/scheduler/test_scheduler.py",
        "tests/unit/engine/scheduler/test_decode_state.py",
        "tests/unit/engine/scheduler/test_refused_steps.py",
        "tests/unit/engine/scheduler/test_scheduler_properties.py",
        "tests/sim/test_fairness.py",
    ),
    "adapters": (
        "tests/unit/engine/scheduler/test_adapters.py",
        "tests/unit/engine/scheduler/test_adapter_waits.py",
        "tests/unit/engine/scheduler/test_adapter_properties.py",
        "tests/unit/workers/test_adapters.py",
    ),
    "kv-cache": (
        "tests/unit/engine/kv_cache/test_kv_cache_manager.py",
        "tests/unit/engine/kv_cache/test_sliding_window.py",
        "tests/unit/engine/kv_cache/test_memory_groups.py",
        "tests/unit/engine/kv_cache/test_prefix_sharing.py",
        "tests/unit/engine/kv_cache/test_block_events.py",
    ),
    "class-self-test": ("tests/unit/workers/transformers_backend/test_class_self_test.py", "-m", "not soak"),
    "class-states": ("tests/unit/workers/transformers_backend/test_states.py",),
    "recurrent-state": (
        "tests/unit/engine/kv_cache/test_state_slots.py",
        "tests/unit/engine/scheduler/test_recurrent_state.py",
    ),
    "offload": (
        "tests/unit/engine/kv_cache/test_kv_offload.py",
        "tests/unit/workers/kv_tiers",
    ),
    "drafts": (
        "tests/unit/engine/spec_decode/test_ngram_index.py",
        "tests/unit/engine/spec_decode/test_drafter.py",
        "tests/unit/engine/spec_decode/test_speculation.py",
        "tests/unit/workers/sampling/test_drafts.py",
    ),
    "text": (
        "tests/unit/server/llm/test_stop_strings.py",
        "tests/unit/server/llm/test_detokenizer.py",
        "tests/unit/server/llm/test_output_processor.py",
        "tests/contract/test_completions_wire.py",
    ),
    "input-batch": (
        "tests/unit/engine/input_batch/test_input_batch.py",
        "tests/unit/engine/input_batch/test_first_history.py",
        "tests/unit/engine/input_batch/test_logits_constraints.py",
        "tests/unit/engine/input_batch/test_mask_batch.py",
        "tests/unit/engine/input_batch/test_bad_words.py",
    ),
    "structured-output": (
        "tests/unit/engine/structured_output/test_grammar_compiler.py",
        "tests/unit/engine/input_batch/test_grammar_bitmask.py",
        "tests/unit/engine/input_batch/test_mask_batch.py",
        "tests/unit/engine/structured_output/test_structured_output_manager.py",
    ),
    "replicas": ("tests/unit/engine/test_prefix_index.py", "tests/unit/engine/test_replica_choice.py"),
    "step-cost": ("tests/unit/engine/scheduler/test_step_budget.py", "tests/unit/workers/test_step_cost.py"),
    "pipeline": (
        "tests/unit/workers/distributed/test_pipeline_stage.py",
        "tests/unit/workers/layers/test_stage_layers.py",
    ),
    "models": (
        "tests/unit/workers/models/test_describe.py",
        "tests/golden/test_layers_golden.py",
        "-k",
        "defaults or familys_rule or stretches or hyperclovax-tp or glm4-tp or granite-swa-tp",
    ),
    "adapter-files": (
        "tests/unit/workers/lora/test_adapter_config.py",
        "tests/unit/workers/lora/test_adapter_file.py",
        "tests/unit/workers/lora/test_gguf_adapter.py",
    ),
    "gated-delta": (
        "tests/unit/workers/layers/test_gated_delta.py",
        "tests/unit/workers/models/test_delta_families.py",
    ),
    "layers": ("tests/unit/workers/layers/test_rotary.py", "tests/unit/workers/layers/test_norm.py"),
    "positions": ("tests/unit/workers/layers/test_positions.py",),
    "weights": ("tests/unit/workers/model_files", "tests/unit/workers/weights"),
    "wrappers": ("tests/unit/workers/models/test_wrappers.py",),
    "tool-formats": (
        "tests/unit/server/chat/tool_parsers/test_tool_parsers.py",
        "tests/unit/server/chat/test_reasoning_parser.py",
        "tests/unit/server/chat/tool_parsers/test_every_format.py",
    ),
    "completions": ("tests/contract/test_completions_wire.py",),
    "chat": ("tests/contract/test_chat_wire.py", "tests/contract/test_chat_tools_wire.py"),
    "messages": ("tests/contract/test_messages_wire.py",),
    "pooling": ("tests/contract/test_embeddings_wire.py", "tests/contract/test_rerank_wire.py"),
    "http": (
        "tests/contract/edge/test_cors.py",
        "tests/contract/test_middleware_wire.py",
        "tests/contract/test_messages_wire.py",
    ),
    "served-adapters": ("tests/contract/test_adapters_wire.py",),
    "config": ("tests/unit/server/config/test_settings.py", "tests/unit/server/http/test_listening.py"),
}


@dataclass(frozen=True)
class Fault:
    """One edit: the text `before`, which stands in the code once, becomes `after`."""

    concern: str
    name: str
    breaks: str  # what goes wrong with it
    before: str
    after: str


def read_faults(text: str) -> list[Fault]:
    """Faults of a text in the form of `faults.txt`; lines that begin with # are skipped."""
    faults = []
    for paragraph in text.strip().split("\n\n"):
        title, *lines = [line for line in paragraph.split("\n") if not line.startswith("#")] or [""]
        if title:
            place, _, breaks = title.partition(": ")
            concern, _, name = place.partition(" / ")
            before, after = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
            faults.append(Fault(concern, name, breaks, before, after))
    return faults


FAULTS = read_faults((Path(__file__).parent / "faults.txt").read_text("utf-8"))
