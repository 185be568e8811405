"""Quantization methods, one module each: how to choose the numbers that a weight is rounded to.

Knows nothing of files or of models' names.
"""
