"""Makes what a tool parser's module offers where its format is ``Tags`` alone.

Knows nothing of any one format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from baton.protos.json import Json
from baton.router.text.call_parts.tagged_calls import TaggedCalls, Tags
from baton.router.text.call_parts.tagged_rules import tagged_rules
from baton.router.text.lazy_calls import CallSyntax


class WithSchemas(Protocol):
    """Declares what a parser needs to know: the JSON schemas of the arguments, by tool."""

    @property
    def schemas(self) -> Mapping[str, Json]:
        """Returns the schemas by the tools' names."""


class TaggedFormat(msgspec.Struct, frozen=True):
    """Describes a format by its ``tags``; the methods are those of a tool parser's module."""

    tags: Tags

    def lazy_rules(self, name: str, before: str, syntax: CallSyntax) -> str:
        """Returns the rules of an answer in which each call has its tool's arguments, in the order of the schema
        (``lazy_calls.LazyRules``). Raises UnboundSchema.
        """
        return tagged_rules(self.tags, name, before, syntax)

    def make(self, context: WithSchemas | None = None) -> TaggedCalls:
        """Returns a parser for one answer."""
        return TaggedCalls(self.tags, {} if context is None else context.schemas)
