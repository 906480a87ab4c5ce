"""The Triton kernels against the reference: on a CUDA device, or else on the CPU in Triton's interpreter.

In the interpreter, products of bfloat16 are not those of a device, so that type is left to devices.
"""

import itertools
import random
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.triton_backend import TritonBackend
from oarlock.workers.attention.triton_tiles import MERGED_AT_ONCE, Tiles, TileShape, TritonPlan
from tests.unit.workers.attention_cases import Case, Seq
from tests.unit.workers.kernels.triton.triton_resources import of_program

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# All types on a device; in the interpreter, which is slow, each shape with one type and number of multiprocessors.
RUNS = [(dtype, processors) for dtype in TYPES for processors in (1, 16)]
if DEVICE.type == "cpu":
    RUNS = [(torch.float32, 16), (torch.float16, 1)]
MIXED = [Seq(1, 1), Seq(9, 9), Seq(1, 140), Seq(5, 64), Seq(17, 80)]
SOAK = pytest.mark.soak
SLOWLY_INTERPRETED = SOAK if DEVICE.type == "cpu" else ()

pytestmark = pytest.mark.slow


def backend_of(spec: KVSpec, processors: int, least_span: int = 64) -> TritonBackend:
    """Backend as on a device with `processors` multiprocessors: with more of them, keys are split more finely."""
    backend = TritonBackend(spec)
    backend.processors, backend.least_span = processors, least_span
    return backend


def agree(
    spec: KVSpec, layer: AttentionSpec, seqs: list[Seq], processors: int, seed: int = 0, sinks: bool = False
) -> None:
    case = Case(spec, layer, seqs, seed, sinks=sinks)
    # Scores are as large, and a weight is as far off as its score.
    bound = TOLERANCE[spec.dtype] * max(1.0, layer.scale * spec.head_dim**0.5)
    # Tiles of float32 are small, so the last step has several; a prompt's thousand would take seconds to interpret.
    attends_earlier = spec.dtype != torch.float32 or DEVICE.type == "cuda"
    ours = case.run(backend_of(spec, processors), attends_earlier=attends_earlier)
    for result, wanted in zip(ours, case.run(ReferenceBackend(spec), attends_earlier=attends_earlier), strict=True):
        torch.testing.assert_close(result, wanted, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("heads", "group", "width", "block", "window", "softcap", "sinks", "run"),
    [
        (1, 4, 64, 1, None, None, False, 1),
        (1, 7, 64, 16, None, None, True, 0),
        (1, 3, 80, 48, None, None, False, 1),
        (1, 1, 96, 16, None, 5.0, True, 1),
        pytest.param(1, 8, 128, 128, None, None, False, 0, marks=pytest.mark.soak),  # seconds in the interpreter
        (1, 2, 256, 32, None, None, False, 1),
        (2, 2, 32, 16, 1, None, True, 0),
        (1, 4, 64, 16, 40, None, True, 0),
        (1, 5, 64, 32, 200, 30.0, False, 0),
        pytest.param(1, 32, 64, 16, None, None, False, 0, marks=pytest.mark.soak),
    ],
)
def test_it_agrees_with_the_reference(heads, group, width, block, window, softcap, sinks, run):
    for dtype, processors in [RUNS[run]] if DEVICE.type == "cpu" else RUNS:
        layer = AttentionSpec(0, heads * group, heads, width, width**-0.5, window, softcap)
        agree(KVSpec(1, heads, width, block, dtype, DEVICE), layer, MIXED, processors, sinks=sinks)


@pytest.mark.parametrize(
    ("group", "width", "block", "chunk", "softcap", "sinks", "run"),
    [(2, 32, 16, 1, None, False, 0), (4, 64, 16, 40, None, True, 0), (5, 64, 32, 64, 30.0, False, 1)],
)
def test_chunks_agree_with_the_reference(group, width, block, chunk, softcap, sinks, run):
    for dtype, processors in [RUNS[run]] if DEVICE.type == "cpu" else RUNS:
        layer = AttentionSpec(0, group, 1, width, width**-0.5, None, softcap, chunk)
        agree(KVSpec(1, 1, width, block, dtype, DEVICE), layer, MIXED, processors, sinks=sinks)


@pytest.mark.parametrize(("chunk", "processors"), [(1, 16), (40, 1)])
def test_blocks_before_the_chunk_are_never_read(chunk, processors):
    spec, layer = KVSpec(1, 1, 32, 16, torch.float32, DEVICE), AttentionSpec(0, 2, 1, 32, 0.125, chunk=chunk)
    case = Case(spec, layer, [Seq(1, 150), Seq(30, 170), Seq(1, 41), Seq(5, 5)])
    kept = case.run(backend_of(spec, processors), attends_earlier=False)
    freed = case.run(backend_of(spec, processors), frees=True, attends_earlier=False)
    assert all(torch.equal(one, other) for one, other in zip(kept, freed, strict=True))
    assert torch.cat(freed).isfinite().all()


def random_case(seed: int) -> tuple[KVSpec, AttentionSpec, list[Seq], int]:
    draw = random.Random(seed)
    heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4, 5, 7, 8])
    width, block = draw.choice([16, 32, 64, 80, 96, 128, 256]), draw.choice([8, 16, 32, 48, 128])
    window, softcap = draw.choice([None, None, 1, 17, 64, 130]), draw.choice([None, None, 20.0])
    seqs = []
    for _ in range(draw.randint(1, 3)):
        context = draw.choice([1, 2, 15, 64, 65, draw.randint(1, 200)])
        seqs.append(Seq(draw.choice([1, 1, context, draw.randint(1, context)]), context))
    spec = KVSpec(1, heads, width, block, draw.choice(TYPES), DEVICE, draw.choice(["auto", "auto", "int8", "fp8"]))
    layer = AttentionSpec(0, heads * group, heads, width, draw.uniform(0.05, 0.3), window, softcap)
    return spec, layer, seqs, draw.choice([1, 8, 100])


@pytest.mark.parametrize("seed", range(8))
def test_ragged_shapes_at_random(seed):
    spec, layer, seqs, processors = random_case(seed)
    agree(spec, layer, seqs, processors, seed, sinks=seed % 2 == 1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(8, 508, 25))
def test_hundreds_of_ragged_shapes(first):
    for seed in range(first, first + 25):
        spec, layer, seqs, processors = random_case(seed)
        agree(spec, layer, seqs, processors, seed, sinks=seed % 2 == 1)


@pytest.mark.parametrize(("window", "processors"), [(1, 16), (40, 1), pytest.param(130, 16, marks=SOAK)])
def test_blocks_outside_the_window_are_never_read(window, processors):
    spec = KVSpec(1, 1, 32, 16, torch.float32, DEVICE)
    case = Case(spec, AttentionSpec(0, 2, 1, 32, 0.125, window), [Seq(1, 150), Seq(30, 170), Seq(1, 41), Seq(5, 5)])
    kept = case.run(backend_of(spec, processors), attends_earlier=False)
    freed = case.run(backend_of(spec, processors), frees=True, attends_earlier=False)
    assert all(torch.equal(one, other) for one, other in zip(kept, freed, strict=True))
    assert torch.cat(freed).isfinite().all()


@pytest.mark.parametrize(
    ("processors", "contexts", "is_live", "num_programs", "is_split"),
    [
        (1, [1024] * 2, False, 2, False),
        (66, [1024] * 2, False, 8, True),
        (66, [200] * 2, False, 2, False),
        (66, [131_072] + [512] * 63, False, 166, True),
        (66, [131_072] * 64, True, 196, True),
        (66, [256] * 64, True, 64, False),
    ],
)
def test_keys_are_divided_by_processors_and_all_lengths(processors, contexts, is_live, num_programs, is_split):
    """Short contexts are not split; one long context among them is, finely, also where lengths are not known."""
    backend = backend_of(KVSpec(1, 2, 64, 16, torch.float16, DEVICE), processors, least_span=256)
    ends = np.array(contexts)
    tiles = Tiles(TileShape(16, 64, 4, 3), 1, 2, torch.empty(0), torch.empty(0), ends, ends - 1)
    shares = backend.shares(tiles, 1 << 30, is_live=is_live)
    assert (shares.num_programs, shares.is_split) == (num_programs, is_split)


@pytest.mark.parametrize("bounds", [None, 5000])
def test_one_long_context_among_short_ones_is_shared_by_many_programs(bounds):
    """Known lengths, and a plan that holds for all up to 5000: its last programs have no keys, and leave at once."""
    spec = KVSpec(1, 1, 32, 16, torch.float32, DEVICE)
    contexts = [4000, 0, 70, 1, 300]
    backend = backend_of(spec, 4, least_span=64)
    lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 1, 2, 3, 4], dtype=torch.int32, device=DEVICE)
    host = [contexts[i] if bounds is None else bounds for i in range(5)]
    lengths = [1, 0, 1, 1, 1] if bounds is None else [1] * 5
    nothing = torch.empty(0)
    batch = ForwardBatch(
        4, 0, lengths, host, nothing, nothing, {}, starts, lens, torch.arange(5, dtype=torch.int32), {}, nothing
    )
    plan = TritonPlan(batch, is_live=bounds is not None)
    plan.tiles[1] = backend._tiles(plan, 1)
    (part,) = backend._planned(plan, plan.tiles[1][0], 1 << 30, AttentionSpec(0, 1, 1, 32, 1.0))
    backend._divide(batch, part, 1 << 30)
    table = part.programs.cpu().numpy()
    begins, stops = table[3], table[4]
    used = stops > begins
    assert used[: used.sum()].all() and len(used) == (18 if bounds is None else 21)
    of_long = (table[2] == 3999) & used
    spans = list(zip(begins[of_long].tolist(), stops[of_long].tolist(), strict=True))
    assert spans[0][0] == 0 and spans[-1][1] == 4000 and len(spans) == 14
    assert all(one[1] == other[0] and one[1] == one[0] + 288 for one, other in itertools.pairwise(spans))
    assert sorted((stops - begins)[used & ~of_long].tolist()) == [1, 12, 70, 288]
    assert set(table[6][of_long].tolist()) == {14}


class Decoding(TritonBackend):
    """Plans for decodes know no more of contexts than that none is longer than 1000."""

    def prepare(self, batch: ForwardBatch) -> TritonPlan:
        if set(batch.query_lens) != {1}:
            return super().prepare(batch)
        return self.prepare_decode(replace(batch, context_lens=[1000] * batch.num_seqs))


def test_more_programs_share_a_tile_than_are_merged_at_once(monkeypatch):
    spec, merged, merge = KVSpec(1, 1, 32, 16, torch.float32, DEVICE), [], TritonBackend._merge

    def noted(self, part, *rest):
        merged.append(int(part.of_tiles[1].max()))
        merge(self, part, *rest)

    monkeypatch.setattr(TritonBackend, "_merge", noted)
    case = Case(spec, AttentionSpec(0, 2, 1, 32, 0.2), [Seq(1, 1200), Seq(2, 3)])
    backends = backend_of(spec, processors=16, least_span=32), ReferenceBackend(spec)
    for ours, wanted in zip(*(case.run(each, attends_earlier=False) for each in backends), strict=True):
        torch.testing.assert_close(ours, wanted, atol=4e-6, rtol=4e-6)
    assert max(merged) > MERGED_AT_ONCE


@pytest.mark.parametrize(("processors", "window"), [(4, None), (64, 40)])
def test_a_plan_of_decodes_holds_for_every_length(window, processors):
    """The programs that share a sequence's keys divide what it has, from one key to the bound."""
    spec = KVSpec(1, 2, 32, 16, torch.float32, DEVICE)
    layer = AttentionSpec(0, 4, 2, 32, 0.2, window)
    case = Case(spec, layer, [Seq(1, context) for context in (1, 64, 150)], sinks=window is not None)
    backend = Decoding(spec)
    backend.processors, backend.least_span = processors, 64
    found = (case.run(each, attends_earlier=False) for each in (backend, ReferenceBackend(spec)))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize(
    ("form", "kinds"),
    [
        pytest.param("model", ["80", "89", "90", "100"], marks=SOAK),
        pytest.param("int8", ["80", "89", "90", "100"], marks=SOAK),
        pytest.param("fp8", ["80", "89", "90", "100"], marks=SOAK),
    ],
)
def test_kernels_fit_every_kind_of_device(form, kinds):
    """Compiled for each, without a device: shared memory and registers suffice, so that none are spilled."""
    found = of_program("triton_resources", form, *kinds)
    assert len(found) == len(kinds) * (16 if form == "model" else 5)
    tiles = {
        name: taken["waits"] for name, taken in found.items() if form == "model" and name.endswith(("few", "many"))
    }
    waiting = {name.split(maxsplit=1)[1] for name, waits in tiles.items() if waits}
    # Keys, values and block tables are copied ahead, except where registers allow two stages only.
    assert waiting <= {"torch.bfloat16 256 many", "torch.float32 128 few", "torch.float32 128 many"}


@pytest.mark.skipif(find_spec("triton.backends.amd") is None, reason="this Triton does not compile for AMD's devices")
@pytest.mark.parametrize(
    "program",
    [
        *(
            pytest.param(program, marks=[SOAK, pytest.mark.timeout(1200)])
            for program in (
                ("triton_resources", "model"),
                ("weight_only_resources", "largest"),
                ("expert_resources", "largest"),
                ("triton_sampling_resources",),
                ("recurrent_resources", "largest"),
                ("low_rank_resources",),
                ("latent_resources",),
            )
        ),
    ],
    ids=" ".join,
)
def test_kernels_compile_for_devices_of_amd(program):
    found = of_program(*program, "gfx942", "gfx1100")
    assert {name.split()[0] for name in found} == {"gfx942", "gfx1100"}
