"""Vectors that a request asks for in place of generated tokens: checked by the engine before it is queued."""

from dataclasses import dataclass

# Hidden states are those of the model's last layer, after the final norm. In the order of `oarlock.workers.protocol`.
KINDS = (
    "last",  # of the last token
    "mean",  # the mean over all tokens
    "cls",  # of the first token
    "token",  # of every token
    "logits",  # no hidden states, but the logits of `token_ids` after the last token, before any softmax
    "labels",  # no hidden states, but the output of an encoder's classification head, before any final function
)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Vectors or logits to return for one sequence: float32, not normalised."""

    kind: str  # one of KINDS
    token_ids: tuple[int, ...] = ()  # only with "logits": the ids whose logits are returned, in this order
    second_text: int = 0  # of an encoder: where the second of two texts begins in the prompt; 0: there is one
