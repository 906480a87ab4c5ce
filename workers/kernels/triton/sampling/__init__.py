"""Sampling from whole rows of logits on a CUDA device. The shapes of launches do not depend on the sampling parameters.

In all modules: L rows of logits in this launch, V ids, B blocks of 128 ids. Row p of the logits is row `first + p` of
the columns (`workers/sampling/columns.py`) and of the outputs.
"""
