"""The pass over a recording before it is replayed: what it counts, and recordings without their first step."""

from dataclasses import replace
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.replay.__main__ import _count
from oarlock.engine.replay.recording import Recording, RecordingExecutor, RecordingWriter
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
