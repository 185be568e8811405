"""Fused tensor ops: one folder per op, one file per implementation, of which ``reference.py`` is the specification.

Knows nothing of models, plans, requests or who owns pages. Imports no other package of Baton.
"""
