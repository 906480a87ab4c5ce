"""Data-parallel replicas of one model: their engines, their cached prefixes, and the choice of one for a request."""
