"""The base of the configuration's sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Is a frozen table of the configuration; an unknown key is an error, and so is a number that isn't finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
