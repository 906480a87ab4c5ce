"""Forms of attention beyond the usual one, in captured steps on made-up CUDA devices, against the host's tokens."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.golden.tiny_models import make_tiny
from tests.parallel import made_up_cuda
from tests.parallel.made_up_cuda import MadeUpCuda
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_made_up_cuda import DeviceRunner, config_of, requests_of, run
from tests.parallel.test_pipeline_depth import answers

cuda = made_up_cuda.cuda  # the fixture
# Few layers, since kernels are interpreted. Queries cross chunks, windows and periods within 20 tokens.
FORMS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 2, "num_key_value_heads": 4},
    "afmoe": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "hunyuan_v1_dense": {"num_hidden_layers": 1},
    "llama4_text": {"num_hidden_layers": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 5},
    "ministral3": {"num_hidden_layers": 1},
}


ALIKE = ("hunyuan_v1_dense", "ministral3")  # Llama 4 norms heads after the rotation and scales queries as well


@pytest.mark.soak
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.every) if name in ALIKE else name for name in FORMS]
)
def test_captured_steps_match_the_host(family: str, tmp_path: Path, cuda: MadeUpCuda) -> None:
    """Latent attention, a gate, norms after the rotation, chunks, scaled queries, experts with weighted inputs."""
    path = make_tiny(tmp_path, family, **{"num_attention_heads": 4, "num_key_value_heads": 2, **FORMS[family]})
    config, requests = config_of(path), requests_of(({"temperature": 0.0},), 2, 12)
    executor = ThreadExecutor(config, DeviceRunner)
    got, _ = answers(executor, requests, 2, 20)
    executor.close()
    assert sum(graph.num_replays > 0 for graph in cuda.graphs) > 1
    judge = run(ThreadExecutor(config.with_(device="cpu", attention_backend="reference")), requests, 1)
    assert [got[number].token_ids for number in judge] == [answer.token_ids for answer in judge.values()]
