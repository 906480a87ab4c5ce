"""From the first tensor that differs to the projection and the shard that are its likely cause.

Works on what was recorded: what came before is right, so the fault lies in the one operation between, and the shape of
the error tells which part of it. Knows a decoder's operations by name; never runs one.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.layers.decoder_spec import DecoderSpec
from workers.layers.shards import shard_vocab
from workers.verify.compare import Comparison, Files, Row
from workers.verify.names import part_of
from workers.verify.probes import gate_is_right, wrong_shares
from workers.verify.request import Text

# Tensors that are computed from the same inputs: when the first of them is wrong, the others may be wrong as well.
_TOGETHER = ({"q", "k", "v"}, {"q_rope", "k_rope"})
_SAME_HEAD = 0.1  # relative distance below which two heads hold the same numbers


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything an explanation may look at."""

    folder: Path
    model: Path
    spec: DecoderSpec
    size: int

    def files(self, row: Row) -> Files:
        return Files(self.folder, "ends" if row.layer is None else str(row.layer), self.size)

    def error(self, row: Row, rank: int) -> tuple[Tensor, Tensor]:
        """(ours - truth, truth) of a rank's part, float64 [T, columns]."""
        files, part = self.files(row), part_of(row.tensor, self.spec, rank, self.size)
        truth = files.truth(row.name)[:, part.start : part.stop]
        return files.ours(rank, row.name)[:, : part.width].double() - truth, truth

    def wrong_rows(self, row: Row, rank: int) -> Tensor:
        """Which tokens are wrong: bool [T]. A token is wrong when it is off by much of what the worst token is off."""
        error, _ = self.error(row, rank)
        size = error.square().mean(1).sqrt()
        return size > 0.1 * size.max()


def explain(comparison: Comparison, scene: Scene) -> list[str]:
    """One sentence per likely cause of the first fault; empty when there is none."""
    first = comparison.first_fault
    if first is None:
        if all(token.verdict == "ok" for token in comparison.tokens):
            return []
        return ["every tensor is right and a chosen token is not: the sampler, or the gathering of logits for it"]
    rows = [first]
    for group in _TOGETHER:
        if first.tensor in group:
            rows = [row for row in comparison.rows if row.layer == first.layer and row.tensor in group]
    return [_explain(row, scene) for row in rows if row.verdict != "ok"]


def _explain(row: Row, scene: Scene) -> str:
    if row.verdict == "ranks disagree":
        others = _different_ranks(row, scene)
        return f"{_where(row)}: {_ranks(others)} hold other bits than rank 0 after the sum over ranks (all-reduce)"
    if any(math.isinf(error.ratio) for error in row.errors):
        return f"{_cause(row, scene)}; the numbers there are NaN or infinite"
    return _cause(row, scene)


def _cause(row: Row, scene: Scene) -> str:
    tensor, spec = row.tensor, scene.spec
    if tensor in ("q", "k", "v"):
        return _projection(row, scene)
    if tensor in ("q_rope", "k_rope"):
        return _rotation(row, scene)
    if tensor == "attention":
        return _attention(row, scene)
    if tensor in ("o_proj", "mlp"):
        return _row_parallel(row, scene)
    if tensor == "gate_up":
        return _gate_up(row, scene)
    if tensor in ("embedding", "logits"):
        return _vocabulary(row, scene)
    if tensor == "final_norm":
        return "model.norm.weight, or the final norm itself"
    prefix = f"model.layers.{row.layer}"
    norm = "pre_feedforward_layernorm" if _has_post_norms(spec) else "post_attention_layernorm"
    added = "post_attention_layernorm" if tensor == "mid_residual" else "post_feedforward_layernorm"
    return {
        "input_norm": f"{prefix}.input_layernorm: its weight, or the norm itself",
        "mlp_norm": f"{prefix}.{norm}: its weight, or the norm itself",
    }.get(
        tensor,
        f"{prefix}: {f'{added}, or ' if _has_post_norms(spec) else ''}the addition of the residual after "
        f"{'o_proj' if tensor == 'mid_residual' else 'down_proj'} (or a bias added on the wrong side of the sum)",
    )


def _has_post_norms(spec: DecoderSpec) -> bool:
    """Gemma's layers norm what a half-block gives, too."""
    return bool(getattr(spec, "post_norms", False)) or spec.architecture.startswith("Gemma")


def _projection(row: Row, scene: Scene) -> str:
    name = f"model.layers.{row.layer}.self_attn.{row.tensor}_proj"
    kind = "bias" if all(_is_constant(scene.error(row, rank)[0]) for rank in row.wrong_ranks) else "weight"
    text = f"{name}.{kind}: the rows of {_ranks(row.wrong_ranks)}"
    if kind == "bias":
        return f"{text} (the error is the same for every token: a bias lost, doubled, or another's)"
    moved = _moved_heads(row, scene, row.wrong_ranks[0])
    return f"{text}{f' ({moved})' if moved else ''}"


def _moved_heads(row: Row, scene: Scene, rank: int) -> str:
    """Whether a rank holds, in place of its own heads, other heads of the same tensor: a shard cut in a wrong place."""
    part = part_of(row.tensor, scene.spec, rank, scene.size)
    files = scene.files(row)
    ours = files.ours(rank, row.name).double().unflatten(1, (-1, part.group))  # [T, local heads, D]
    truth = files.truth(row.name).unflatten(1, (-1, part.group))  # [T, heads, D]
    first = part.start // part.group
    found = []
    for local in range(ours.shape[1]):
        distance = (truth - ours[:, local : local + 1]).square().sum((0, 2)).sqrt()
        scale = truth.square().sum((0, 2)).sqrt()
        nearest = int((distance / scale).argmin())
        if nearest != first + local and distance[nearest] < _SAME_HEAD * scale[nearest]:
            found.append(f"its head {first + local} holds the numbers of head {nearest}")
    return "; ".join(found)


def _rotation(row: Row, scene: Scene) -> str:
    """At position 0 the rotation turns nothing: what is wrong there already is the norm before it."""
    letter = row.tensor[0]
    positions = torch.tensor([at for sequence in Text.read(scene.folder).fed() for at in range(len(sequence))])
    wrong = scene.wrong_rows(row, row.wrong_ranks[0])
    at_start = bool(wrong[positions == 0].any())
    if scene.spec.qk_norm and at_start:
        return f"model.layers.{row.layer}.self_attn.{letter}_norm: its weight, or the norm of heads itself"
    but = "even at position 0" if at_start else "position 0, which is not turned, is right"
    return f"rotary embedding of {letter} in layer {row.layer} on {_ranks(row.wrong_ranks)} ({but})"


def _attention(row: Row, scene: Scene) -> str:
    where = f"attention of layer {row.layer} on {_ranks(row.wrong_ranks)}"
    text = Text.read(scene.folder)
    positions = torch.tensor([at for sequence in text.fed() for at in range(len(sequence))])
    prompts = zip(text.prompts, text.fed(), strict=True)
    decoding = torch.tensor([at >= len(prompt) for prompt, sequence in prompts for at in range(len(sequence))])
    wrong = scene.wrong_rows(row, row.wrong_ranks[0])
    window = scene.spec.windows[row.layer or 0]
    if window is not None and not bool(wrong[positions < window].any()):
        return f"{where}: the sliding window of {window} tokens (only later tokens are wrong)"
    if bool(decoding.any()) and not bool(wrong[~decoding].any()):
        return f"{where}: reading KV pages back (prompts are right, the tokens generated after them are not)"
    if not bool(wrong[positions == 0].any()):
        return (
            f"{where}: scale, softcap, mask or the order of KV pages (a first token, which sees itself only, is right)"
        )
    return f"{where}: which KV head a query head reads, or the values in the KV pages"


def _row_parallel(row: Row, scene: Scene) -> str:
    module = "self_attn.o_proj" if row.tensor == "o_proj" else "mlp.down_proj"
    name = f"model.layers.{row.layer}.{module}"
    if all(_is_constant(scene.error(row, rank)[0]) for rank in row.wrong_ranks):
        return f"{name}.bias (the error is the same for every token: lost, or added by more than one rank)"
    if scene.size == 1:
        return f"{name}.weight"
    wrong = wrong_shares(scene.files(row), row.tensor, f"{name}.weight", scene.model)
    if wrong is None:
        return f"{name}.weight, or its sum over ranks (all-reduce)"
    return (
        f"{name}.weight: the columns of {_ranks(wrong)}" if wrong else f"the sum over ranks (all-reduce) after {name}"
    )


def _gate_up(row: Row, scene: Scene) -> str:
    prefix = f"model.layers.{row.layer}.mlp"
    of = f"the rows of {_ranks(row.wrong_ranks)}"
    if scene.spec.mlp_bias:  # a bias spoils the symmetry that tells the two apart
        return f"{prefix}.gate_proj or {prefix}.up_proj: {of}, or the activation"
    right = [gate_is_right(scene.files(row), rank, scene.spec, scene.size) for rank in row.wrong_ranks]
    if all(right):
        return f"{prefix}.up_proj.weight: {of}"
    return f"{prefix}.gate_proj.weight: {of}, or the activation ({scene.spec.activation})"


def _vocabulary(row: Row, scene: Scene) -> str:
    table = "model.embed_tokens.weight"
    if row.tensor == "embedding":
        tokens = [token for sequence in Text.read(scene.folder).fed() for token in sequence]
        wrong = scene.wrong_rows(row, 0).tolist()
        local = shard_vocab(scene.spec.vocab_size, 0, scene.size)[1]
        owners = sorted({token // local for token, bad in zip(tokens, wrong, strict=True) if bad})
        return f"{table}: the rows of {_ranks(tuple(owners))}, or the sum over ranks after it"
    head = f"{table} (tied head)" if scene.spec.tie_word_embeddings else "lm_head.weight"
    text = f"{head}: the rows of {_ranks(row.wrong_ranks)}"
    for rank in row.wrong_ranks:
        other = _other_shard(row, scene, rank)
        if other is not None:
            return f"{text} (rank {rank} holds the shard of rank {other})"
    return text


def _other_shard(row: Row, scene: Scene, rank: int) -> int | None:
    """The rank whose logits this one has in place of its own."""
    files = scene.files(row)
    truth, ours = files.truth(row.name), files.ours(rank, row.name).double()
    for other in range(scene.size):
        part = part_of(row.tensor, scene.spec, other, scene.size)
        theirs = truth[:, part.start : part.stop]
        if other != rank and part.width:
            distance = (ours[:, : part.width] - theirs).norm()
            if distance < _SAME_HEAD * theirs.norm():
                return other
    return None


def _is_constant(error: Tensor) -> bool:
    """Whether an error is the same for every token, as a bias's is and a weight's is not."""
    if len(error) < 2 or not bool(torch.isfinite(error).all()):
        return False
    mean = error.mean(0)
    return bool((error - mean).square().mean().sqrt() < 0.1 * mean.square().mean().sqrt())


def _different_ranks(row: Row, scene: Scene) -> tuple[int, ...]:
    files = scene.files(row)
    first = files.ours(0, row.name)
    return tuple(rank for rank in range(1, scene.size) if not torch.equal(first, files.ours(rank, row.name)))


def _where(row: Row) -> str:
    return row.tensor if row.layer is None else f"layer {row.layer}, {row.tensor}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
