"""Commands beside `serve` and `config`: one file each, named as the command, imported when it is asked for.

A command offers `HELP`, `add_arguments(parser)` and `run(arguments)`, which returns the exit code. It knows argparse
and may start a program of another room as a child; it imports no tensors.
"""
