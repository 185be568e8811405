"""Makes quantized checkpoints: ``run.py`` goes through the layers, ``methods`` round, ``formats`` write.

Every architecture of the engine is quantized by the engine's own programs; memory holds a layer or two at a time.
"""
