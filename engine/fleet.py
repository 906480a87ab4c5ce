"""A fleet of replicas in virtual time, for `oarlock plan --simulate`."""

from oarlock.engine.simulation.fleet import (
    PERCENTILES,
    ROUTERS,
    FleetReport,
    Quantiles,
    ReplicaModel,
    TracedRequest,
    replica_model,
    simulate_fleet,
)

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
