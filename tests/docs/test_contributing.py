"""CONTRIBUTING.md lists every target of the Makefile, and none that isn't there."""

import re
from pathlib import Path

from baton.cluster.sections.worker import WorkerConfig
from baton.kv import transport
from baton.router.policies import names

ROOT = Path(__file__).parents[2]


def test_every_target_is_in_the_table_and_no_other() -> None:
    targets = set(re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split())
    rows = re.findall(r"^\| (`make .+?) \| ", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    named = {target for row in rows for target in re.findall(r"`make ([\w-]+)`", row)}
    assert named == targets


LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)[^)]*\)")
TEMPLATES = {ROOT / "baton/kernels/cuda/records/page.md"}  # docs/cuda.md is made of it and has the same links


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = {
        p for folder in ("docs", "baton", "deploy", "bench", "examples") for p in (ROOT / folder).rglob("*.md")
    }
    found = [
        (str(page.relative_to(ROOT)), link)
        for page in sorted((pages | set(ROOT.glob("*.md"))) - TEMPLATES)
        for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
        if not link.startswith(("http:", "https:", "mailto:")) and not (page.parent / link).exists()
    ]
    assert not found


def test_every_list_of_policies_names_those_that_are_there() -> None:
    lists = {
        "baton/cluster/sections/router.py": r"how a way is chosen: (.+?)\"",
        "baton/console/run/serve_flags.py": r"\"router.policy\", str, \"(.+?) \(",
        "baton/drill/scenario.py": r"POLICIES = \((.+?)\)",
        "docs/commands.md": r"`--policy cost` \| chooses workers by (.+?) \(",
    }
    for file, pattern in lists.items():
        named = re.search(pattern, (ROOT / file).read_text())
        assert named is not None, file
        assert sorted(set(re.findall(r"[a-z_]{3,}", named[1]))) == names(), file


def test_every_list_of_transports_names_those_that_are_there() -> None:
    setting = WorkerConfig.model_fields["kv_transport"].description or ""
    assert set(re.findall(r"[a-z_]+", setting)) >= set(transport.names()) - transport.IN_PROCESS
    page = (ROOT / "baton/kv/transport/README.md").read_text().split("\n## ")[0]
    assert sorted(re.findall(r"^\| `([a-z_]+)` \|", page, re.M)) == transport.names()
