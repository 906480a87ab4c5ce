"""Building and loading the kernels: once, by one process at a time, and with a reason when it is not possible."""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.base.paths import cache_home
from oarlock.workers.attention.backend import AttentionSpec, KVSpec
from oarlock.workers.config import WorkerConfig
from oarlock.workers.kernels.cpu import build, description, elementwise, library, prebuild
from oarlock.workers.kernels.cpu.build import LEVELS, ISALevel
from oarlock.workers.kernels.cpu.gemm import CppMatmul
from oarlock.workers.platform.processor import may_use_tiles
from oarlock.workers.preflight import check_without_weights
from tests.unit.workers import kernel_levels
from tests.unit.workers.attention_cases import Seq, batch_of, cpp_at, tables_for

HERE = library.why_not()
needs_kernels = pytest.mark.skipif(HERE is not None, reason=str(HERE))
SCRIPT = """
from oarlock.workers.kernels.cpu import library
print(library.why_not())
maps = open("/proc/self/maps").read().splitlines()
print(len({line.split()[-1] for line in maps if "libgomp" in line}))
"""
# Stands in for a wheel of torch whose OpenMP has a hash in its name and is visible to nobody else.
HASHED = """
import ctypes, pathlib
library = pathlib.Path(__file__).parent.parent / "torch.libs" / "libgomp-a34b3233.so.1.0.0"
ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
"""


def environment(home: Path, **more: str) -> Mapping[str, str]:
    return {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(home), "HOME": str(home), **more}


def start(home: Path, script: str = SCRIPT, **more: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment(home, **more), stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output.splitlines()


def kernels_in_new_process(home: Path, **more: str) -> list[str]:
    """Lines of a new process: why the kernels are not available, or None, and the number of its OpenMP libraries."""
    return finish(start(home, **more))


@pytest.fixture
def quick_compiler(tmp_path: Path) -> str:
    """One that compiles nothing and links what this process has loaded."""
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\nwhat=$1\nwhile [ "$1" != -o ]; do shift; done\n'
        f'if [ "$what" = -shared ]; then cp {library.library()._name} "$2"; else cat > "$2"; fi\n'
    )
    script.chmod(0o755)
    return str(script)


@needs_kernels
@pytest.mark.slow
def test_processes_that_start_together_build_once_and_share_torchs_threads(
    tmp_path: Path, quick_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = [start(tmp_path, CXX=quick_compiler) for _ in range(2)]
    assert [finish(process) for process in together] == [["None", "1"]] * 2
    (first,) = tmp_path.glob("oarlock/kernels/*.so")
    made = first.stat().st_mtime_ns
    (tmp_path / "another-name").symlink_to(quick_compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "another-name"))
    assert build.compiled(library.isa_level()) == first
    assert [path.stat().st_mtime_ns for path in tmp_path.glob("oarlock/kernels/*.so")] == [made]
    assert not list(tmp_path.glob("oarlock/kernels/*.o")), "objects are cleaned up"
    assert first.parent.stat().st_mode & 0o77 == 0, "nobody else may put a library there"


@needs_kernels
def test_an_openmp_with_a_hash_in_its_name_is_shared_too(tmp_path: Path) -> None:
    mine = library._loaded_openmp()
    for folder, name in (("torch.libs", "libgomp-a34b3233.so.1.0.0"), ("torch", "__init__.py")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(mine.read_bytes() if "gomp" in name else HASHED.encode())
    script = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}]
{SCRIPT}
assert library._loaded_openmp().name.startswith("libgomp-a34b3233")
"""
    assert finish(start(cache_home(), script)) == ["None", "1"]


@pytest.fixture
def nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded no kernels, and has an empty cache."""
    for name in ("_outcomes", "_of_one_type", "_given"):
        monkeypatch.setattr(library, name, {})
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "nothing")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@needs_kernels
@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [("CXX", "no-such-compiler", "install g++"), ("CXX", "false", "failed"), ("XDG_CACHE_HOME", "/proc", "cache")],
)
def test_a_machine_that_cannot_build_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert words in (library.why_not() or "")


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a compiler that makes empty files."""
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "nothing")


@pytest.mark.usefixtures("fake_compiler")
def test_sources_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[ISALevel] = []
    fingerprint = build.fingerprint

    def counted(level: ISALevel, facts: Sequence[str] = ()) -> str:
        calls.append(level)
        return fingerprint(level, facts)

    monkeypatch.setattr(build, "fingerprint", counted)
    for _ in ("compiles", "finds"):
        calls.clear()
        assert build.compiled(LEVELS[0]).exists() and calls == [LEVELS[0]]


@pytest.mark.usefixtures("fake_compiler")
def test_waiting_for_another_process_is_not_reported_as_compiling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target = build.compiled(LEVELS[0])
    events = ["event=compiling_kernels", "event=compiled_kernels"]
    assert [message.split()[0] for message in caplog.messages] == events
    target.unlink()

    def other_compiles(file: object, how: int) -> None:
        if how & fcntl.LOCK_NB:
            raise BlockingIOError
        target.touch()

    monkeypatch.setattr(build.fcntl, "flock", other_compiles)
    caplog.clear()
    assert build.compiled(LEVELS[0]) == target
    assert [message.split()[0] for message in caplog.messages] == ["event=awaiting_kernels", "event=awaited_kernels"]


# Stands in for a compiler that is slow: compiles one part at once, the others when there is a file "go".
GATED_COMPILER = """#!/bin/sh
what=$1
while [ "$1" != -o ]; do shift; done
case $2 in *.1.o) until [ -e "$XDG_CACHE_HOME/go" ]; do sleep 0.02; done;; esac
touch "$2"
"""


@pytest.mark.usefixtures("fake_compiler")
def test_other_processes_can_read_how_far_a_compilation_is(tmp_path: Path) -> None:
    (tmp_path / "compiler").write_text(GATED_COMPILER)
    level = LEVELS[0]
    assert build.read_compilation(build.lock_file(level)) is None, "nothing was ever compiled"
    began = time.time()
    with ThreadPoolExecutor(1) as threads:
        compiling = threads.submit(build.compiled, level)
        try:
            while (found := build.read_compilation(build.lock_file(level))) is None or not found.done:
                assert time.time() - began < 60 and not compiling.done()
                time.sleep(0.01)
            assert (found.done, found.total, found.fraction) == (1, len(build.UNITS), 1 / len(build.UNITS))
            assert began - 1 <= found.started_at <= time.time() + 0.1  # it is written in tenths of a second
        finally:
            (tmp_path / "go").touch()
        assert compiling.result().exists()
    assert build.read_compilation(build.lock_file(level)) is None


@pytest.mark.usefixtures("fake_compiler")
def test_the_state_that_a_killed_process_left_is_not_a_compilation() -> None:
    file = build.lock_file(LEVELS[0])
    file.write_text("1 2 1000.0\n")
    assert build.read_compilation(file) is None
    with open(file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert build.read_compilation(file) == build.Compilation(1, 2, 1000.0)


def test_every_source_is_compiled() -> None:
    in_units = [source for patterns in build.UNITS for source in build._sources(*patterns)]
    assert sorted(in_units) == build._sources("**/*.cpp")


@needs_kernels
@pytest.mark.soak
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.every) for dtype in (torch.float16, torch.float32))],
    ids=str,
)
def test_a_library_of_one_type_gives_the_bits_of_that_with_all(dtype: torch.dtype) -> None:
    every = library.isa_level()
    one = build.of_one_type(every, str(dtype).removeprefix("torch."))
    torch.manual_seed(0)
    weight, x = torch.randn(90, 200).to(dtype), torch.randn(40, 200).to(dtype)
    seqs = [Seq(1, 300), Seq(40, 77)]
    tables, blocks = tables_for(seqs, 16)
    batch = batch_of(tables, seqs, 16, torch.device("cpu"))
    q, kv = torch.randn(41, 4, 64).to(dtype), torch.randn(41, 2, 64).to(dtype)
    results = []
    for level in (every, one):
        backend = cpp_at(level)(KVSpec(1, 2, 64, 16, dtype, torch.device("cpu")))
        (pages,) = backend.allocate(blocks)
        with kernel_levels.using(level):
            product, norm = CppMatmul(weight, None)(x), elementwise.rms_norm(x, torch.ones(200), 1e-6)
        backend.write(pages, kv, kv, batch)
        attended = backend.attend(q, pages, backend.prepare(batch), AttentionSpec(0, 4, 2, 64, 0.1))
        results.append((product, norm, attended))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@needs_kernels
def test_the_first_dtype_decides_how_many_are_compiled(
    quick_compiler: str, nothing_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(*dtypes: torch.dtype | None) -> list[str]:
        return [Path(library.library(dtype)._name).name.rsplit("-", 1)[0] for dtype in dtypes]

    monkeypatch.setenv("CXX", quick_compiler)
    level = library.isa_level().name
    assert files(torch.float16, None, torch.float16) == [f"{level}_float16"] * 3
    assert files(torch.float32, torch.float16, None) == [level] * 3


def test_a_cache_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_directory() == tmp_path / "oarlock" / "kernels"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(build.KernelsUnavailable, match="belongs to another user"):
        build.cache_directory()


def test_the_fingerprint_follows_sources_flags_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(build.SOURCES, tmp_path / "csrc")
    one, other = LEVELS[:2]
    before = build.fingerprint(one, ("a compiler",))
    monkeypatch.setattr(build, "SOURCES", copy)
    assert build.fingerprint(one, ("a compiler",)) == before
    assert len({before, build.fingerprint(other, ("a compiler",)), build.fingerprint(one, ("another",))}) == 3
    header = copy / "simd" / "simd.h"
    header.write_text(header.read_text() + "\n")
    assert build.fingerprint(one, ("a compiler",)) != before


def test_prebuilt_kernels_need_no_compiler_and_must_match_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = LEVELS[0]
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.why_not_obtainable(level)
    carried = build.prebuilt(level)
    carried.touch()
    assert build.compiled(level) == carried and build.why_not_obtainable(level) is None
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    with pytest.raises(build.KernelsUnavailable, match="no C\\+\\+ compiler"):
        build.compiled(level)


def test_a_wheel_is_tagged_with_the_newest_c_library_that_it_needs(tmp_path: Path) -> None:
    for name, text in (("one", b"\0GLIBC_2.14\0"), ("two", b"\0GLIBC_2.29\0GLIBC_2.2.5\0"), ("old", b"")):
        (tmp_path / name).write_bytes(text)
    machine = build.machine_name()
    assert prebuild.platform_tag(tmp_path.iterdir()) == f"manylinux_2_29_{machine}"
    assert prebuild.platform_tag([tmp_path / "old"]) == f"manylinux_2_17_{machine}"


def test_without_permission_for_tiles_the_next_level_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "features", lambda: build.LEVELS[0].needs | {"avx512_fp16"})
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    orders = {"AuthenticAMD": ["avx512_bf16", "avx512", "avx2"], "GenuineIntel": ["avx512", "avx512_bf16", "avx2"]}
    for maker, order in orders.items():
        monkeypatch.setattr(build, "vendor", lambda maker=maker: maker)
        for allowed, names in ((True, ["amx", *order]), (False, order)):
            monkeypatch.setattr(build, "may_use_tiles", lambda allowed=allowed: allowed)
            assert [level.name for level in build.available()] == names
    assert [build.why_not_better(level) for level in build.LEVELS[:2]] == ["not allowed by the system", "slower here"]
    with pytest.raises(StartupError, match="tile registers"):
        build.chosen({build.ENVIRONMENT: "amx"})
    assert may_use_tiles() in (True, False)


def test_a_failed_compilation_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ISALevel] = []

    def fail(level: ISALevel) -> Path:
        tried.append(level)
        raise build.KernelsUnavailable("compiling failed")

    monkeypatch.setattr(build, "compiled", fail)
    monkeypatch.setattr(library, "_outcomes", {})
    with library.using(LEVELS[0]):
        assert [library.why_not() for _ in range(3)] == ["compiling failed"] * 3
        assert not library.provides("oarlock_gemm") and library.loaded() is None
    assert tried == [LEVELS[0]]


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_chosen", lambda: None)
    monkeypatch.setattr(library, "_given", {})
    with pytest.raises(library.KernelsUnavailable, match="AVX2"):
        library.library()


@pytest.mark.parametrize(
    ("machine", "flags", "names"),
    [
        ("x86_64", "avx2 fma f16c bmi1 bmi2 movbe", ["avx2"]),
        ("AMD64", "avx2 fma f16c bmi1 bmi2 movbe avx512f", ["avx2"]),
        ("x86_64", "avx2 fma", []),
        ("x86_64", "avx2 fma f16c bmi1 bmi2 movbe avx512f avx512bw avx512cd avx512dq avx512vl", ["avx512", "avx2"]),
        ("aarch64", "fp asimd", ["neon"]),
        ("arm64", "fp asimd asimdhp bf16", ["neon_bf16", "neon"]),
        ("riscv64", "v", []),
    ],
)
def test_the_levels_of_a_processor(machine: str, flags: str, names: list[str]) -> None:
    assert [level.name for level in build.available(machine, frozenset(flags.split()))] == names


@pytest.mark.parametrize(
    ("maker", "more", "names"),
    [
        ("AuthenticAMD", "", ["avx512_bf16", "avx512", "avx2"]),
        ("AuthenticAMD", "avx512_fp16", ["avx512_bf16", "avx512", "avx2"]),
        ("GenuineIntel", "", ["avx512_bf16", "avx512", "avx2"]),  # Cooper Lake
        ("GenuineIntel", "avx512_fp16", ["avx512", "avx512_bf16", "avx2"]),
        ("GenuineIntel", "avx512_fp16 amx_tile amx_bf16", ["amx", "avx512", "avx512_bf16", "avx2"]),
    ],
)
def test_a_level_that_is_slower_than_the_next_comes_after_it(maker: str, more: str, names: list[str]) -> None:
    flags = next(level.needs for level in build.LEVELS if level.name == "avx512_bf16") | set(more.split())
    assert [level.name for level in build.available("x86_64", flags, maker)] == names
    hidden = flags - {"avx512cd"}  # by a virtual machine
    assert [level.name for level in build.available("x86_64", hidden, maker)] == ["avx2"]


def test_the_environment_names_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {level.name: level for level in build.LEVELS}
    high, low = by_name["avx512"], by_name["avx2"]
    monkeypatch.setattr(build, "available", lambda: [high, low])
    monkeypatch.setattr(build, "features", lambda: high.needs)
    assert build.chosen({}) == build.chosen({build.ENVIRONMENT: " "}) == high
    assert build.chosen({build.ENVIRONMENT: "avx2"}) == low
    for name, words in (("avx512_bf16", "lacks"), ("avx1024", "no such ISA level")):
        with pytest.raises(StartupError, match=words) as refusal:
            build.chosen({build.ENVIRONMENT: name})
        assert name in refusal.value.cause and "avx2" in refusal.value.fix


def test_a_wrong_level_is_found_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Path(__file__).parents[5] / "models" / "oarlock-demo" / "config.json"
    shutil.copy(demo, tmp_path)
    monkeypatch.setenv(build.ENVIRONMENT, "avx1024")
    with pytest.raises(StartupError, match="avx1024"):
        check_without_weights(WorkerConfig(str(tmp_path), device="cpu"))


@needs_kernels
def test_the_log_names_the_level_and_the_instructions_of_each_kernel(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    level = library.isa_level()
    description.log_kernels(torch.bfloat16)
    assert len(caplog.messages) == len(description.KERNELS)
    for kernel, message in zip(description.KERNELS, caplog.messages, strict=True):
        assert f"kernel={kernel!r} level={level.name} instructions='{level.vectors}" in message
    assert level.name in description.describe_kernels(torch.device("cpu"))


def test_without_kernels_one_line_has_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "why_not", lambda dtype: "there is no C++ compiler: install g++")
    description.log_kernels(torch.bfloat16)
    (message,) = caplog.messages
    assert "slower" in message and "install g++" in message
