"""The name under which a model is served.

Imports no settings, so that a worker starts fast.
"""

from __future__ import annotations

from pathlib import Path

DEMO_NAME = "demo"  # of the model that is served where none is named, and of its folder


def paced_profile(device: str) -> str:
    """Returns PROFILE of the device name ``paced:PROFILE``; "" for other devices."""
    kind, _, profile = device.partition(":")
    return profile if kind == "paced" else ""


def model_id(model_name: str, model: str, device: str) -> str:
    """Returns ``model_name`` if it is set, else the last part of path or id ``model``, else the paced profile of
    ``device``.
    """
    return model_name or Path(model).name or paced_profile(device)
