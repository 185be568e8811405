"""Reads ggml's blocks of quantized weights. Knows nothing of files."""
