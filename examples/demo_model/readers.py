"""Readers that turn the files of a Debian package into documents of English prose."""

from __future__ import annotations

import gzip
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path


@dataclass
class Document:
    """A document as a title and paragraphs; headings are paragraphs that start with ``# ``."""

    source: str
    title: str
    paragraphs: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the document as plain text, paragraphs separated by blank lines."""
        body = [p.removeprefix("# ") for p in self.paragraphs]
        head = [self.title] if self.title else []
        return "\n\n".join(head + body)


_BLOCK_NAMES = "p div li dt dd h1 h2 h3 h4 h5 h6 td th tr ul ol dl section title page body item blockquote"
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_SKIP_NAMES = "pre table script style nav header footer screen math svg head info sup"
_SKIP = frozenset(_SKIP_NAMES.split())
_VOID = frozenset(["br", "hr", "img", "meta", "link", "input", "col", "area", "base", "wbr", "a/"])
_HEADINGS = frozenset(["h1", "h2", "h3", "h4", "h5", "h6", "title"])
_NAV_CLASS = re.compile(
    r"(nav|toc|footer|header|sidebar|breadcrumb|related|copyright|highlight|programlisting|sig )"
)
_REPLACE = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": " - ",
        "\u2026": "...",
        "\u00a0": " ",
        "\u00b6": "",
        "\u2010": "-",
        "\u2011": "-",
        "\u2212": "-",
        "\u00ad": "",
        "\u200b": "",
        "\u2192": "->",
        "\u00ab": '"',
        "\u00bb": '"',
        "\u00b4": "'",
        "\u2022": "",
    }
)
_COMMON_WORDS = (
    "the a an of to and in is are it that for you as be on with this or by not can if from was he his I "
    "they we at have has will which when all their your its but one my our then there so do any no may "
    "more other use"
)
_COMMON = frozenset(_COMMON_WORDS.split())


def clean(text: str) -> str:
    """Normalise quotes, dashes and white space to plain ASCII typing."""
    text = re.sub(r"\s+", " ", text.translate(_REPLACE)).strip()
    return re.sub(r" ([,.;:!?)])(?=\s|$)", r"\1", text)


def is_prose(text: str, minimum: int = 40) -> bool:
    """Tell whether a paragraph reads as English prose rather than code, a table row or a fragment."""
    if len(text) < minimum or not re.search(r"[.!?:;\"')]$", text):
        return False
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in text)
    odd = sum(c in "{}<>|=_\\/@#$%^*~[]+`" or not c.isascii() for c in text)
    words = re.findall(r"[A-Za-z']+", text)
    if not words or letters / len(text) < 0.88 or odd / len(text) > 0.02:
        return False
    small = sum(w in _COMMON for w in words)
    return small / len(words) > 0.18


class _Extractor(HTMLParser):
    """Collect prose paragraphs and headings from an HTML or Mallard page."""

    def __init__(self) -> None:
        """Start with an empty page."""
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []
        self._stack: list[tuple[str, bool]] = []
        self._buffer: list[str] = []
        self._skipping = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element; block elements end the running paragraph."""
        if tag in _VOID:
            self._buffer.append(" ")
            return
        classes = next((v or "" for k, v in attrs if k == "class"), "")
        skip = tag in _SKIP or (tag in ("div", "ul", "span", "a") and bool(_NAV_CLASS.search(classes + " ")))
        skip = skip or (tag == "a" and "headerlink" in classes)
        if tag in _BLOCKS:
            self._flush()
        self._stack.append((tag, skip))
        self._skipping += skip

    def handle_endtag(self, tag: str) -> None:
        """Close the nearest open element of this name."""
        if not any(name == tag for name, _ in self._stack):
            return
        if tag in _BLOCKS:
            self._flush()
        while self._stack:
            name, skip = self._stack.pop()
            self._skipping -= skip
            if name == tag:
                break

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Ignore empty elements."""

    def handle_data(self, data: str) -> None:
        """Add text to the running paragraph unless inside a skipped element."""
        if not self._skipping:
            self._buffer.append(data)

    def _flush(self) -> None:
        """End the running paragraph."""
        text = clean("".join(self._buffer))
        self._buffer.clear()
        if text:
            kind = next((n for n, _ in reversed(self._stack) if n in _BLOCKS), "p")
            self.blocks.append((kind, text))


def _heading(text: str) -> str:
    """Strip section numbers and stray marks from a heading."""
    text = re.sub(r"^(Chapter |Appendix )?[A-Z]?[\d.]+(?=[\s.])[.\s]*|^[A-Z]\.\d[\d.]*\s+", "", text)
    return text.strip(" #:.")


def is_heading(text: str) -> bool:
    """Tell whether a heading is short words rather than an identifier."""
    return 3 < len(text) < 70 and re.fullmatch(r"[A-Za-z][A-Za-z ,'\-]+", text) is not None


def _read_text(path: Path) -> str:
    """Read a file, unpacking gzip and dictzip."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    return raw.decode("utf-8", errors="replace")


def read_html(path: Path, name: str) -> Iterator[Document]:
    """Read one HTML or Mallard page as one document."""
    parser = _Extractor()
    parser.feed(_read_text(path))
    parser.close()
    document = Document(name, "")
    for kind, text in parser.blocks:
        if kind in _HEADINGS:
            heading = _heading(text)
            if is_heading(heading):
                document.paragraphs.append(f"# {heading}")
        elif is_prose(text, 25 if kind == "li" else 40):
            document.paragraphs.append(f"- {text}" if kind == "li" else text)
    yield document


def read_pod(path: Path, name: str) -> Iterator[Document]:
    """Read one Perl POD manual page."""
    document = Document(name, "")
    for block in re.split(r"\n\s*\n", _read_text(path)):
        if block[:1].isspace():
            continue
        text = clean(_strip_pod(block))
        if match := re.match(r"=head\d (.+)", text):
            heading = _heading(match[1].capitalize() if match[1].isupper() else match[1])
            if is_heading(heading):
                document.paragraphs.append(f"# {heading}")
        elif not text.startswith("=") and is_prose(text):
            document.paragraphs.append(text)
    yield document


def _strip_pod(text: str) -> str:
    """Drop POD formatting codes, innermost first."""
    text = re.sub(r"X<[^<>]*>", "", text)
    for _ in range(4):
        text = re.sub(r"L<([^<>|]*\|)?([^<>]*)>", lambda m: (m[1] or "").rstrip("|") or m[2], text)
        text = re.sub(r"[BICFSN]<+ ?([^<>]*?) ?>+", r"\1", text)
        text = text.replace("E<lt>", "<").replace("E<gt>", ">")
    return text


def read_kjv(path: Path, name: str) -> Iterator[Document]:
    """Read the King James Bible through its own retrieval program, one document per chapter."""
    data = path.parents[3] / "bible-kjv-text" / "usr" / "lib"
    if not data.is_dir():
        return
    command = [str(path), "-l9999", "-p", str(data), "gen1:1-rev22:21"]
    output = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False).stdout
    document: Document | None = None
    for line in output.splitlines():
        if verse := re.match(r"\s+\d+ (.+)", line):
            if document is not None:
                document.paragraphs.append(clean(verse[1]))
        elif title := re.match(r"([1-3A-Z][\w ]+ \d+)\s*$", line):
            if document is not None:
                yield _join_verses(document)
            document = Document(name, title[1])
    if document is not None:
        yield _join_verses(document)


def _join_verses(document: Document) -> Document:
    """Join verses into paragraphs of four."""
    verses = document.paragraphs
    document.paragraphs = [" ".join(verses[i : i + 4]) for i in range(0, len(verses), 4)]
    return document


def read_foldoc(path: Path, name: str) -> Iterator[Document]:
    """Read the Free On-line Dictionary of Computing, one document per entry."""
    for entry in re.split(r"\n(?=\S)", _read_text(path)):
        head, _, body = entry.partition("\n")
        body = re.sub(r"\{\(?https?:[^}]*\}|\(\d{4}-\d\d-\d\d\)|<[^<>]{3,60}>", "", body)
        body = re.sub(r"[{}]", "", body)
        paragraphs = [clean(p) for p in re.split(r"\n\s*\n", body)]
        paragraphs = [re.sub(r"^\([A-Z]{2,6}\) ", "", p) for p in paragraphs if is_prose(p)]
        if paragraphs and re.fullmatch(r"[A-Za-z][\w +\-/.']{1,40}", head.strip()):
            yield Document(name, head.strip(), paragraphs)


def read_devil(path: Path, name: str) -> Iterator[Document]:
    """Read The Devil's Dictionary, one document per entry."""
    for entry in re.split(r"\n\n(?=[A-Z]{2,}[A-Z\- ]*, (?:n|v|adj|adv|pp|p|v\.[it])\.)", _read_text(path)):
        word, _, body = clean(entry).partition(", ")
        body = re.sub(r"^(n|v|adj|adv|v\.[it])\.(pl\.)?\s+", "", body)
        if word.isupper() and is_prose(body):
            yield Document(name, word.capitalize(), [body])


def read_jargon(path: Path, name: str) -> Iterator[Document]:
    """Read the Jargon File, one document per entry."""
    for entry in re.split(r"\n\s+:(?=\w)", _read_text(path))[1:]:
        head, _, body = entry.partition("\n")
        paragraphs = [re.sub(r"\[[^\]]*\]|/[^/ ]+/,? ?", "", clean(p)) for p in re.split(r"\n\s*\n", body)]
        paragraphs = [clean(p) for p in paragraphs if is_prose(p)]
        paragraphs = [re.sub(r"[{}]|^(\d\. )?(n|adj|vt|vi|v|adv|interj|excl)\. ", "", p) for p in paragraphs]
        title = head.partition(":")[0].strip()
        if paragraphs and len(title) < 40:
            yield Document(name, title, paragraphs)


_PARTS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def read_wordnet(path: Path, name: str) -> Iterator[Document]:
    """Read one WordNet data file, one document per synset: word, part of speech, gloss, examples."""
    for line in _read_text(path).splitlines():
        if line.startswith("  "):
            continue
        fields, _, gloss = line.partition(" | ")
        columns = fields.split()
        word = columns[4].replace("_", " ").split("(")[0]
        definition, _, examples = clean(gloss).partition('; "')
        if not re.fullmatch(r"[A-Za-z][a-z \-]+", word) or len(definition) < 15:
            continue
        parts = [f"{_PARTS[columns[2]]}: {definition}"]
        parts += [e for e in examples.rstrip('"').split('"; "')[:2] if len(e) > 12]
        yield Document(name, word, parts)


def read_wesnoth(path: Path, name: str) -> Iterator[Document]:
    """Read the spoken and narrated lines of one game scenario as a dialogue."""
    document = Document(name, "")
    text = _read_text(path)
    if title := re.search(r'^\s*name= *_ *"([A-Z][\w \',\-]+)"', text, re.MULTILINE):
        document.title = title[1] if "scenario" in path.parts[-2] else ""
    pattern = r'(?:speaker=([\w ]+)\s*\n(?:[^\[\]"]*\n)?)?\s*(?:message|story)= *_ *"([^"]+(?:""[^"]*)*)"'
    for match in re.finditer(pattern, text):
        speaker, line = match[1], clean(match[2].replace('""', '"'))
        if len(line) < 15 or re.search(r"[<>{}|$]", line):
            continue
        named = speaker and speaker not in ("narrator", "unit", "second_unit") and speaker.isalpha()
        document.paragraphs.append(f'{speaker}: "{line}"' if named else line)
    yield document


def read_freeciv(path: Path, name: str) -> Iterator[Document]:
    """Read the help topics of a strategy game, one document per topic."""
    for topic in re.split(r"\n\[help_", _read_text(path)):
        title = re.search(r'name *= *_\("(?:\?\w+:)?\W*([^"]+)"\)', topic)
        strings = re.findall(r'_\("\\?\n?([^"]{40,})"', topic)
        body = [clean(s.replace("\\\n", "").replace("\\n", " ")) for s in strings]
        body = [b for b in body if is_prose(b)]
        if body and title:
            yield Document(name, title[1].strip(), body)


READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    "html": read_html,
    "pod": read_pod,
    "kjv": read_kjv,
    "foldoc": read_foldoc,
    "devil": read_devil,
    "jargon": read_jargon,
    "wordnet": read_wordnet,
    "wesnoth": read_wesnoth,
    "freeciv": read_freeciv,
}
