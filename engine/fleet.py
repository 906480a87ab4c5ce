"""A fleet of replicas in virtual time, for `oarlock plan --simulate`."""

from oarlock.engine.simulation.fleet import ROUTERS, FleetReport, ReplicaModel, replica_model, simulate_fleet
from oarlock.engine.simulation.fleet_requests import PERCENTILES, Quantiles, TracedRequest

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
