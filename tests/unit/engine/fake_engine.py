"""The real engine process with fake ranks, which tests start instead of `python -m oarlock.engine.core`.

The scenario is JSON in `model_path`, the one field of the configuration that is free text.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # which is not there by itself in a process of ours

from oarlock.base.errors import StartupError
from oarlock.base.python_child import die_with_parent, leave_signals_to_parent
from oarlock.engine.config import EngineConfig
from oarlock.engine.core.process import run
from tests.unit.engine.engine_fakes import FakeExecutor, Faults, make_info


class ScenarioExecutor(FakeExecutor):
    """Ranks that are slow, stuck or suddenly gone."""

    def __init__(self, worker, scenario: dict) -> None:
        config = EngineConfig(worker)
        faults = Faults(die_at_step=scenario.get("die_at_step"), hang_at_step=scenario.get("hang_at_step"))
        super().__init__(config, make_info(config, scenario.get("num_blocks", 33)), faults)
        self._scenario = scenario

    def collect(self):
        time.sleep(self._scenario.get("step_s", 0.0))
        return super().collect()

    def submit(self, step, *, masks_follow=False) -> None:
        if step.step_id == self._scenario.get("stuck_at_step"):
            time.sleep(1000)
        if step.step_id == self._scenario.get("killed_at_step"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(step, masks_follow=masks_follow)

    def close(self, failure: Exception | None = None) -> None:
        time.sleep(self._scenario.get("close_s", 0.0))
        super().close()


def start_executor(worker, on_progress, *, nodes, leave_pid):
    scenario = json.loads(worker.model_path)
    for fraction in (0.0, 0.5, 1.0):
        on_progress("loading", fraction)
    time.sleep(scenario.get("load_s", 0.0))
    if scenario.get("fails") == "startup":
        raise StartupError("The model has 7 heads.", "Use --tensor-parallel-size 7.", 3)
    if scenario.get("fails") == "bug":
        raise KeyError("nonsense")
    if scenario.get("fails") == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return ScenarioExecutor(worker, scenario)


if __name__ == "__main__":
    fd, parent_pid, _ = map(int, sys.argv[1:])
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    sys.exit(run(fd, start_executor, loading_timeout_s=float(os.environ.get("LOADING_TIMEOUT_S", "300"))))
