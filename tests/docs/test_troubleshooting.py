"""Messages that docs/troubleshooting.md quotes are ones that the code prints."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTED = (
    "unknown setting",
    "can be reached from outside and there is no authentication",
    "can't be used",
    "redis.url is empty, and a router and a worker",
    "is held by process",
    "is longer than",
    "there is no model directory at",
    "no native kernels, the slower reference is used",
    "serving goes on",
    "join Ray at",
    "baton_kv_transport_fallbacks",
    "the largest pool of KV pages holds",
    "the queue of context class",
    "no worker was free within the",
    "the answer was not complete within",
    "KV leaves by the host's pages, not from the card",
)


@pytest.fixture(scope="module")
def code() -> str:
    text = "\n".join(p.read_text() for p in (ROOT / "baton").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)  # strings that go on in the next line


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_exists(message: str, code: str) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    words = message.removeprefix("baton_").split()
    assert words[0] in page
    assert message.removeprefix("baton_") in code, message
