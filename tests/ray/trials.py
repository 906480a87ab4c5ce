"""Faults of replicas on Ray Serve, one after another on one cluster, and what followed. Runs in Ray's environment.

python -m tests.ray.trials [NAME...] [--results FILE.json]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from pathlib import Path

import httpx
import openai

from tests.ray import deployments, faults, passing
from tests.ray.cluster import Cluster
from tests.ray.trial import TRIALS

PARTS = deployments, faults, passing  # each has added its trials to the table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ray.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TRIAL", help=f"of {', '.join(TRIALS)}; none means all")
    parser.add_argument("--results", type=Path, help="write what followed into this file")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in TRIALS]
    if unknown:
        parser.error(f"unknown trial {unknown[0]}; there are {', '.join(TRIALS)}")
    rows, problems = [], []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is ended all the same
    with Cluster(num_cpus=8, num_gpus=4) as cluster:
        for name in given.names or TRIALS:
            began = time.monotonic()
            try:
                rows.append(TRIALS[name](cluster))
            except (AssertionError, httpx.HTTPError, openai.OpenAIError) as error:
                problems.append(name)
                traceback.print_exception(error)
                print(f"    FAILED  {name}", flush=True)
                cluster.clear()
            else:
                _, followed, lost = rows[-1]
                print(f"    ok      {name} ({time.monotonic() - began:.0f} s): {followed} (lost: {lost})", flush=True)
        if problems:
            print(cluster.logs()[-20_000:])
    if given.results:
        given.results.write_text(json.dumps(rows))
    print(f"failed: {', '.join(problems)}" if problems else f"{len(rows)} trials, all well")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
