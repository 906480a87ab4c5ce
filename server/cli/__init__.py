"""Command line of `oarlock`: its parser, one file or folder per command, terminal output. It serves nothing itself.

A command imports nothing heavy before it runs, and never tensors: those are left to programs of `workers/`.
"""
