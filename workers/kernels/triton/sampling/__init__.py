"""Sampling from whole rows of logits on a CUDA device: launches whose shapes do not depend on what is sampled.

Everywhere below: L rows of logits in this launch, V ids, B blocks of 128 ids. Row p of the logits is row `first + p` of
the columns (`workers/sampling/columns.py`) and of the outputs.
"""
