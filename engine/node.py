"""Runs a host that has only ranks: `workers/node.py`, for the server, which alone knows the operator's settings."""

from oarlock.workers.node import check_network, run_node

__all__ = ["check_network", "run_node"]
