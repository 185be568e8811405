"""What every section of the config is. Knows nothing of any of them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen table of the config file; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
