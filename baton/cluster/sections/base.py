"""The base of the configuration's sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Is a frozen table of the configuration; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
