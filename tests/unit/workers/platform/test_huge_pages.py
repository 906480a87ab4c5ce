"""Memory in huge pages is aligned, zero and freed as any other; staging memory is used again and never shared."""

import logging
from pathlib import Path

import pytest
import torch

from oarlock.base.process_memory import memory_use
from oarlock.workers.platform import huge_pages
from oarlock.workers.platform.huge_pages import HUGE_PAGE_BYTES, StagingMemory, huge_page_empty, why_not


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_a_tensor_is_zero_contiguous_and_aligned(dtype: torch.dtype) -> None:
    for shape in ((0,), (3,), (5, 7), (1000, 1100), (3, 1 << 20), (2, 0, 4)):
        x = huge_page_empty(shape, dtype)
        assert x.shape == shape and x.dtype == dtype and x.is_contiguous() and not x.any()
        assert x.nbytes < HUGE_PAGE_BYTES or x.data_ptr() % HUGE_PAGE_BYTES == 0
        x.fill_(1)
        assert x.to(torch.float64).sum() == x.numel()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_taken_when_touched_and_given_back_with_the_tensor() -> None:
    size = 64 << 20
    before = memory_use().resident
    x = huge_page_empty((size,), torch.uint8)
    assert memory_use().resident - before < size // 4
    x.fill_(1)
    assert memory_use().resident - before > size * 3 // 4
    del x
    assert memory_use().resident - before < size // 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [("always [madvise] never", None), ("[always] madvise never", None), ("always madvise [never]", "is set to never")],
)
def test_the_operators_setting_is_respected(tmp_path: Path, text: str, reason: str | None) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(text + "\n")
    found = why_not(setting)
    assert found is None if reason is None else found is not None and reason in found


def test_a_kernel_without_them_is_no_error(tmp_path: Path) -> None:
    assert why_not(tmp_path / "missing") == "the kernel was built without them"


def test_without_huge_pages_the_memory_is_the_same_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    huge_pages._log_once.cache_clear()
    monkeypatch.setattr(huge_pages, "why_not", lambda: "they are off")
    with caplog.at_level(logging.INFO, "oarlock.platform"):
        for _ in range(2):
            x = huge_page_empty((HUGE_PAGE_BYTES,), torch.uint8)
            assert x.data_ptr() % HUGE_PAGE_BYTES == 0 and not x.any()
    assert [line.getMessage() for line in caplog.records] == ['event=huge_pages advised=false reason="they are off"']
    huge_pages._log_once.cache_clear()


def test_no_address_space_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes of memory"):
        huge_page_empty((1 << 60,), torch.uint8)


def test_the_pages_of_a_tensor_that_is_gone_serve_the_next() -> None:
    staging = StagingMemory()
    first = staging.empty((4 << 20,), torch.uint8)
    address = first.data_ptr()
    view = first.view(torch.bfloat16)[1000:]
    del first
    second = staging.empty((3 << 20,), torch.uint8)
    assert second.data_ptr() != address  # a view still uses the first one's
    del view
    third = staging.empty((1 << 20,), torch.float32)
    assert third.data_ptr() == address and third.shape == (1 << 20,)
    assert staging.empty((3 << 20,), torch.uint8).data_ptr() not in (address, second.data_ptr())


def test_a_larger_tensor_gets_larger_memory() -> None:
    staging = StagingMemory()
    del (small := [staging.empty((3 << 20,), torch.uint8)])[:]
    large = staging.empty((5, 1 << 20), torch.int64).fill_(7)
    assert not small and int(large.sum()) == 35 << 20


def test_after_release_nothing_is_kept() -> None:
    staging = StagingMemory()
    x = staging.empty((4 << 20,), torch.uint8)
    staging.release()
    del x
    assert staging._free is None
    assert staging.empty((4 << 20,), torch.uint8).shape == (4 << 20,)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_the_last_part_of_a_tensor_takes_no_whole_huge_page() -> None:
    before = memory_use().resident
    kept = [huge_page_empty((HUGE_PAGE_BYTES + 8192,), torch.uint8).fill_(1) for _ in range(20)]
    taken = memory_use().resident - before
    assert taken < 20 * (HUGE_PAGE_BYTES + 8192) * 1.2 and len(kept) == 20
