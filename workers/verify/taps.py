"""Listens to a loaded decoder while it runs: every layer's tensors, copied, with no change to the code that serves.

    tapped = TappedDecoder(decoder)                   # from now on in the decoder's place, until `tapped.close()`
    hidden = tapped(batch, pages, backend, plan)      # as decoder(...); any backend, which is listened to as well
    logits = tapped.compute_logits(hidden)
    tapped.last["2.k_rope"]                           # [T, K, D] of layer 2, this rank's heads, T as in the step

`tapped.last` holds the tensors of the newest step, `tapped.steps` those of all. T tokens, in the order of
the batch; H query heads and K key-value heads of this rank; dtypes as the layers made them.

    embedding            [T, hidden]     what the first layer gets: summed over ranks, scaled where a family scales it
    {i}.input_norm       [T, hidden]     what goes into the projections
    {i}.q {i}.k {i}.v    [T, H or K, D]  after the projection, bias included
    {i}.q_rope {i}.k_rope                after head norm (Qwen3, Gemma 3) and rotation: as attended, as written to pages
    {i}.attention        [T, H, D]       what goes into o_proj
    {i}.o_proj           [T, hidden]     summed over ranks, before any norm and before the residual is added
    {i}.mid_residual     [T, hidden]     after the attention half-block
    {i}.mlp_norm         [T, hidden]     what goes into the MLP
    {i}.gate_up          [T, I]          activation(gate) * up, this rank's part of the intermediate size
    {i}.mlp              [T, hidden]     down_proj, as o_proj
    {i}.residual         [T, hidden]     after the layer
    final_norm           [T, hidden]
    logits               [L, V]          this rank's shard of the vocabulary; only after `compute_logits`

Every rank of a group must be tapped or none. Knows the decoder's parts by their names and calls; judges nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workers.attention.backend import AttentionBackend, AttentionSpec, LayerKV
from workers.attention.forward_batch import ForwardBatch
from workers.models.decoder import Decoder

Record = Callable[[str, Tensor], None]


class TappedDecoder:
    """A decoder that remembers what it computed. Attributes it does not have are the decoder's own."""

    def __init__(self, decoder: Decoder, *, probe: bool = False) -> None:
        """`probe`: keep also what only a search for causes needs, and compute it where serving does not.

        {i}.o_proj_partial {i}.mlp_partial   [T, hidden]   this rank's share, before the sum
        {i}.gate_up_mirrored                 [T, I]        gate_up of the negated input
        """
        self.decoder = decoder
        self._probe = probe
        self.steps: list[dict[str, Tensor]] = []
        self._undo: list[Callable[[], None]] = []
        self._summing: str | None = None  # what the next sum over ranks is the result of
        self._install()

    @property
    def last(self) -> dict[str, Tensor]:
        """The tensors of the newest step, by name."""
        return self.steps[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def __call__(self, batch: ForwardBatch, kv: list[LayerKV], backend: AttentionBackend, plan: Any) -> Tensor:
        self.steps.append({})
        listening = _TappedBackend(backend, self._record)
        return self.decoder(batch, kv, listening, plan)  # ty: ignore[invalid-argument-type]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As the decoder's."""
        logits = self.decoder.compute_logits(hidden)
        so_far = self.last.get("logits", logits[:0])  # a step with many rows asks in several calls
        self._record("logits", torch.cat((so_far, logits)))
        return logits

    def close(self) -> None:
        """Take every tap out again; what was recorded stays."""
        while self._undo:
            self._undo.pop()()

    # -- recording

    def _record(self, name: str, value: Tensor) -> None:
        if self.steps:  # a sum made outside a step, such as another test's, is nobody's
            self.last[name] = value.detach().clone()

    # -- taps

    def _install(self) -> None:
        decoder = self.decoder
        self._tap(decoder, "norm", after=lambda y: self._record("final_norm", y))
        for layer in range(len(decoder.blocks)):
            self._install_layer(layer)
        # An instance attribute in front of the method: the group itself, and whoever holds it, stay what they are.
        tp = decoder.place.tp
        before = vars(tp).get("all_reduce")
        self._undo.append(lambda: delattr(tp, "all_reduce") if before is None else setattr(tp, "all_reduce", before))
        tp.all_reduce = self._listen_to_sums(tp.all_reduce)  # ty: ignore[invalid-assignment]

    def _install_layer(self, layer: int) -> None:
        block = self.decoder.blocks[layer]
        attention, mlp = block.attention, block.mlp

        def record(name: str, whole: bool = False) -> Callable[[Tensor], None]:
            return lambda value: self._record(name if whole else f"{layer}.{name}", value)

        def record_qkv(qkv: Tensor) -> None:
            heads, kv_heads = attention.spec.num_heads, attention.spec.num_kv_heads
            parts = qkv.view(qkv.shape[0], -1, attention.spec.head_dim).split((heads, kv_heads, kv_heads), 1)
            for name, part in zip("qkv", parts, strict=True):
                self._record(f"{layer}.{name}", part)

        self._tap(block, "attention_norm", after=record("input_norm"))
        self._tap(attention, "qkv", after=record_qkv)
        self._tap_row_parallel(attention, "output", f"{layer}.o_proj")
        self._tap(block, "mlp_norm", before=record("mid_residual"), after=record("mlp_norm"))
        self._tap_row_parallel(mlp, "down", f"{layer}.mlp", inputs=f"{layer}.gate_up")
        if self._probe:
            gate_up = mlp.gate_up
            self._tap(mlp, "gate_up", before=lambda x: self._record(f"{layer}.gate_up_mirrored", gate_up(-x)))
        self._undo.append(lambda: self.decoder.blocks.__setitem__(layer, block))
        before = record("embedding", whole=True) if layer == 0 else None
        self.decoder.blocks[layer] = _Tap(block, before, record("residual"))  # ty: ignore[invalid-assignment]

    def _tap(self, owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        original = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, original))
        setattr(owner, name, _Tap(original, before, after))

    def _tap_row_parallel(self, owner: Any, name: str, output: str, inputs: str | None = None) -> None:
        """The sum over ranks is caught inside the layer, because the layer adds the residual before it returns."""
        layer = getattr(owner, name)

        def before(x: Tensor) -> None:
            if inputs is not None:
                self._record(inputs, x)
            if self.decoder.place.tp.size == 1:  # the residual may be added inside the product: ask for it without
                self._record(output, layer.product(x))
            else:
                self._summing = output

        self._tap(owner, name, before=before)

    def _listen_to_sums(self, all_reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def listening(x: Tensor) -> Tensor:
            if self._probe and self._summing is not None:
                self._record(f"{self._summing}_partial", x)
            total = all_reduce(x)
            if self._summing is not None:
                self._record(self._summing, total)
                self._summing = None
            return total

        return listening


class _Tap:
    """Something callable, with an ear before its first argument and one behind its result."""

    def __init__(self, inner: Any, before: Callable[[Tensor], None] | None, after: Callable[[Tensor], None] | None):
        self._inner = inner
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, x: Tensor, *others: Any, **named: Any) -> Any:
        if self._before is not None:
            self._before(x)
        result = self._inner(x, *others, **named)
        if self._after is not None:
            self._after(result)
        return result


class _TappedBackend:
    """An attention backend that tells what it is given and what it answers."""

    def __init__(self, inner: AttentionBackend, record: Record) -> None:
        self._inner = inner
        self._record = record
        self._written: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, kv: LayerKV, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        self._written = k  # which layer this is the backend hears in the call that follows
        self._inner.write(kv, k, v, batch)

    def attend(self, q: Tensor, kv: LayerKV, plan: Any, layer: AttentionSpec) -> Tensor:
        assert self._written is not None, "attend without write"
        self._record(f"{layer.layer}.k_rope", self._written)
        self._record(f"{layer.layer}.q_rope", q)
        mixed = self._inner.attend(q, kv, plan, layer)
        self._record(f"{layer.layer}.attention", mixed.view(mixed.shape[0], layer.num_heads, layer.head_dim))
        return mixed
