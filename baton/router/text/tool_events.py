"""Defines what a parser tells of an answer's text. Knows nothing of formats."""

from __future__ import annotations

import msgspec


class TextEvent(msgspec.Struct, frozen=True):
    """Carries text of the answer that is no part of a call."""

    text: str


class ThoughtEvent(msgspec.Struct, frozen=True):
    """Carries text of the model's reasoning, where a format tells it apart from the answer among calls."""

    text: str


class CallEvent(msgspec.Struct, frozen=True):
    """Says that call number ``index`` (from 0) of function ``name`` begins."""

    index: int
    name: str


class ArgumentsEvent(msgspec.Struct, frozen=True):
    """Carries the next part of the JSON text of call ``index``'s arguments."""

    index: int
    text: str


Event = TextEvent | ThoughtEvent | CallEvent | ArgumentsEvent
