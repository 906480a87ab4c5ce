"""Every attention backend against the reference, and the batch invariance of the fast ones."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from oarlock.base.errors import StartupError
from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.attention.kv_format import ROUNDED, dequantized
from oarlock.workers.attention.reference import ReferenceBackend, attend_one
from oarlock.workers.attention.selector import choose
from oarlock.workers.attention.torch_backend import TorchBackend
from tests.unit.workers.attention_cases import CPP, EMULATED, EMULATES_BFLOAT16, Case, Seq, batch_of, tables_for

CPU = torch.device("cpu")
SOAK = pytest.mark.soak
MIXED = [Seq(1, 1), Seq(1, 37), Seq(9, 9), Seq(1, 300), Seq(5, 64), Seq(1, 64), Seq(33, 129), Seq(2, 2)]
FAST = [TorchBackend, *CPP]
# Of the slower tests: each form of pages with one type.
NUMBERS = [(torch.bfloat16, "auto"), (torch.float16, "auto"), (torch.float32, "auto")]
NUMBERS += [(torch.bfloat16, "int8"), (torch.float32, "fp8")]
LATENT = {"heads": 1, "group": 10, "width": 112, "value": 80, "latent": True}
each_cache = pytest.mark.parametrize("cache", ["auto", *ROUNDED])
# The torch backend is not batch-invariant in float32: the number of rows decides how torch's products split their sums.
INVARIANT = [
    (backend, dtype, cache)
    for backend in FAST
    for dtype, cache in NUMBERS
    if (backend, dtype) != (TorchBackend, torch.float32)
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def one_thread():
    """Small shapes: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def specs(
    dtype=torch.float32,
    block=16,
    group=4,
    heads=2,
    width=64,
    window=None,
    softcap=None,
    device=CPU,
    cache="auto",
    chunk=None,
    value=None,
    latent=False,
):
    kv = KVSpec(1, heads, width, block, dtype, device, cache, value_dim=value, value_in_key=latent)
    return kv, AttentionSpec(0, heads * group, heads, width, width**-0.5, window, softcap, chunk)


def case_of(seqs: list[Seq], sinks: bool = False, **options) -> Case:
    return Case(*specs(**options), seqs, sinks=sinks)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"block": 1},
        {"block": 16, "group": 1},
        {"block": 32, "group": 7, "heads": 2, "sinks": True},
        {"block": 48, "group": 3, "heads": 1, "width": 80},
        {"block": 128, "group": 8, "heads": 1, "width": 128},
        {"block": 16, "group": 2, "heads": 4, "width": 32, "window": 1},
        {"block": 16, "group": 2, "window": 40},
        {"block": 128, "group": 5, "window": 200, "softcap": 30.0, "sinks": True},
        {"block": 32, "group": 6, "softcap": 5.0},
        {"block": 16, "group": 2, "heads": 4, "width": 32, "chunk": 1},
        {"block": 16, "group": 5, "chunk": 37, "softcap": 5.0},
        {"block": 128, "group": 3, "chunk": 64, "sinks": True},
        {"block": 32, "group": 3, "heads": 2, "width": 96, "value": 64, "window": 40, "sinks": True},
        {"block": 16, "group": 2, "heads": 1, "width": 576, "value": 512},
        {"block": 16, "group": 1, "heads": 2, "width": 16, "value": 576},
        {"block": 16, "group": 16, "heads": 1, "width": 576, "value": 512, "latent": True},
        {"block": 48, "group": 5, "heads": 1, "width": 48, "value": 32, "latent": True},
        {"block": 128, "group": 40, "heads": 1, "width": 16, "value": 16, "latent": True},
        {"block": 32, "group": 3, "heads": 1, "width": 304, "value": 80, "latent": True},
    ],
    ids=str,
)
@each_cache
def test_backends_agree_with_the_reference(options, dtype, device, cache):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    case = case_of(MIXED, dtype=dtype, cache=cache, **options)
    expected = case.run(ReferenceBackend(case.spec))
    assert torch.cat(expected).isfinite().all()
    case = case_of(MIXED, dtype=dtype, cache=cache, device=torch.device(device), **options)
    kv = case.spec
    compared = [backend for backend in (ReferenceBackend, *FAST) if backend.why_not(kv) is None]
    assert compared
    tolerance = TOLERANCE[dtype] * (2 if kv.value_in_key else 1)  # scores of rotated elements are larger
    for backend in compared:
        for ours, wanted in zip(case.run(backend(kv)), expected, strict=True):
            torch.testing.assert_close(ours.cpu(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "cache"), NUMBERS, ids=str)
@pytest.mark.parametrize("backend", [ReferenceBackend, *FAST])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 40, "sinks": True},
        {"block": 32, "window": 33, "group": 7},
        {"block": 128, "window": 200},
        {"chunk": 1},
        {"chunk": 40, "sinks": True},
        {"block": 32, "chunk": 96, "group": 7},
    ],
)
@pytest.mark.slow
def test_blocks_outside_the_window_are_never_read(options, backend, dtype, cache):
    seqs = [Seq(1, 300), Seq(70, 400), Seq(1, 41), Seq(1, 40), Seq(3, 129), Seq(5, 5)]
    case = case_of(seqs, dtype=dtype, cache=cache, **options)
    kv = case.spec
    pieces = [[Seq(*_next(seq.context, end, 57)) for seq in case.seqs] for end in range(57, 500, 57)]
    for steps in (None, pieces):
        kept = case.run(backend(kv), steps)
        freed = case.run(backend(kv), steps, frees=True)
        assert all(torch.equal(one, other) for one, other in zip(kept, freed, strict=True))
        assert torch.cat(freed).isfinite().all()


@pytest.mark.parametrize(
    ("window", "chunk", "sinks"), [(None, None, False), (3, None, False), (3, None, True), (None, 6, False)]
)
@each_cache
def test_reference_agrees_with_torch(window, chunk, sinks, cache):
    """The reference itself is compared with torch's attention over whole sequences in float64: over the numbers that
    pages stand for. A sink is a key of zeros whose mask is its score, with a value of zeros."""
    case = case_of([Seq(20, 20), Seq(7, 50)], window=window, chunk=chunk, group=2, cache=cache, sinks=sinks)
    kv = case.spec
    for i, ours in enumerate(case.run(ReferenceBackend(kv))):
        held = (dequantized(kv.kv_format, kv.kv_format.rounded(x[i])) for x in (case.k, case.v))
        q, k, v = (x.double().transpose(0, 1) for x in (case.q[i], *held))
        visible = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        if window:
            visible &= ~torch.ones_like(visible).tril(-window)
        if chunk:
            of_chunk = torch.arange(len(visible)) // chunk
            visible &= of_chunk == of_chunk[:, None]
        mask = torch.zeros(visible.shape, dtype=torch.double).masked_fill(~visible, float("-inf"))
        if case.sinks is not None:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            mask = torch.cat((mask.expand(4, -1, -1), case.sinks.double().view(4, 1, 1).expand(-1, len(mask), 1)), -1)
        wanted = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), attn_mask=mask)
        torch.testing.assert_close(ours.double(), wanted.transpose(0, 1).flatten(1), atol=2e-6, rtol=2e-6)


def test_reference_agrees_with_sinks_in_transformers():
    """gpt-oss's own attention, in float64; its mask is added."""
    _, layer = specs(window=7, group=2)
    q, k, v = (torch.randn(20, count, 64, dtype=torch.double) for count in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.double)
    visible = torch.ones(20, 20, dtype=torch.bool).tril() & ~torch.ones(20, 20, dtype=torch.bool).tril(-7)
    mask = torch.zeros(20, 20, dtype=torch.double).masked_fill(~visible, float("-inf"))
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    wanted, _ = eager_attention_forward(module, *heads_first, mask, scaling=layer.scale)
    torch.testing.assert_close(attend_one(q, k, v, layer, sinks), wanted[0])


@pytest.mark.parametrize(("dtype", "cache"), NUMBERS, ids=str)
@pytest.mark.parametrize("backend", FAST)
def test_a_sink_may_outweigh_all_keys_or_none(backend, dtype, cache):
    case = case_of(MIXED, dtype=dtype, cache=cache, group=2, heads=1)
    without = case.run(backend(case.spec))
    case.sinks = torch.tensor([1e4, -1e4])
    for ours, plain in zip(case.run(backend(case.spec)), without, strict=True):
        assert not ours[:, :64].any() and torch.equal(ours[:, 64:], plain[:, 64:])


@pytest.mark.parametrize("backend", FAST)
@each_cache
def test_scores_survive_large_key_biases(backend, cache):
    """Keys that share a large offset make scores in the hundreds, which 16 bits would round by more than one."""
    kv, layer = specs(dtype=torch.bfloat16, group=7, cache=cache)
    case = Case(kv, layer, MIXED, key_bias=64.0)
    for ours, wanted in zip(case.run(backend(kv)), case.run(ReferenceBackend(kv)), strict=True):
        torch.testing.assert_close(ours, wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(("backend", "dtype", "cache"), INVARIANT, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"group": 7},
        {"group": 1, "block": 32},
        {"group": 2, "width": 32, "heads": 4, "sinks": True},
        {"group": 4, "window": 50, "sinks": True},
        {"group": 4, "chunk": 75},
        {"group": 2, "heads": 1, "width": 512, "value": 48},
        {"group": 4, "heads": 1, "width": 192, "value": 128, "latent": True},
    ],
    ids=str,
)
@pytest.mark.slow
def test_batch_and_chunks_do_not_change_a_bit(options, backend, dtype, cache):
    if backend is TorchBackend and dtype == torch.bfloat16 and EMULATES_BFLOAT16:
        pytest.skip(EMULATES_BFLOAT16)
    case = case_of([Seq(1, 300), Seq(70, 100), Seq(1, 40), Seq(1, 33), Seq(3, 3)], dtype=dtype, cache=cache, **options)
    kv = case.spec
    if (reason := backend.why_not(kv)) is not None:
        pytest.skip(reason)
    together = case.run(backend(kv))
    for i in range(len(case.seqs)):
        assert torch.equal(case.run(backend(kv), alone=i)[i], together[i]), f"sequence {i} depends on its batch"
    whole = case.run(backend(kv), [[Seq(seq.context, seq.context) for seq in case.seqs]])
    pieces = [[Seq(*_next(seq.context, end, 57)) for seq in case.seqs] for end in range(57, 400, 57)]
    by_one = [[Seq(int(end <= seq.context), end) for seq in case.seqs] for end in range(1, 301)]
    for steps in (pieces, by_one) if options == {"group": 7} else (pieces,):
        for i, chunked in enumerate(case.run(backend(kv), steps)):
            assert torch.equal(chunked, whole[i]), f"sequence {i} depends on its chunks"


def _next(context: int, end: int, chunk: int) -> tuple[int, int]:
    stop = min(end, context)
    return max(0, stop - (end - chunk)), stop


@pytest.mark.slow
def test_long_prompts_are_cut_into_row_blocks_and_groups():
    """The scratch bounds hold: scores never exceed the limit, and both cuts really happen."""
    kv, layer = specs(dtype=torch.bfloat16, group=7, block=32)
    seqs = [Seq(200, 700), *[Seq(1, n) for n in (900, 60, 64, 70, 880, 90, 100, 40)]]
    case = Case(kv, layer, seqs)
    backend = TorchBackend(kv)
    ours = case.run(backend)
    decodes, prefills = backend._units(backend.prepare(batch_of(case.tables, seqs, 32, CPU)), layer)
    assert len(decodes) == 2 and len(prefills) == 1 and len(prefills[0].blocks) > 2
    limit = 1 << 19
    assert (
        max(buffer.numel() for name, buffer in backend._scratch._buffers.items() if name in ("scores", "lost")) <= limit
    )
    for mine, wanted in zip(ours, case.run(ReferenceBackend(kv)), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1.6e-2, rtol=1.6e-2)


@each_cache
def test_pages_hold_kv_heads_once(cache):
    kv, _ = specs(group=8, heads=2, cache=cache)
    for backend in (ReferenceBackend(kv), *(fast(kv) for fast in FAST)):
        (layer,) = backend.allocate(10)
        page = 16 * 2 * {"auto": 64 * 4, "int8": 64 + 2, "fp8": 64}[cache]  # bytes
        assert layer.k.nbytes == layer.v.nbytes
        assert 0 <= layer.k.nbytes - 10 * page <= page, "at most one page beyond the blocks"
        assert kv.bytes_per_block == 2 * page


@pytest.mark.parametrize("value", [512, 576])
@each_cache
def test_pages_hold_values_that_are_in_keys_once(cache, value):
    """In int8 with a scale of the value, and one of the other elements if there are any."""
    kv, _ = specs(heads=1, width=576, value=value, latent=True, cache=cache)
    page = 16 * {"auto": 576 * 4, "int8": 576 + 2 * (1 if value == 576 else 2), "fp8": 576}[cache]  # bytes
    for backend in (ReferenceBackend(kv), *(fast(kv) for fast in FAST)):
        (layer,) = backend.allocate(10)
        assert layer.v.nbytes == 0 and 0 <= layer.k.nbytes - 10 * page <= page, "at most one page beyond the blocks"
    assert kv.bytes_per_block == page


def test_choose_prefers_the_fast_backend_and_logs_the_reason_otherwise():
    kv, _ = specs()
    lines: list[str] = []
    assert choose(kv, "auto", lines.append).name == (CPP or FAST)[0].name
    assert choose(kv, "torch", lines.append).name == "torch"
    assert choose(kv, "reference", lines.append).name == "reference"
    odd = KVSpec(1, 2, 64, 16, torch.float64, CPU)
    assert choose(odd, "auto", lines.append).name == "reference"
    assert any("float64" in line for line in lines)
    for block, width, word in ((24, 64, "block size"), (16, 72, "heads"), (16, 592, "heads")):
        assert word in (CppBackend.why_not(KVSpec(1, 2, width, block, torch.bfloat16, CPU)) or "")
    with pytest.raises(StartupError, match="float64") as refused:
        choose(odd, "torch", lines.append)
    assert "auto" in refused.value.fix
    with pytest.raises(StartupError, match="flashier"):
        choose(kv, "flashier", lines.append)


@pytest.mark.parametrize(("dtype", "cache"), NUMBERS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"group": 7, "block": 32},
        {"group": 1, "width": 16},
        {"width": 256, "heads": 1},
        {"width": 192, "value": 128, "heads": 1, "group": 13},
        {"width": 320, "value": 256, "heads": 1, "group": 45, "latent": True},
        {"window": 300, "block": 48, "sinks": True},
    ],
    ids=str,
)
def test_several_spans_of_positions_and_blocks_of_rows(options, dtype, cache):
    """Several spans of 256 positions, and windows that begin in the middle of one."""
    agree_over_spans(options, dtype, cache)


@pytest.mark.parametrize(
    ("dtype", "cache"), [NUMBERS[0], NUMBERS[4], *(pytest.param(*one, marks=SOAK) for one in NUMBERS[1:4])], ids=str
)
def test_more_rows_than_registers_hold(dtype, cache):
    agree_over_spans({"group": 40, "heads": 1, "width": 112, "softcap": 20.0, "sinks": True}, dtype, cache)


def agree_over_spans(options, dtype, cache):
    seqs = [Seq(1, 800), Seq(9, 530), Seq(30, 300), Seq(1, 256), Seq(1, 257)]
    case = case_of(seqs, dtype=dtype, cache=cache, **options)
    expected = case.run(ReferenceBackend(case.spec), attends_earlier=False)
    for backend in CPP:
        for ours, wanted in zip(case.run(backend(case.spec), attends_earlier=False), expected, strict=True):
            torch.testing.assert_close(ours, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", EMULATED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"group": 7}, {"width": 80, "block": 48, "sinks": True}, {"window": 40, "softcap": 5.0}, LATENT],
    ids=str,
)
@each_cache
def test_an_emulated_processor_agrees_with_the_reference(options, dtype, backend, cache):
    case = case_of(MIXED, dtype=dtype, cache=cache, **options)
    for ours, wanted in zip(case.run(backend(case.spec)), case.run(ReferenceBackend(case.spec)), strict=True):
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", [*CPP, *EMULATED])
@pytest.mark.parametrize(("dtype", "cache"), NUMBERS, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 700, "sinks": True}, LATENT], ids=str)
@pytest.mark.slow
def test_threads_share_the_positions_of_a_sequence_without_changing_a_bit(options, dtype, backend, cache):
    seqs = [Seq(1, 1700), Seq(3, 900), Seq(1, 20), Seq(40, 800)]
    case = case_of(seqs, dtype=dtype, cache=cache, **{"heads": 1, "group": 7, **options})
    one = case.run(backend(case.spec))
    for threads in (3, 16):
        torch.set_num_threads(threads)
        assert all(torch.equal(ours, wanted) for ours, wanted in zip(case.run(backend(case.spec)), one, strict=True))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("backend", CPP[:1])
@pytest.mark.soak
def test_results_that_wait_to_be_merged_take_little_memory(backend):
    """Two threads share 15 tiles of a long context, whose results for each 256 positions would take 53 MB."""
    seqs = [Seq(1, 12288)]
    kv, layer = specs(dtype=torch.bfloat16, heads=1, group=540, width=576, value=512, latent=True)

    def growth():
        torch.set_num_threads(2)
        tables, num_blocks = tables_for(seqs, 16)
        made = backend(kv)
        (pages,), plan = made.allocate(num_blocks), made.prepare(batch_of(tables, seqs, 16, CPU))
        q = torch.ones(1, 540, 576, dtype=torch.bfloat16)
        pages.k.zero_()
        made.attend(q[:, :36], pages, plan, replace(layer, num_heads=36))  # starts the threads
        before = resident_bytes()
        for _ in range(2):  # the scratch memory of the first is replaced by one piece, which the second writes
            made.attend(q, pages, plan, layer)
        return resident_bytes() - before

    with ThreadPoolExecutor(1) as thread:  # scratch memory of its own
        assert thread.submit(growth).result() < 1 << 25
