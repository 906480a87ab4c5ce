"""Assigns layers and tensors to the stages of a pipeline. Torch-free.

Stages hold neighbouring layers, as equally many as possible: earlier ones have one more where they cannot be dealt
equally, since the last stage has the output head too. The first embeds; the last norms and samples, and holds a tied
embedding a second time.
"""

from oarlock.workers.layers.decoder_spec import DecoderSpec, tensor_shapes

_LAYERS, _EMBEDDING = "model.layers.", "model.embed_tokens."


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of `stage`, one at least where there are as many layers as stages."""
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def is_in_stage(spec: DecoderSpec, name: str, layers: range) -> bool:
    """Whether the stage with `layers` holds the tensor `name`, in whichever form a checkpoint stores it. A name that no
    stage knows is in all of them."""
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    if name.startswith(_LAYERS):
        number = name.removeprefix(_LAYERS).partition(".")[0]
        return not number.isdigit() or int(number) >= spec.num_layers or int(number) in layers
    if name.startswith(_EMBEDDING):
        return is_first or (is_last and spec.tie_word_embeddings)
    return is_last or not name.startswith(("model.norm.", "lm_head."))


def tensors_of_stage(spec: DecoderSpec, layers: range) -> dict[str, tuple[int, ...]]:
    """Name and full shape of every tensor of the stage with `layers`, in an ordinary checkpoint."""
    return {name: shape for name, shape in tensor_shapes(spec).items() if is_in_stage(spec, name, layers)}
