"""A long and a short prompt, as token ids."""

from __future__ import annotations

PROMPT = tuple(range(40))
SHORT = (1, 2, 3)
