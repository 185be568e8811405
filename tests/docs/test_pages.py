"""Pages that are written by hand have lines that fit, and sentences of all pages hold one thought."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH = 116  # columns, as of the code
GENERATED = {"configuration.md", "cuda.md", "fields.md", "metrics.md"}
RECORDS = {"notebook.md"}
MOST_WORDS = 25  # of a sentence, because a longer one is read twice
MOST_LONG = 10  # sentences of all pages that have more words; it only gets lower
KEPT_AS_THEY_ARE = ("|", "```", "#", "    ")  # tables, code and titles can't be wrapped


def _long_lines(page: Path) -> list[int]:
    found, is_code = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if len(line) > WIDTH and not is_code and not line.startswith(KEPT_AS_THEY_ARE):
            found.append(number)
    return found


def test_lines_of_prose_fit() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    long = {page.name: _long_lines(page) for page in pages if page.name not in GENERATED | RECORDS}
    assert {name: lines for name, lines in long.items() if lines} == {}


ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\"(\d-])|(?<=[.!?]\))\s+|(?<=[.!?]\*\*)\s+")


def paragraphs(text: str) -> Iterator[str]:
    """Yields paragraphs, items of lists and cells of tables; code and titles are left out."""
    lines: list[str] = []
    for line in [*re.sub(r"```.*?```", "", text, flags=re.S).splitlines(), ""]:
        begins = not line.strip() or line.startswith(("#", "|")) or ITEM.match(line)
        if begins and lines:
            yield " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split("|"))
        elif line.strip() and not line.startswith("#") and (lines or not line.startswith("    ")):
            lines.append(ITEM.sub("", line).strip())


def long_sentences(text: str) -> list[str]:
    """Returns the sentences of more than MOST_WORDS words; a link counts as its text."""
    found = (sentence for part in paragraphs(text) for sentence in END.split(LINK.sub(r"\1", part)))
    return [one for one in found if sum(bool(re.search(r"\w", word)) for word in one.split()) > MOST_WORDS]


def test_sentences_are_read_once() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "baton").rglob("*.md")]
    texts = {page: page.read_text() for page in pages if page.name != "CHANGELOG.md"}
    found = [f"{page.name}: {one}" for page, text in texts.items() for one in long_sentences(text)]
    assert len(found) <= MOST_LONG, "split these:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("word " * 25 + ".", 0),
        ("word " * 26 + ".", 1),
        ("Word " * 20 + "end. " + "Word " * 20 + "end.", 0),
        ("- " + "word " * 20 + "\n- " + "word " * 20, 0),
        ("| " + "word " * 20 + "| " + "word " * 30 + "|", 1),
        ("```\n" + "word " * 30 + "\n```\n\n    " + "word " * 30, 0),
        ("word " * 24 + "[two words](page.md#which-is-not-counted)", 1),
    ],
)
def test_a_long_sentence_is_found(text: str, count: int) -> None:
    assert len(long_sentences(text)) == count
