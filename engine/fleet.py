"""A fleet of replicas in virtual time, for `oarlock plan --simulate`."""

from oarlock.engine.simulation.fleet.fleet import FleetReport, ReplicaModel, replica_model, simulate_fleet
from oarlock.engine.simulation.fleet.records import PERCENTILES, Quantiles
from oarlock.engine.simulation.fleet.requests import TracedRequest
from oarlock.engine.simulation.fleet.routing import ROUTERS

__all__ = [
    "PERCENTILES",
    "ROUTERS",
    "FleetReport",
    "Quantiles",
    "ReplicaModel",
    "TracedRequest",
    "replica_model",
    "simulate_fleet",
]
