"""The name of a served model. Knows nothing of settings, so that a worker reads it fast."""

from __future__ import annotations

from pathlib import Path


def paced_profile(device: str) -> str:
    """Returns PROFILE of the device name ``paced:PROFILE``, or an empty string for other devices."""
    kind, _, profile = device.partition(":")
    return profile if kind == "paced" else ""


def model_id(model_name: str, model: str, device: str) -> str:
    """Returns ``model_name`` if it is set, else the last part of the model's path, else the paced profile."""
    return model_name or Path(model).name or paced_profile(device)
