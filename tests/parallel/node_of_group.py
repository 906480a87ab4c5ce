"""A node that is not the head: `python -m tests.parallel.node_of_group WORKER_CONFIG NODES_CONFIG STOP_FD`, in JSON."""

import json
import logging
import sys

from oarlock.workers.config import NodesConfig, WorkerConfig
from oarlock.workers.errors import StartupError
from oarlock.workers.node import run_node

if __name__ == "__main__":
    config, nodes, stop_fd = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    try:
        status = run_node(
            WorkerConfig.from_json(config), NodesConfig(**json.loads(nodes)), lambda *_: None, stop_fd=int(stop_fd)
        )
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        status = error.exit_code
    sys.exit(status)
