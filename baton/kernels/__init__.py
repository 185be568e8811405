"""Tensors in, tensors out: one folder per fused op, one file per implementation, ``reference.py`` the spec.

Knows nothing of models, plans, pages' owners or requests. Imports nothing of ours.
"""
