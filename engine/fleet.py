"""A fleet of replicas in virtual time, for `oarlock plan --simulate`."""

from engine.simulation.fleet.fleet import FleetReport, ReplicaModel, replica_model, simulate_fleet
from engine.simulation.fleet.records import PERCENTILES, Quantiles
from engine.simulation.fleet.requests import TracedRequest
from engine.simulation.fleet.routing import ROUTERS

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
