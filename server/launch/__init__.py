"""Processes that `oarlock serve` starts, watches and ends, on one host or several. It handles no requests."""
