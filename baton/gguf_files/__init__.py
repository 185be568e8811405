"""Serves a GGUF file alone: a directory in Hugging Face layout is made of what its header says."""
