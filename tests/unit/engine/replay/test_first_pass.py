"""The pass over a recording before it is replayed: what it counts, and recordings without their first step."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.replay.__main__ import _check_adapters, _config, _count
from oarlock.engine.replay.recording import Recording, RecordingExecutor, RecordingWriter
from oarlock.workers.adapter_digest import adapter_digest
from oarlock.workers.config import GroupInfo
from tests.unit.engine.engine_fakes import FakeExecutor, make_config, make_info, make_request

FULL, WINDOW, SLOTS = GroupInfo(40, 0), GroupInfo(30, 0, span=6), GroupInfo(20, 0, is_recurrent=True)
MODELS = {
    "one group": (),
    "full and window": (WINDOW, FULL),
    "slots and pages": (SLOTS, FULL),
    "only slots": (SLOTS, SLOTS),
}


def recorded(path: Path, groups: tuple[GroupInfo, ...], *, from_step: int) -> Recording:
    """A recording of an engine that serves two requests, without the steps before `from_step`."""
    config = make_config()
    config = replace(config, worker=config.worker.with_(model_path=str(path.parent)))
    fake = FakeExecutor(config, make_info(config, groups=groups))
    recorder = RecordingExecutor(fake, RecordingWriter(str(path)), None)
    engine_core = EngineCore(config, fake, lambda: 0.0)
    for number in (1, 2):
        engine_core.scheduler.add(make_request(number, range(number, number + 9), max_tokens=6), 0.0)
    while True:
        engine_core.executor = fake if fake.num_steps < from_step else recorder
        if engine_core.begin() is None:
            break
        engine_core.finish()
    recorder.close()
    return Recording(str(path))


@pytest.mark.parametrize("name", MODELS)
def test_a_recording_without_its_first_step_is_refused(name: str, tmp_path: Path) -> None:
    counts = _count(recorded(tmp_path / "whole", MODELS[name], from_step=0))
    assert counts.num_steps == counts.num_outputs == 6
    assert counts.num_blocks == (1 if name == "only slots" else 9)  # two sequences of four blocks
    with pytest.raises(StartupError, match="does not begin with the first step: step 2"):
        _count(recorded(tmp_path / "late", MODELS[name], from_step=1))


def recorded_with_adapter(path: Path, directory: Path, *, from_step: int) -> Recording:
    """A recording of one request with the adapter in `directory`, without the steps before `from_step`."""
    config = make_config(max_loras=1)
    known = {"lora_adapters": (("poems", str(directory)), ("never used", "/nowhere"))}
    config = replace(config, worker=config.worker.with_(model_path=str(path.parent), **known))
    fake = FakeExecutor(config, make_info(config))
    recorder = RecordingExecutor(fake, RecordingWriter(str(path)), None)
    times = itertools.count()
    engine_core = EngineCore(config, fake, lambda: 0.01 * next(times))
    assert engine_core.scheduler.adapters is not None
    engine_core.scheduler.adapters.add("poems", adapter_digest(directory), str(directory), 0.0)
    engine_core.scheduler.add(make_request(1, range(9), max_tokens=6, adapter="poems"), 0.0)
    while engine_core.scheduler.has_work:
        engine_core.executor = fake if fake.num_steps < from_step else recorder
        if engine_core.begin() is not None:
            engine_core.finish()
    recorder.close()
    return Recording(str(path))


def test_the_adapters_of_a_recording_must_be_here(tmp_path: Path) -> None:
    directory = tmp_path / "poems"
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes(b"{}")
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    recording = recorded_with_adapter(tmp_path / "whole", directory, from_step=0)
    counts = _count(recording)
    assert not _config(recording, counts, None, None, None).lora_adapters, "an adapter that is not used may be gone"
    (command,) = counts.adapters.values()
    assert (command.name, command.directory) == ("poems", str(directory))
    _check_adapters(counts)
    with pytest.raises(StartupError, match="does not begin with the first step"):
        _count(recorded_with_adapter(tmp_path / "late", directory, from_step=counts.num_steps - 3))
    weights.write_bytes(b"other weights")
    with pytest.raises(StartupError, match=r"'poems' .* differs from the content"):
        _check_adapters(counts)
    weights.unlink()
    with pytest.raises(StartupError, match="cannot be read") as caught:
        _check_adapters(counts)
    assert str(directory) in caught.value.fix


def test_an_adapter_that_was_loaded_before_the_recording_is_refused(tmp_path: Path) -> None:
    """Although the recording fills the same slot before, with another adapter that it loads itself."""
    config = make_config(max_loras=1)
    config = replace(config, worker=config.worker.with_(model_path=str(tmp_path)))
    fake = FakeExecutor(config, make_info(config))
    recorder = RecordingExecutor(fake, RecordingWriter(str(tmp_path / "late")), None)
    times = itertools.count()
    engine_core = EngineCore(config, fake, lambda: 0.01 * next(times))
    adapters = engine_core.scheduler.adapters
    assert adapters is not None
    for number, name in enumerate(("before", "during"), 1):
        adapters.add(name, number.to_bytes(16, "big").hex(), f"/{name}", 0.0)
        while adapters.registry.num_ready < number:
            engine_core.begin()
            engine_core.finish()
        engine_core.executor = recorder
    for number, name in enumerate(("during", "before"), 1):
        engine_core.scheduler.add(make_request(number, range(9), max_tokens=6, adapter=name), 0.0)
        while engine_core.scheduler.has_work:
            engine_core.begin()
            engine_core.finish()
    recorder.close()
    with pytest.raises(StartupError, match="does not begin with the first step"):
        _count(Recording(str(tmp_path / "late")))
