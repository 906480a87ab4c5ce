"""Buffers that no checkpoint stores are computed as transformers does, or refused."""

import pytest
import torch
from torch import nn
from transformers import FalconH1Config, FalconH1ForCausalLM

from oarlock.base.errors import StartupError
from oarlock.workers.transformers_backend.building import compute_buffers, without_weights

CONFIG = FalconH1Config(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_state=8, ssm_multipliers=[0.7, 1.3, 0.6, 1.7, 0.8],
)  # fmt: skip


def test_a_module_may_fill_the_buffers_of_modules_inside_of_it() -> None:
    model = without_weights(FalconH1ForCausalLM, CONFIG, "eager", torch.float32)
    compute_buffers(model, torch.device("cpu"))
    whole = FalconH1ForCausalLM(CONFIG)
    for name in ("model.layers.1.mamba.mup_vector", "model.rotary_emb.inv_freq"):
        assert torch.equal(model.get_buffer(name), whole.get_buffer(name))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_buffer_that_the_class_does_not_compute_is_refused() -> None:
    model = without_weights(FalconH1ForCausalLM, CONFIG, "eager", torch.float32)
    inner = nn.Module()
    inner.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    model.model.inner = inner
    with pytest.raises(StartupError, match=r"model\.inner\.table"):
        compute_buffers(model, torch.device("cpu"))
