"""Computes tensors from tensors: one folder per fused op, one file per implementation; ``reference.py`` is the
spec.

Knows nothing of models, plans, pages' owners or requests. Imports nothing else of ours.
"""
