"""Simulates a fleet of replicas in virtual time: routing, real schedulers, and the times of every request."""
