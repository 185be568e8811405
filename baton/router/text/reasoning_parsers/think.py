"""DeepSeek R1, Qwen 3 and others: ``<think>…</think>`` before the answer; some prompts already open it."""

from __future__ import annotations

from baton.router.text.marks import MarkSplitter
from baton.router.text.reasoning_parsers import ReasoningParser

BEGIN, END = "<think>", "</think>"
MARKS = (BEGIN, END)


class Think:
    """Parses reasoning up to its end mark, then the answer; ``thinking``: the text begins inside the reasoning."""

    def __init__(self, thinking: bool) -> None:
        self._start: list[str] | None = None if thinking else []
        self._blank = True  # nothing but white space so far
        self._thought: MarkSplitter | None = MarkSplitter(END) if thinking else None
        self._trims = thinking

    def push(self, text: str) -> tuple[str, str]:
        """Returns the (reasoning, answer) text that ``text`` makes certain; reasoning can open only at the text's
        very beginning.
        """
        if self._start is not None:
            text = self._begin(text)
        if self._thought is None:
            return "", self._trimmed(text)
        thought, behind = self._thought.push(text)
        thought = self._trimmed(thought)
        if behind is None:
            return thought, ""
        self._thought, self._trims = None, True
        return thought, self._trimmed(behind)

    def flush(self) -> tuple[str, str]:
        """Returns the (reasoning, answer) text that was held back."""
        if self._start:
            return "", "".join(self._start)
        return (self._thought.flush(), "") if self._thought else ("", "")

    def _trimmed(self, text: str) -> str:
        """Line breaks next to the marks belong to neither side."""
        text = text.lstrip("\n") if self._trims else text
        self._trims = self._trims and not text
        return text

    def _begin(self, text: str) -> str:
        assert self._start is not None
        self._start.append(text)
        self._blank = self._blank and not text.strip()
        if self._blank:
            return ""
        text = "".join(self._start)
        begin = text.lstrip()
        if begin.startswith(BEGIN):
            self._thought, self._start = MarkSplitter(END), None
            self._trims = True
            return begin.removeprefix(BEGIN)
        if BEGIN.startswith(begin):
            return ""
        self._start = None
        return text


def make(thinking: bool = False) -> ReasoningParser:
    """Returns a parser for one answer; ``thinking``: the prompt ended inside the reasoning."""
    return Think(thinking)
