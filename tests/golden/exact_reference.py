"""transformers' own model as the judge: in float32 as it is used, and in float64 with nothing left in float32.

transformers computes norms in float32 even for a float64 model; its distance from itself would then hide the error
that both share. Here the norms are replaced, and attention runs through SDPA, which stays in float64. Only cos and sin
keep float32: they are part of what the model means.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


def judge(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _exact_norm(module)  # ty: ignore[invalid-assignment]
    return model


def _exact_norm(module: torch.nn.Module):
    weight, eps = module.weight, module.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    return forward


def all_logits(model: PreTrainedModel, tokens: list[int], prompt: int) -> Tensor:
    """Logits after each token [n, vocab]: the first `prompt` tokens in one call, the others one by one with a cache."""
    with torch.inference_mode():
        out = model(torch.tensor([tokens[:prompt]]), use_cache=True)
        rows = [out.logits[0]]
        for token in tokens[prompt:]:
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0])
    return torch.cat(rows)


def generate(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens, whatever they are."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()
