"""Every tensor of every layer, ours at any number of ranks against the reference's, in the order of computation.

The bound is transformers' own error: ours may miss the float64 truth by twice what theirs misses it by, as the root of
the mean square (the largest of thousands of roundings is a matter of luck; `test_decoder_golden.py` holds the logits to
it). Whatever is not rounding is larger by orders of magnitude, be it in one head or in one element. No error is held
to less than what rounding each element once would leave.

Which rank holds which head is worked out here once more, from the global counts alone: what the product believes about
it is what is being tested.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, SublayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.layer_input_spec import LayerInputSpec
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.mlp_spec import MLPSpec
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.verify.rank import RecordingDecoder
from tests.golden.cases import PROMPT
from tests.golden.exact_reference import ExactReference
from tests.golden.paged_run import BLOCK_SIZE, NUM_BLOCKS, PagedRun, load_decoder, on_ranks

# Tensors of which each rank has some columns.
_DELTA = ("delta_q", "delta_k", "delta_v", "delta_z", "delta_b", "delta_a", "q_conv", "k_conv", "v_conv", "recurrence",
          "gated_norm")  # fmt: skip
_KIMI = ("kimi_q", "kimi_k", "kimi_v", "kimi_f", "kimi_b", "kimi_g", "q_conv", "k_conv", "v_conv", "recurrence",
         "gated_norm")  # fmt: skip
_MAMBA = ("mamba_gate", "mamba_x", "mamba_b", "mamba_c", "mamba_dt", "x_conv", "b_conv", "c_conv", "recurrence",
          "gated_norm")  # fmt: skip
_OF_GROUPS = ("mamba_b", "mamba_c", "b_conv", "c_conv")  # ranks that share a group hold copies
_CUT = {"q", "attention_gate", "q_rope", "attention", "gate_up", "up", "conv_b", "conv_c", "conv_x", "convolution",
        "input_gated", *_DELTA, *_KIMI, *_MAMBA} - {*_OF_GROUPS}  # fmt: skip
_FIRST_CHUNK = 20
_ROUNDING = {torch.float32: 2.0**-25, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}


@dataclass(frozen=True)
class Finding:
    """One tensor that is further from the truth than it may be."""

    tensor: str
    error: float
    bound: float


def names_of(spec: DecoderSpec) -> list[str]:
    """In the order of computation. Without a norm, sublayers read the residual; a stage leaves one residual.

    `pages` are the bytes of KV memory, which must be those of KV heads stored once.
    """
    layers = []
    for index, layer in enumerate(spec.layers):
        names: list[str] = []
        for stage in layer.stages:
            norms: set[str | None] = {None}
            for branch in stage:
                if branch.norm not in norms and branch.input_scale == 1.0:
                    names.append(branch.sublayer.reads)
                    norms.add(branch.norm)
                names += _inside(branch.sublayer)
            names.append("residual" if stage[-1] is layer.branches[-1] else stage[-1].sublayer.leaves)
        layers += [f"{index}.{name}" for name in names]
    return ["embedding", *layers, "final_norm", "logits"]


def _inside(sublayer: SublayerSpec) -> list[str]:
    if isinstance(sublayer, SelfAttentionSpec):
        own = sublayer.of_layer is None
        values = ["v"] * (own and not sublayer.keys_are_values)
        gate, keys = ["attention_gate"] * sublayer.output_gate, ["k_rope"] * own
        return ["q", *(["k"] if own else []), *values, *gate, "q_rope", *keys, "attention", "o_proj"]
    if isinstance(sublayer, LatentAttentionSpec):
        queries = ["q"] if sublayer.q_rank is None else ["q_a", "q_latent", "q"]
        gate = ["attention_gate"] * sublayer.output_gate
        return [*queries, "kv_a", "latent", *gate, "q_rope", "k_rope", "attention", "o_proj"]
    if isinstance(sublayer, ShortConvolutionSpec):
        return ["conv_b", "conv_c", "conv_x", "convolution", "out_proj"]
    if isinstance(sublayer, GatedDeltaSpec):
        return [*_DELTA, "delta"]
    if isinstance(sublayer, KimiDeltaSpec):
        low = [name for name, rank in (("kimi_f_a", sublayer.decay_rank), ("kimi_g_a", sublayer.gate_rank)) if rank]
        return [*low, *_KIMI, "kimi_delta"]
    if isinstance(sublayer, Mamba2Spec):
        return [*(name for name in _MAMBA if name != "recurrence" or sublayer.eps is not None), "mamba"]
    if isinstance(sublayer, ExpertsSpec):
        return ["router", "routing", "experts", *([] if sublayer.shared is None else ["shared"])]
    if isinstance(sublayer, LayerInputSpec):
        return ["input_gated", "input_added"]
    if isinstance(sublayer, GatedMLPSpec | MLPSpec):
        return ["up" if isinstance(sublayer, MLPSpec) else "gate_up", "mlp"]
    return [tap.name for tap in sublayer.taps if tap.is_compared]


def findings(
    reference: ExactReference,
    size: int,
    *,
    path: Path | None = None,
    relative: float | None = None,
    dequantize: bool = False,
) -> list[Finding]:
    """Empty when every tensor at `size` ranks is within its bound.

    `path`: of our checkpoint, where it is another one that means the same. `relative`: the bound as a share of the
    tensor's size, for products that round their inputs. `dequantize`: our weights are written out.
    """
    ranks = on_ranks(size, lambda tp: our_layers(tp, reference, path or reference.path, dequantize=dequantize))
    spec = reference.spec
    found = []
    wanted = page_bytes(spec, size, reference.dtype)
    if any(rank["pages"] != wanted for rank in ranks):
        found.append(Finding("pages", ranks[0]["pages"].item(), wanted))
    truth, theirs = reference.layers
    for tensor in names_of(spec):
        error = rms(joined(tensor, [rank[tensor] for rank in ranks], spec) - truth[tensor])
        own = rms(theirs[tensor] - truth[tensor])
        bound = 2 * max(own, _ROUNDING[reference.dtype] * rms(truth[tensor]))
        if relative is not None:
            bound = relative * rms(truth[tensor])
        if not error <= bound:  # NaN is never within
            found.append(Finding(tensor, error, bound))
    return found


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def our_layers(
    tp: TensorParallel, reference: ExactReference, path: Path, *, dequantize: bool = False
) -> dict[str, Tensor]:
    """This rank's tensors for the prompt, which is fed in two chunks."""
    decoder = load_decoder(path, tp, reference.dtype, reference.max_model_len, dequantize=dequantize)
    recording = RecordingDecoder(decoder)
    run = PagedRun(recording)
    run.step({0: reference.tokens[:_FIRST_CHUNK]})
    run.step({0: reference.tokens[_FIRST_CHUNK:PROMPT]})
    recording.close()
    tensors = {name: torch.cat([step[name] for step in recording.steps]).double() for name in recording.last}
    pages = {id(one.kv): one.kv for one in run.memory if one.kv is not None}.values()
    held = sum(t.numel() * t.element_size() for page in pages for t in (page.k, page.v))
    return tensors | {"pages": torch.tensor(held)}


def page_bytes(spec: DecoderSpec, size: int, dtype: torch.dtype) -> int:
    """Layers that read other layers' pages have none. Each rank keeps the latent of all heads."""
    values = 0
    for one in (layer.attention for layer in spec.layers):
        if isinstance(one, LatentAttentionSpec):
            values += one.kv_rank + one.rope_width
        elif one is not None and one.of_layer is None:
            values += max(1, one.num_kv_heads // size) * (one.head_dim + (one.value_dim or one.head_dim))
    return values * dtype.itemsize * BLOCK_SIZE * NUM_BLOCKS


def joined(tensor: str, ranks: list[Tensor], spec: DecoderSpec) -> Tensor:
    """Join the ranks' parts of one tensor: [T, columns of the whole]. NaN everywhere if copies disagree."""
    kind = tensor.rpartition(".")[2]
    if kind in _CUT:
        return torch.cat([rank.flatten(1) for rank in ranks], 1)
    if kind == "logits":
        return torch.cat(ranks, 1)[:, : spec.vocab_size]
    copies = 1
    attention = spec.layers[int(tensor.partition(".")[0])].attention if "." in tensor else None
    if kind in _OF_GROUPS:
        branches = spec.layers[int(tensor.partition(".")[0])].branches
        groups = next(one.sublayer.groups for one in branches if isinstance(one.sublayer, Mamba2Spec))
        copies = max(1, len(ranks) // groups)  # neighbours hold the same group
        whole = torch.cat([rank.flatten(1) for rank in ranks[::copies]], 1)
    elif kind in ("k", "v", "k_rope") and isinstance(attention, SelfAttentionSpec):
        copies = max(1, len(ranks) // attention.num_kv_heads)  # neighbours hold the same KV head
        whole = torch.cat([rank.flatten(1) for rank in ranks[::copies]], 1)
    else:
        copies, whole = len(ranks), ranks[0].flatten(1)
    for first in range(0, len(ranks), copies):
        if any(not torch.equal(ranks[first], copy) for copy in ranks[first : first + copies]):
            return torch.full_like(whole, float("nan"))
    return whole
