"""Makes quantized checkpoints: ``run.py`` goes through the layers, ``methods`` quantize weights, ``formats`` write
them.

Every architecture of the engine is supported by the engine's own programs; memory holds a layer or two at a time.
"""
