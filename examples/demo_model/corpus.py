"""Assemble the demo model's training text from openly licensed Debian packages.

``fetch`` downloads and unpacks the packages named in :data:`SOURCES` with ``apt-get download`` and
``dpkg -x``; ``build`` strips markup, drops anything that does not read as English prose, splits off a seeded
held-out set by document, writes chat samples made mechanically from the same text, and stores everything as
JSON lines.  Nothing is downloaded by ``build``, and the same packages give the same output byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chats import Turn, article_for, conversations, document_turns, small_talk
from readers import READERS, Document

SEED = 20240607
HELDOUT_SHARE = 0.015
HELDOUT_EXCERPT_BYTES = 190_000
HELDOUT_DOCUMENT_CHARS = 8000
DOCUMENT_BREAK = "\n\f"


@dataclass(frozen=True)
class Source:
    """One Debian package (or family of packages) and how to read it."""

    packages: tuple[str, ...]
    reader: str
    pattern: str
    licence: str
    exclude: str = r"(?!)"
    repeat: int = 1
    excerpt: bool = False
    """Whether the repository may quote held-out documents: public domain or permissive licences only."""


_WESNOTH = (
    "did",
    "dm",
    "dw",
    "ei",
    "httt",
    "l",
    "low",
    "nr",
    "sof",
    "sota",
    "sotbe",
    "thot",
    "trow",
    "tsg",
    "utbs",
)
_INDEX = (
    r"(genindex|index-|bookindex|contents\.html|changelog|[-_]index|py-modindex|release-|search\.html"
    r"|copyright)"
)

SOURCES: tuple[Source, ...] = (
    Source(
        ("bible-kjv-text", "bible-kjv"),
        "kjv",
        "usr/bin/bible",
        "public domain",
        excerpt=True,
    ),
    Source(("jargon-text",), "jargon", "**/jargon.txt.gz", "public domain"),
    Source(("dict-devil",), "devil", "**/devil.dict.dz", "public domain", excerpt=True),
    Source(("dict-foldoc",), "foldoc", "**/foldoc.dict.dz", "GFDL-1.1+, no invariant sections", repeat=2),
    Source(("wordnet-base",), "wordnet", "**/data.*", "WordNet licence", excerpt=True),
    Source(tuple(f"wesnoth-1.16-{c}" for c in _WESNOTH), "wesnoth", "**/*.cfg", "GPL-2+", repeat=3),
    Source(("freeciv-data",), "freeciv", "**/helpdata.txt", "GPL-2+", repeat=2),
    Source(("debian-handbook",), "html", "**/html/en-US/*.html", "GPL-2+ / CC-BY-SA-3.0", repeat=3),
    Source(("debian-faq",), "html", "**/FAQ/*.en.html", "its own copyleft notice", repeat=2),
    Source(("debian-policy",), "html", "**/policy.html/*.html", "GPL-2+"),
    Source(("debian-reference-en",), "html", "**/*.en.html", "GPL-2+", repeat=2),
    Source(
        ("developers-reference",),
        "html",
        "usr/share/developers-reference/*.html",
        "GPL-2",
        exclude=r"developers-reference\.html",
    ),
    Source(("maint-guide",), "html", "**/*.en.html", "GPL-2+"),
    Source(("harden-doc",), "html", "**/en-US/*.html", "GPL-2", repeat=2),
    Source(("aptitude-doc-en",), "html", "**/*.html", "GPL-2+"),
    Source(("installation-guide-amd64",), "html", "**/en/*.html", "GPL-2", repeat=2),
    Source(("gimp-help-en",), "html", "**/en/*.html", "GFDL-1.2+, no invariant sections", repeat=2),
    Source(("gnome-user-docs",), "html", "**/C/**/*.page", "CC-BY-SA-3.0", repeat=3),
    Source(("libreoffice-help-en-us",), "html", "**/en-US/text/**/*.html", "MPL-2.0"),
    Source(("git-doc",), "html", "**/*.html", "GPL-2", exclude=r"RelNotes"),
    Source(("python3.11-doc",), "html", "**/html/**/*.html", "PSF-2.0", excerpt=True),
    Source(("postgresql-doc-15",), "html", "**/html/*.html", "PostgreSQL", exclude=r"html/release", excerpt=True),
    Source(
        ("rust-doc",),
        "html",
        "**/html/*book/**/*.html",
        "MIT or Apache-2.0",
        exclude=r"print\.html",
        repeat=2,
        excerpt=True,
    ),
    Source(("apache2-doc",), "html", "**/manual/en/**/*.html", "Apache-2.0", excerpt=True),
    Source(("exim4-doc-html",), "html", "**/*.html", "GPL-2+"),
    Source(("octave-doc",), "html", "**/octave.html/*.html", "GPL-3+"),
    Source(
        ("perl-doc",),
        "pod",
        "**/*.pod",
        "Artistic or GPL-1+",
        exclude=r"(perltoc|perluniprops|perl\d+delta|perlapi|perlebcdic|perlmodlib)",
    ),
)


def fetch(directory: Path) -> None:
    """Download and unpack every source package below ``directory``."""
    archives = directory / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    for package in (p for source in SOURCES for p in source.packages):
        subprocess.run(["apt-get", "download", package], cwd=archives, check=True)
        archive = next(archives.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", str(archive), str(directory / package)], check=True)


def read_source(source: Source, directory: Path) -> Iterator[Document]:
    """Read every document of one source."""
    exclude = re.compile(f"{source.exclude}|{_INDEX}" if source.reader == "html" else source.exclude)
    for package in source.packages:
        root = directory / package
        for path in sorted(root.glob(source.pattern)):
            if path.is_file() and not path.is_symlink() and not exclude.search(str(path.relative_to(root))):
                yield from READERS[source.reader](path, package)


def deduplicate(documents: Iterable[Document]) -> list[Document]:
    """Drop repeated paragraphs, headings with nothing below them, and documents that become too short."""
    seen: set[bytes] = set()
    kept: list[Document] = []
    for document in documents:
        fresh: list[str] = []
        for paragraph in document.paragraphs:
            digest = hashlib.blake2b(paragraph.encode(), digest_size=10).digest()
            if paragraph.startswith("# ") or digest not in seen:
                fresh.append(paragraph)
                seen.add(digest)
        document.paragraphs = _drop_empty_headings(fresh)
        if len(document.text()) >= 60:
            kept.append(document)
    return kept


def _drop_empty_headings(paragraphs: list[str]) -> list[str]:
    """Drop every heading that no text follows."""
    pairs = zip(paragraphs, [*paragraphs, "# "][1:], strict=True)
    return [p for p, following in pairs if not (p.startswith("# ") and following.startswith("# "))]


def is_heldout(document: Document) -> bool:
    """Decide by a seeded hash of the text whether a document is held out of training."""
    digest = hashlib.blake2b(f"{SEED}{document.text()}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < HELDOUT_SHARE


def document_text(document: Document, rng: random.Random) -> str:
    """Render a document as plain training text."""
    if document.source != "wordnet-base":
        return document.text()
    sentences = [e[:1].upper() + e[1:].rstrip(" .!") for e in document.paragraphs[1:]]
    examples = "".join(f' "{s}."' for s in sentences)
    part, _, definition = document.paragraphs[0].partition(": ")
    joiner = rng.choice((f" is {article_for(part)} {part} that means ", f" ({part}): ", ": "))
    return f"{document.title[:1].upper()}{document.title[1:]}{joiner}{definition}.{examples}"


def _cap(texts: list[str], limit: int = HELDOUT_EXCERPT_BYTES // 4) -> list[str]:
    """Cut documents to a length and take a seeded choice of them, up to ``limit`` bytes."""
    cut = [text[:HELDOUT_DOCUMENT_CHARS] for text in texts if len(text) > 400]
    chosen: list[str] = []
    size = 0
    for text in sorted(cut, key=lambda t: hashlib.blake2b(f"excerpt{SEED}{t}".encode()).digest()):
        length = len(text.encode()) + len(DOCUMENT_BREAK)
        if size + length <= limit:
            chosen.append(text)
            size += length
    return chosen


def build(directory: Path, output: Path) -> None:
    """Write the training files and the held-out texts into ``output`` and print the sizes.

    ``heldout-all.txt`` holds every held-out document; ``heldout.txt`` is the excerpt kept in the repository.
    """
    rng = random.Random(SEED)
    output.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    turns: list[Turn] = []
    heldout: list[str] = []
    quotable: list[str] = []
    for source in SOURCES:
        documents = deduplicate(read_source(source, directory))
        train = [d for d in documents if not is_heldout(d)]
        kept = [document_text(d, rng) for d in documents if is_heldout(d)]
        heldout += _group(kept)
        quotable += _cap(_group(kept)) if source.excerpt else []
        rendered = [document_text(d, rng) for d in train]
        texts += _group(rendered) * source.repeat
        fresh = [turn for d in train for turn in document_turns(d, rng)]
        turns += fresh
        size = sum(map(len, rendered)) / 1e6
        print(
            f"{source.packages[0]:28} {len(train):7} documents {size:7.2f} MB x{source.repeat} {len(fresh):6} turns"
        )
    turns += small_talk(rng, 1500)
    rng.shuffle(texts)
    chats = list(conversations(turns, rng))
    for name, items in (("text", texts), ("chat", chats)):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items), encoding="utf-8")
        print(f"{name}: {len(items)} items, {sum(map(len, items)) / 1e6:.1f} MB")
    (output / "heldout.txt").write_text(
        DOCUMENT_BREAK.join(_cap(quotable, HELDOUT_EXCERPT_BYTES)), encoding="utf-8"
    )
    (output / "heldout-all.txt").write_text(DOCUMENT_BREAK.join(heldout), encoding="utf-8")


def _group(texts: list[str]) -> list[str]:
    """Join runs of very short texts (dictionary entries) so that a training document has some length."""
    groups: list[str] = []
    for text in texts:
        if groups and len(groups[-1]) < 600 and len(text) < 400:
            groups[-1] += f"\n\n{text}"
        else:
            groups.append(text)
    return groups


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("fetch", "build"))
    parser.add_argument("--packages", type=Path, required=True, help="where the unpacked packages are or go")
    parser.add_argument("--output", type=Path, help="where the corpus goes (build)")
    arguments = parser.parse_args()
    if arguments.action == "fetch":
        fetch(arguments.packages)
    elif arguments.output is None:
        parser.error("build needs --output")
    else:
        build(arguments.packages, arguments.output)


if __name__ == "__main__":
    main()
