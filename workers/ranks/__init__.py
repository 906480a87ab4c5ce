"""Rank processes on one or several hosts: start, join, drive and end them. Does not know their computations."""
