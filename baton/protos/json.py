"""The type of JSON objects that clients send and receive."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonValue: TypeAlias = Any  # whatever JSON holds, its shape unknown until it is asked
Json: TypeAlias = dict[str, JsonValue]
