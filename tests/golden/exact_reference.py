"""transformers' own model as the reference: in the dtype it is used in, and in float64 with nothing left in 32 bits.

transformers computes norms in float32 even for a float64 model; its distance from itself would then hide the error
that both share. Here one model answers both ways: as it was loaded, and with every leaf and the attention in float64.
Only cos and sin keep float32: they are part of what the model means, as is Gemma's scale of the embedding, which it
rounds to the dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oarlock.workers.layers.memory_spec import SlotsSpec
from oarlock.workers.models.registry import read_spec
from oarlock.workers.verify.exact_modules import in_float64
from oarlock.workers.verify.reference import TransformersRecorder, model_class, text_part
from tests.golden.cases import PROMPT

GREEDY = 5
_WITHOUT_SDPA = (
    "GPTJForCausalLM", "GPTNeoForCausalLM", "Gemma2ForCausalLM", "GotOcr2ForConditionalGeneration",
    "Mamba2ForCausalLM", "VaultGemmaForCausalLM",
)  # fmt: skip

Result = TypeVar("Result")


class ExactReference:
    """One checkpoint in one dtype: transformers' results, and those of float64, which count as exact."""

    def __init__(
        self, path: Path, tokens: list[int], dtype: torch.dtype = torch.float32, max_model_len: int | None = None
    ) -> None:
        self.path = path
        self.max_model_len = max_model_len
        self.spec = read_spec(str(path), max_model_len)
        self.tokens = tokens
        self.dtype = dtype

    @cached_property
    def model(self) -> PreTrainedModel:
        has_sinks = any(attention.sinks for attention in self.spec.attentions)
        has_sdpa = not has_sinks and not {self.spec.architecture, self.spec.wrapper} & {*_WITHOUT_SDPA}
        kind = "sdpa" if has_sdpa else "eager"
        model = model_class(self.spec).from_pretrained(self.path, dtype=self.dtype, attn_implementation=kind)
        model = text_part(model, self.spec).eval()
        embedding = model.get_input_embeddings()
        if hasattr(embedding, "scalar_embed_scale"):
            embedding.scalar_embed_scale = embedding.embed_scale.to(self.dtype).item()
        return model

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor]:
        """(truth, theirs), after each token [n, vocab]: the prompt in one call, the others one by one with a cache.

        A model with recurrent states gets all in one call: Bamba computes something else with a cache.
        """
        return self._both(lambda recording: self._all_logits())

    @cached_property
    def layers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(truth, theirs): every tensor of every layer for the prompt, as [T, columns]."""
        return self._both(self._record)

    @cached_property
    def text(self) -> list[list[int]]:
        """Greedy tokens after each of `prompts`."""
        complete = generate_without_cache if self.is_recurrent else generate
        return [complete(self.model, prompt, GREEDY) for prompt in self.prompts.values()]

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have recurrent states."""
        return any(isinstance(group.memory, SlotsSpec) for group in self.spec.groups)

    @property
    def prompts(self) -> dict[int, list[int]]:
        """Sequence -> prompt, of very different lengths. A model served beyond the length its LongRoPE was trained for
        uses the long factors for all sequences; transformers uses them for sequences that are themselves longer."""
        prompts = {0: self.tokens[:PROMPT], 1: self.tokens[3:20], 2: self.tokens[20:22]}
        ropes = [layer.attention.rope for layer in self.spec.layers if layer.attention is not None]
        beyond = max((rope.original_max_positions for rope in ropes if rope is not None and rope.stretched), default=0)
        return {seq: prompt for seq, prompt in prompts.items() if len(prompt) > beyond}

    def _both(self, ask: Callable[[TransformersRecorder], Result]) -> tuple[Result, Result]:
        with torch.inference_mode():
            with self._recording() as recording:
                theirs = ask(recording)
            with in_float64(self.model, self.spec.names), self._recording() as recording:
                truth = ask(recording)
        return truth, theirs

    @contextmanager
    def _recording(self) -> Iterator[TransformersRecorder]:
        recording = TransformersRecorder(self.model, self.spec, torch.float64)
        try:
            yield recording
        finally:
            recording.close()

    def _record(self, recording: TransformersRecorder) -> dict[str, Tensor]:
        answer = self.model(torch.tensor([self.tokens[:PROMPT]]), use_cache=False)
        recording.record("logits", answer.logits)
        return recording.tensors()

    def _all_logits(self) -> Tensor:
        if self.is_recurrent:
            return self.model(torch.tensor([self.tokens]), use_cache=False).logits[0].double()
        out = self.model(torch.tensor([self.tokens[:PROMPT]]), use_cache=True)
        rows = [out.logits[0]]
        for token in self.tokens[PROMPT:]:
            out = self.model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0])
        return torch.cat(rows).double()


def generate(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens, whatever they are."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def generate_without_cache(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens, each after a call with all tokens before it."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
