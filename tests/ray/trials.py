"""Faults of replicas on Ray Serve, one after another on one cluster, and what followed. Runs in Ray's environment.

python -m tests.ray.trials [NAME...]
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback

import httpx
import openai
import psutil

from tests.ray import deployments, faults, node_trials, passing
from tests.ray.cluster import Cluster
from tests.ray.nodes import NodeCluster
from tests.ray.trial import NODE_TRIALS, TRIALS, Trial

PARTS = deployments, faults, passing, node_trials  # each has added its trials to a table


def main() -> int:
    known = [*TRIALS, *NODE_TRIALS]
    parser = argparse.ArgumentParser(prog="python -m tests.ray.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TRIAL", help=f"of {', '.join(known)}; none means all")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"unknown trial {unknown[0]}; there are {', '.join(known)}")
    problems: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is ended all the same
    for table, made in (TRIALS, lambda: Cluster(num_cpus=8, num_gpus=4)), (NODE_TRIALS, NodeCluster):
        chosen = {name: table[name] for name in given.names or table if name in table}
        if chosen:
            with made() as cluster:
                run(chosen, cluster, problems)
    print(f"failed: {', '.join(problems)}" if problems else "all well")
    return 1 if problems else 0


def run(trials: dict[str, Trial], cluster: Cluster, problems: list[str]) -> None:
    """Run trials one after another and print the results. Add the names of failed trials to `problems`."""
    failed = len(problems)
    for name, trial in trials.items():
        began = time.monotonic()
        try:
            done, followed, lost = trial(cluster)
        except (AssertionError, httpx.HTTPError, openai.OpenAIError, psutil.Error) as error:
            problems.append(name)
            traceback.print_exception(error)
            print(f"    FAILED  {name}", flush=True)
            cluster.clear()
        else:
            seconds = time.monotonic() - began
            print(f"    ok      {name} ({seconds:.0f} s): {done}: {followed} (requests lost: {lost})", flush=True)
    if len(problems) > failed:
        print(cluster.logs()[-20_000:])


if __name__ == "__main__":
    sys.exit(main())
