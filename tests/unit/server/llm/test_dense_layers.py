"""Dense modules beside torch's layers in float64: every activation and type of weights; damaged files by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from oarlock.base.errors import StartupError
from oarlock.server.llm.pooler_config import ACTIVATIONS, DenseConfig, DenseLayers

IN, OUT = 48, 40


@pytest.fixture
def module(tmp_path):
    """`module("Tanh", …)`: a folder as sentence-transformers writes it, and torch's own layer in float64."""

    def make(activation="Tanh", dtype=torch.float32, sizes=(IN, OUT), bias=True, name="2_Dense"):
        torch.manual_seed(len(activation))
        layer = torch.nn.Linear(*sizes, bias=bias).to(dtype)
        function = getattr(torch.nn, activation)()
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        kind = type(function)
        described = {"in_features": sizes[0], "out_features": sizes[1], "bias": bias}
        described["activation_function"] = f"{kind.__module__}.{kind.__qualname__}"
        (folder / "config.json").write_text(json.dumps(described))
        save_file({f"linear.{key}": value for key, value in layer.state_dict().items()}, folder / "model.safetensors")
        return folder, torch.nn.Sequential(layer.double(), function)

    return make


def vectors(count=5):
    return np.random.default_rng(7).normal(size=(count, IN)).astype(np.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_vectors_match_torch(module, activation, dtype):
    folder, layer = module(activation, dtype)
    given = vectors()
    found = DenseLayers([DenseConfig.load(folder, IN)])(given)
    wanted = layer(torch.from_numpy(given).double()).detach().numpy()
    assert found.dtype == np.float64 and found.shape == (5, OUT)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


def test_modules_follow_each_other_and_a_vector_has_the_same_bits_in_any_company(module):
    first, first_layer = module("Identity", bias=False)
    second, second_layer = module("ReLU", sizes=(OUT, IN), name="3_Dense")
    configs = [DenseConfig.load(first, IN), DenseConfig.load(second, OUT)]
    layers, given = DenseLayers(configs), vectors()
    found = layers(given)
    wanted = second_layer(first_layer(torch.from_numpy(given).double())).detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
    assert [layers(row[None])[0].tobytes() for row in given] == [row.tobytes() for row in found]


def test_damaged_weights_are_named(module):
    folder, _ = module()
    config, file = DenseConfig.load(folder, IN), folder / "model.safetensors"
    good = {"linear.weight": torch.ones(OUT, IN), "linear.bias": torch.ones(OUT)}
    for tensors, named in (
        ({"linear.weight": good["linear.weight"]}, "contains linear.weight, not linear.weight and linear.bias"),
        (good | {"other": torch.ones(1)}, "other"),
        (good | {"linear.bias": torch.ones(3)}, r"linear.bias in .* is F32 \[3\], not of a float type and \[40\]"),
        (good | {"linear.bias": torch.ones(OUT, dtype=torch.int8)}, "linear.bias"),
        (good | {"linear.bias": torch.full((OUT,), float("nan"))}, "NaN"),
    ):
        save_file(tensors, file)
        with pytest.raises(StartupError, match=named):
            DenseLayers([config])
    size = 2**31
    header = json.dumps({"linear.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as large:  # takes no room on the disk
        large.write(len(header).to_bytes(8, "little") + header)
        large.truncate(8 + len(header) + size)
    with pytest.raises(StartupError, match=r"at most \d+ are read for a Dense module"):
        DenseLayers([config])
    file.write_bytes(b"no tensors")
    with pytest.raises(StartupError, match="header"):
        DenseLayers([config])
    file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(StartupError, match="is missing") as caught:
        DenseLayers([config])
    assert "convert them to safetensors" in caught.value.fix
