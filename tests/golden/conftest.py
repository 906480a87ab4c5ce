"""Tiny models and their reference results, made once for all golden tests.

torch and transformers are imported by the fixture: every run of tests reads this file, whatever it selects.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.golden.exact_reference import ExactReference


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ExactReference]:
    """`reference_of(case name)`, or with a dtype other than float32: the checkpoint is `reference.path`."""
    import torch

    from tests.golden.cases import CASES, TOTAL
    from tests.golden.exact_reference import ExactReference
    from tests.golden.tiny_models import make_tiny
    from tests.golden.tiny_wrappers import flatten_config, rename_stored, store_inputs_first

    tokens = random.Random(3).choices(range(300), k=TOTAL)

    @cache
    def path_of(name: str):
        case = CASES[name]
        folder = tmp_path_factory.mktemp("golden")
        path = make_tiny(
            folder, case.family, seed=7, dtype=case.files, max_shard_size=case.max_shard_size, **case.special
        )
        if case.renamed:
            rename_stored(path, case.renamed)
        if case.inputs_first:
            store_inputs_first(path)
        if case.flat:
            flatten_config(path)
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | case.claims))
        return path

    @cache
    def reference(name: str, dtype: torch.dtype = torch.float32) -> ExactReference:
        return ExactReference(path_of(name), tokens, dtype, CASES[name].max_model_len)

    return reference
