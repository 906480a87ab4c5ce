"""Checks of settings that models of described families have, and classes that transformers' code computes do not."""

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.checkpoint import Checkpoint, tensors_differ
from oarlock.workers.platform.dtypes import SAFETENSORS_DTYPES
from oarlock.workers.transformers_backend.class_description import ClassDescription

# Settings, each with the value that means "not set", its flag, and the reason why there is no other.
_WITHOUT = (
    ("pipeline_parallel_size", 1, "--pipeline-parallel-size", "the class computes all layers in one call"),
    ("nnodes", 1, "--nnodes", "it is served on one host only"),
    ("enable_expert_parallel", False, "--enable-expert-parallel", "ranks hold a part of every expert"),
    ("max_loras", 0, "--enable-lora", "adapters update the layers of described models only"),
)
_NUMBERS = ("I", "U", "BOOL")  # dtypes of stored buffers, such as position ids


def check_class(config: WorkerConfig, spec: DecoderSpec, *, is_quantised: bool) -> None:
    """Check the settings of a model that transformers' code computes. Raises `StartupError`.

    `is_quantised`: the checkpoint's weights are quantised.
    """
    for field, neutral, flag, reason in _WITHOUT:
        if getattr(config, field) != neutral:
            raise StartupError(
                f"{flag} with {spec.architecture}, which transformers' code computes: {reason}.", f"Leave {flag} out."
            )
    if is_quantised:
        raise StartupError(
            f"{spec.architecture} is computed by transformers' code, and this checkpoint is quantised.",
            "Use the model's unquantised checkpoint; --quantization rounds its weights at load.",
        )


def check_class_tensors(checkpoint: Checkpoint) -> None:
    """Check the dtypes of the tensors. Raises `StartupError`."""
    for name, found in checkpoint.tensors.items():
        if found.entry.dtype not in SAFETENSORS_DTYPES and not found.entry.dtype.startswith(_NUMBERS):
            raise StartupError(
                f"{found.path}: tensor {name!r} is {found.entry.dtype}, which is not supported.",
                "Use the model's bfloat16, float16 or float32 checkpoint.",
            )


def check_ties(checkpoint: Checkpoint, description: ClassDescription) -> None:
    """Check that tensors which the class ties are not stored with different values. Raises `StartupError`.

    transformers leaves such tensors untied, with a warning.
    """
    for tie in description.ties:
        one, other = checkpoint.find(tie.taken), checkpoint.find(tie.other)
        if one is not None and other is not None and tensors_differ(one, other):
            raise StartupError(
                f"{checkpoint.directory}: config.json ties {tie.taken} and {tie.other}, but the checkpoint has "
                "different ones.",
                "Set tie_word_embeddings to false in config.json.",
            )
