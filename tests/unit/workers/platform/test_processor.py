"""Instructions with which a processor multiplies, from the flags that the system reports."""

import pytest

from oarlock.workers.platform.processor import of


@pytest.mark.parametrize(
    ("machine", "flags", "bfloat16", "float16"),
    [
        ("x86_64", {"avx2", "fma"}, False, False),
        ("x86_64", {"avx512f", "avx512bw", "avx512vl"}, False, False),
        ("x86_64", {"avx512f", "avx512_bf16"}, True, False),
        ("AMD64", {"amx_bf16", "avx512_fp16"}, True, True),
        ("aarch64", {"asimd", "fphp", "asimdhp"}, False, True),
        ("aarch64", {"asimd", "asimdhp", "bf16"}, True, True),
        ("riscv64", {"v"}, False, False),
        ("x86_64", set(), False, False),
    ],
)
def test_sixteen_bits(machine: str, flags: set[str], bfloat16: bool, float16: bool) -> None:
    found = of(machine, frozenset(flags))
    assert (found.multiplies("bfloat16"), found.multiplies("float16")) == (bfloat16, float16)
    assert found.multiplies("float32") and found.name
