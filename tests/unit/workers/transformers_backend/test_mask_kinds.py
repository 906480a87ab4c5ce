"""Kinds of masks, judged by their values: causal, with a window of any length, or another one."""

import pytest
import torch
from transformers import masking_utils

from oarlock.workers.transformers_backend.mask_kinds import MaskFunction, MaskKind, mask_kind


def test_a_causal_mask() -> None:
    assert mask_kind(masking_utils.causal_mask_function) == MaskKind()


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 4096, 131_072])
def test_a_window_of_any_length(window: int) -> None:
    assert mask_kind(masking_utils.sliding_window_causal_mask_function(window)) == MaskKind(window)


@pytest.mark.parametrize("chunk", [2, 8, 64, 8192, 131_072])
def test_chunks_are_no_window(chunk: int) -> None:
    left_padding = torch.zeros(1, dtype=torch.int64)
    kind = mask_kind(masking_utils.chunked_causal_mask_function(chunk, left_padding))
    assert kind.other == "hides earlier tokens in a way that no backend knows"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda batch, head, query, key: key <= query + 1, "lets tokens see later ones"),
        (lambda batch, head, query, key: key >= 0, "lets tokens see later ones"),
        (lambda batch, head, query, key: (key <= query) & (key != 3), "hides earlier tokens"),
        (lambda batch, head, query, key: (key <= query) & (query - key < 9) & (query != 70), None),
        (lambda batch, head, query, key: key.to("meta") <= query.to("meta"), "cannot be computed"),
    ],
)
def test_other_masks(function: MaskFunction, reason: str | None) -> None:
    kind = mask_kind(function)
    if reason is None:
        assert kind == MaskKind(9), "a position that is not looked at"
    else:
        assert kind.other is not None and kind.other.startswith(reason)
