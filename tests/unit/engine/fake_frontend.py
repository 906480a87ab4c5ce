"""A frontend that starts an engine, prints its process id and then waits until a test kills it."""

import asyncio
import os
import sys
from pathlib import Path

from oarlock.engine.client import EngineClient
from tests.unit.engine.engine_fakes import make_config

_ENGINE = str(Path(__file__).with_name("fake_engine.py"))


async def main(scenario: str, mode: str) -> None:
    config = make_config()
    config = type(config)(config.worker.with_(model_path=scenario))
    if mode == "while_loading":

        def on_progress(phase: str, fraction: float, detail: str = "", /) -> None:
            if fraction == 1.0:
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                print(children[0], flush=True)

        await EngineClient.start(config, on_progress, command=[_ENGINE])
    client = await EngineClient.start(config, lambda *_: None, command=[_ENGINE])
    print(client.pid, flush=True)
    await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
