"""Holds one file per architecture, named as its Hugging Face ``model_type``, with a function ``program(config) ->
Program``. A dash in the name is an underscore in the file's.

Knows nothing of weights' values. An unknown name lists the choices.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Program


def architectures() -> tuple[str, ...]:
    """Returns every known ``model_type``, sorted, with underscores for dashes."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py")))


def program_for(config: ModelConfig) -> Program:
    """Returns the program of the architecture that ``config.model_type`` names. Raises CheckpointError listing the
    known ones, or naming a field that isn't supported.
    """
    name = config.model_type.replace("-", "_")
    if name not in architectures():
        choices = ", ".join(architectures())
        raise config.error(
            "model_type", f"is {config.model_type!r}, an unknown architecture; choose from {choices}"
        )
    return import_module(f"{__name__}.{name}").program(config)
