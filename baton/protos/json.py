"""The type of JSON objects that clients send and receive."""

from __future__ import annotations

from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]  # an object whose values are whatever JSON holds: the one place where Any is true
