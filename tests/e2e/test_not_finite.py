"""Not finite: in a checkpoint such numbers end the start by the tensor's name, in the logits they end one request."""

import math
import shutil
import subprocess

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.running import DEMO, ROOT, RunningServer, command, environment, free_port

POISONED = 300  # a token id whose embedding is made NaN


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo model with one NaN row in its embedding, and a head of its own, which is whole."""
    path = shutil.copytree(DEMO, tmp_path_factory.mktemp("spoilt") / "model")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISONED] = math.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return path


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_start_fails_with_the_tensors_name(model, ranks):
    result = subprocess.run(
        command("serve", model, "-tp", ranks, "--port", free_port()),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    output = result.stdout + result.stderr
    causes = [line for line in output.splitlines() if line.startswith("error: ")]
    assert result.returncode == 3 and "Traceback" not in output, output
    assert len(causes) == 1 and "'model.embed_tokens.weight' holds NaN at [300, 0]" in causes[0]
    assert [line for line in output.splitlines() if line.startswith("fix: ")]


def test_logits_that_are_not_finite_end_one_request_and_are_counted(model):
    with RunningServer(model, "--no-check-weights") as server:
        before = server.text([5, 6, 7, 8], max_tokens=6, temperature=0)
        narrowed = [
            {},
            {"logit_bias": {"5": 1}},
            {"allowed_token_ids": [5, 6]},
            {"structured_outputs": {"regex": "a+"}},
        ]
        for more in narrowed:
            body = {"prompt": [5, POISONED, 7], "max_tokens": 6, **more}
            answer = server.client.post("/v1/completions", json=body)
            assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"], answer.text
        assert server.text([5, 6, 7, 8], max_tokens=6, temperature=0) == before
        assert server.metrics()["oarlock:nonfinite_logits_total"] == len(narrowed)
