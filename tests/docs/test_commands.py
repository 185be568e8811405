"""Commands, options, make targets, modules and chart values that the pages name are there."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from baton.console.main import app

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "baton"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), CHART / "templates" / "NOTES.txt"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
BATON = typer.main.get_command(app)
# Where the pages say what a command does, and not how it is called.
MARKED = re.compile(
    r"^\s*(?:\$ |exec )?((?:baton|make|python -m) [^\n]*)|`((?:baton|make|python -m) [^`\n]*)`", re.M
)
POD = re.compile(r"kubectl [^\n`]*? -- (baton [^\n`]*)")


def commands(text: str) -> Iterator[str]:
    """Yields the commands of a page: those in fenced blocks and those between backticks."""
    joined = re.sub(r"\\\n\s*", "", text)
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", joined, re.S | re.M)) or joined
    inline = re.sub(r"^```\w*\n.*?^```", "", joined, flags=re.S | re.M)
    found = [m[1] for m in MARKED.finditer(fenced) if m[1]] + [m[2] for m in MARKED.finditer(inline) if m[2]]
    yield from (re.split(r"\s+#|\s[|&>]|\s{3}", command)[0].strip() for command in found + POD.findall(joined))


def words(command: str) -> list[str]:
    """Returns the words of a shell line; … and ALL-CAPS stand for what a reader fills in."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def refused(command: str) -> str:
    """Why `baton …` can't be what is there; empty: it can."""
    at: Any = BATON
    rest = words(command)[1:]
    while hasattr(at, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name in ("COMMAND", "…"):
            return ""
        if missing := set(name.split("|")) - set(at.commands):
            return f"there is no `baton {missing.pop()}`"
        at = at.commands[name.split("|")[0]]
    known = {option for parameter in at.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    return f"options {sorted(given - known)}" if given - known - {"--help"} else ""


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_on_the_page_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    for command in commands(page.read_text()):
        if command.startswith("baton "):
            assert not (why := refused(command)), f"{command}: {why}"
        elif command.startswith("make "):
            assert all(w in targets for w in words(command)[1:] if re.fullmatch(r"[a-z][a-z-]*", w)), command
        elif (module := words(command)[2]).split(".")[0] in ("baton", "bench"):
            assert importlib.util.find_spec(module), command


def test_what_is_not_there_is_found_out() -> None:
    page = "run `baton sevre`, then\n```\nbaton scale prefill=1 --wiat 3   # a slip\nmake helm-chek\n```\n"
    found = list(commands(page))
    assert sorted(found) == ["baton scale prefill=1 --wiat 3", "baton sevre", "make helm-chek"]
    assert refused("baton sevre")
    assert refused("baton scale prefill=1 --wiat 3")
    assert refused("baton certs mke DIR")
    assert not refused("baton certs make DIR --host NAME")


NO_PLACES = {"bench/results/gpu.json", "baton/fabric"}  # a run on a GPU writes the one, the other is a Ray label
PACKAGES = "|".join(sorted(p.name for p in (ROOT / "baton").iterdir() if (p / "__init__.py").exists()))
PLACE = re.compile(rf"`((?:baton|bench|deploy|docs|examples|models|tests|{PACKAGES})/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_and_place_on_the_page_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    beside = (ROOT, ROOT / "baton")  # pages on the code leave the package's name out
    missing = {p for p in PLACE.findall(text) if not any(list(at.glob(p + "*")) for at in beside)}
    assert missing - NO_PLACES == set()


def test_the_flags_that_the_page_of_commands_names_are_options_of_serve() -> None:
    named = set(re.findall(r"`(--[a-z][\w-]*)", (ROOT / "docs" / "commands.md").read_text()))
    serve = {option for parameter in BATON.commands["serve"].params for option in parameter.opts}
    assert len(named) > 5
    assert named <= serve


SECTIONS = "|".join(key for key, value in VALUES.items() if isinstance(value, dict))
NAMED = re.compile(rf"`((?:{SECTIONS})(?:\.\w+)+)`")
CONFIG = {"router", "redis", "telemetry", "tls"}  # also sections of baton.toml


@pytest.mark.parametrize("name", ["docs/deploy.md", "docs/troubleshooting.md"])
def test_every_value_of_the_chart_on_the_page_is_there(name: str) -> None:
    from baton.cluster.config import BatonConfig

    text = (ROOT / name).read_text()
    settings = {f"{s}.{k}" for s, f in BatonConfig.model_fields.items() for k in type(f.default).model_fields}
    for path in NAMED.findall(text):
        if path in settings:
            continue
        at: Any = VALUES
        for key in path.split("."):
            if isinstance(at, dict) and key not in at and not at:
                break  # a map that is empty by default
            assert isinstance(at, dict), path
            assert key in at, path
            at = at[key]
