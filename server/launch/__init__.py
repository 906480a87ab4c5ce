"""Processes that `oarlock serve` starts, watches and ends, on one host or several. It answers no requests."""
