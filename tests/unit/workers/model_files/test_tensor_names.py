"""Tables of names: every stored tensor is found under the name that its layer uses, in the layout that it reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.model_files.tensor_names import NO_NAMES, Blocks, TensorNames
from oarlock.workers.weights.reader import CHUNK_BYTES, WeightReader

NAMES = TensorNames(
    prefixes={"transformer.": "", "vision.text.": ""},
    modules={
        "wte": "model.embed_tokens",
        "h.*": "model.layers.*",
        "h.*.attn.qkv": "model.layers.*.self_attn.qkv_proj",
        "h.*.moe.*.w1": "model.layers.*.mlp.experts.*.gate_proj",
        "h.*.attn.out.weight": "model.layers.*.self_attn.o_proj.weight",
    },
    transposed=("model.layers.*.self_attn.o_proj",),
    ignored=("h.*.attn.mask", "vision.tower", "h.7"),
)


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("wte.weight", "model.embed_tokens.weight"),
        ("transformer.wte.weight", "model.embed_tokens.weight"),
        ("vision.text.h.12.attn.qkv.bias", "model.layers.12.self_attn.qkv_proj.bias"),
        ("h.3.moe.11.w1.weight", "model.layers.3.mlp.experts.11.gate_proj.weight"),
        ("h.3.norm.weight", "model.layers.3.norm.weight"),  # by the shorter entry
        ("h.3.attn.out.weight", "model.layers.3.self_attn.o_proj.weight"),
        ("h.3.attn.out.bias", "model.layers.3.attn.out.bias"),
        ("h.attn.qkv", "h.attn.qkv"),  # a star is a number
        ("other.weight", "other.weight"),
        ("h.3.attn.mask", None),
        ("vision.tower.blocks.0.weight", None),
        ("vision.tower_of_text", "vision.tower_of_text"),  # an entry ends at a dot
        ("h.7.norm.weight", None),
        ("h.70.norm.weight", "model.layers.70.norm.weight"),
    ],
)
def test_the_longest_entry_names_a_tensor(stored: str, ours: str | None) -> None:
    assert NAMES.rename(stored) == ours
    assert NO_NAMES.rename(stored) == stored


HEADS, WIDTH, HIDDEN = 6, 4, 10


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [HIDDEN, CHUNK_BYTES // 16], ids=["small", "several-pieces"])
def test_parts_of_a_matrix_are_read_by_their_own_names(
    tmp_path: Path, hidden: int, dtype: torch.dtype, transposed: bool
) -> None:
    """Query heads share a key head in pairs: each group holds two heads of q, then k, then v."""
    groups, rows = HEADS // 2, (2 * WIDTH, WIDTH, WIDTH)
    names = TensorNames(
        modules={"h.*.qkv": "model.layers.*.self_attn.qkv"},
        transposed=("model.layers.*.self_attn.qkv",) if transposed else (),
        blocks={"model.layers.*.self_attn.qkv": Blocks(("q_proj", "k_proj", "v_proj"), rows, groups)},
    )
    whole, bias = torch.randn(groups, sum(rows), hidden).to(dtype), torch.randn(groups, sum(rows)).to(dtype)
    stored = whole.flatten(0, 1).T.contiguous() if transposed else whole.flatten(0, 1)
    save_file({"h.5.qkv.weight": stored, "h.5.qkv.bias": bias.flatten()}, tmp_path / SINGLE_FILE)
    with WeightReader(Checkpoint.open(tmp_path, names)) as weights:
        for part, exact, of_bias in zip("qkv", whole.split(rows, 1), bias.split(rows, 1), strict=True):
            exact, of_bias = exact.flatten(0, 1), of_bias.flatten()
            name = f"model.layers.5.self_attn.{part}_proj"
            for dim, start, length in ((0, 0, len(exact)), (0, 3, 5), (0, WIDTH, WIDTH), (1, 2, 5)):
                shape = list(exact.shape)
                shape[dim] = length
                into = torch.empty(shape)
                weights.take(f"{name}.weight", into, shape=exact.shape, dim=dim, start=start)
                assert torch.equal(into, exact.narrow(dim, start, length).float())
            into = torch.empty(5)
            weights.take(f"{name}.bias", into, shape=of_bias.shape, start=3)
            assert torch.equal(into, of_bias[3:8].float())
        weights.finish(lambda name: False)


def test_a_matrix_without_whole_groups_is_refused(tmp_path: Path) -> None:
    names = TensorNames(blocks={"qkv": Blocks(("q", "k"), (2, 2), 3)})
    save_file({"qkv.weight": torch.zeros(8, 4)}, tmp_path / SINGLE_FILE)
    with pytest.raises(StartupError, match=r"'qkv.weight' has shape \[8, 4\], but .* 3 groups of 4 rows"):
        Checkpoint.open(tmp_path, names)


def test_only_matrices_in_floating_point_are_transposed(tmp_path: Path) -> None:
    """Tools that quantise store them as those of other families."""
    inside = "h.1.attn.out.weight"
    stored = {inside: torch.zeros(3, 5), "h.2.attn.out.weight": torch.zeros(4, 6, dtype=torch.int8)}
    save_file(stored, tmp_path / SINGLE_FILE)
    tensors = Checkpoint.open(tmp_path, NAMES).tensors
    found = {name: located.entry.shape for name, located in tensors.items()}
    assert found == {f"model.layers.{n}.self_attn.o_proj.weight": shape for n, shape in ((1, (5, 3)), (2, (4, 6)))}


@pytest.mark.parametrize("kind", ["qweight", "weight"])
def test_a_quantised_matrix_that_cannot_be_split_is_refused(tmp_path: Path, kind: str) -> None:
    names = TensorNames(blocks={"qkv": Blocks(("q", "k"), (2, 2), 3)})
    save_file({f"qkv.{kind}": torch.zeros(24, 1, dtype=torch.uint8)}, tmp_path / SINGLE_FILE)
    with pytest.raises(StartupError, match=rf"'qkv.{kind}' is of a quantised matrix .* q, k in turn"):
        Checkpoint.open(tmp_path, names)


@pytest.mark.parametrize("shape", [(), (1,), (12, 1), (6, 3)], ids=str)
def test_scales_are_split_with_their_matrix(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """One for all, one for each output, or one for each block of two outputs and some inputs."""
    names = TensorNames(blocks={"a.qkv": Blocks(("q", "k"), (4, 2), 2)})
    scales = torch.rand(shape)
    save_file({"a.qkv.weight_scale": scales}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint.open(tmp_path, names)
    rows = scales.expand(12) if len(shape) < 2 else scales[:, 0].repeat_interleave(12 // shape[0])
    exact = dict(zip("qk", rows.view(2, 6).split([4, 2], 1), strict=True))
    with WeightReader(checkpoint) as weights:
        for part, wanted in exact.items():
            found = checkpoint.tensors[f"a.{part}.weight_scale"].entry.shape or (1,)
            into = torch.empty(found)
            weights.take(f"a.{part}.weight_scale", into, shape=found)
            each = into.view(-1, shape[-1])[:, 0] if len(shape) == 2 else into.view(1)
            assert torch.equal(each.repeat_interleave(wanted.numel() // len(each)), wanted.flatten())


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    names = TensorNames(prefixes={"transformer.": ""})
    save_file({"transformer.a.weight": torch.zeros(2), "a.weight": torch.zeros(2)}, tmp_path / SINGLE_FILE)
    with pytest.raises(StartupError, match=r"'a.weight' is stored twice, the second time as 'transformer.a.weight'"):
        Checkpoint.open(tmp_path, names)


def test_a_quantised_module_keeps_its_stored_name_for_the_settings(tmp_path: Path) -> None:
    words = torch.zeros(2, 2, dtype=torch.int32)
    save_file({"h.2.attn.qkv.weight": torch.zeros(2, 2), "h.3.attn.qkv.qweight": words}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint.open(tmp_path, NAMES)
    assert checkpoint.stored_module("model.layers.2.self_attn.qkv_proj") == "h.2.attn.qkv"
    assert checkpoint.stored_module("model.layers.3.self_attn.qkv_proj") == "h.3.attn.qkv"
    assert checkpoint.stored_module("model.layers.2.mlp.up_proj") == "model.layers.2.mlp.up_proj"


PREFIXED = TensorNames(prefixes={"model.language_model.": "model."}, ignored=("model.visual",))


def stored(module: str, *kinds: str) -> dict[str, torch.Tensor]:
    return {f"model.language_model.{module}.{kind}": torch.zeros(2, 2, 4) for kind in kinds}


def test_modules_without_a_weight_of_their_own_keep_their_stored_names_too(tmp_path: Path) -> None:
    """GPTQ's tensors have other kinds, and experts may be parts of one tensor."""
    tensors = stored("layers.0.mlp.up_proj", "qweight", "scales") | stored("layers.0.mlp.gate", "weight")
    tensors |= {"model.language_model.layers.0.mlp.experts.down_proj": torch.zeros(2, 3, 4)}
    save_file(tensors | {"lm_head.weight": torch.zeros(2, 2)}, tmp_path / SINGLE_FILE)
    checkpoint = Checkpoint.open(tmp_path, PREFIXED)
    for module in ("layers.0.mlp.up_proj", "layers.0.mlp.experts.1.down_proj", "layers.0.self_attn.q_proj"):
        assert checkpoint.stored_module(f"model.{module}") == f"model.language_model.{module}"
    assert checkpoint.stored_module("lm_head") == "lm_head"


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("inputs_first", [True, False])
def test_experts_are_read_in_either_layout(tmp_path: Path, width: int, *, inputs_first: bool) -> None:
    """With 8 inputs and a width of 4 both layouts of gate and up have the same shape, which is the usual one."""
    hidden = 8
    up, down = torch.randn(2, 2 * width, hidden), torch.randn(2, hidden, width)
    is_swapped = inputs_first and (2 * width, hidden) != (hidden, 2 * width)
    experts = {
        "model.layers.0.mlp.experts.gate_up_proj": up.transpose(1, 2).contiguous() if is_swapped else up,
        "model.layers.0.mlp.experts.down_proj": down.transpose(1, 2).contiguous() if inputs_first else down,
    }
    save_file(experts, tmp_path / SINGLE_FILE)
    names = TensorNames(experts_inputs_first=(hidden, width))
    with WeightReader(Checkpoint.open(tmp_path, names)) as weights:
        for expert in range(2):
            wanted = {"gate_proj": up[expert, :width], "up_proj": up[expert, width:], "down_proj": down[expert]}
            for part, exact in wanted.items():
                for dim, start, length in ((0, 0, len(exact)), (0, 1, 2), (1, 1, 2)):
                    shape = list(exact.shape)
                    shape[dim] = length
                    into = torch.empty(shape)
                    name = f"model.layers.0.mlp.experts.{expert}.{part}.weight"
                    weights.take(name, into, shape=exact.shape, dim=dim, start=start)
                    assert torch.equal(into, exact.narrow(dim, start, length))
        weights.finish(lambda name: False)
