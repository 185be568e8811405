"""An adapter's id is its name and its content's digest."""

from __future__ import annotations

import pytest

from baton.protos.adapter_id import adapter_id, digest_of, is_adapter_id, name_of, number_of, require_name
from baton.protos.errors import AdapterRefused

DIGEST = "0123456789abcdef"


def test_an_id_is_the_name_and_the_first_digits_of_the_digest() -> None:
    found = adapter_id("sql-v2", DIGEST * 4)
    assert found == f"sql-v2@{DIGEST}"
    assert is_adapter_id(found)
    assert (name_of(found), digest_of(found)) == ("sql-v2", DIGEST)
    assert (name_of("sql-v2"), digest_of("sql-v2")) == ("sql-v2", "")


@pytest.mark.parametrize(
    "text", ["sql", "@" + DIGEST, f"sql@{DIGEST[1:]}", f"sql@{DIGEST.upper()}", f"a/b@{DIGEST}"]
)
def test_what_is_no_id_is_told(text: str) -> None:
    assert not is_adapter_id(text)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a@b", "a b", "../x", "x" * 65, "ä"])
def test_a_name_that_no_adapter_may_have_is_refused_by_the_field(name: str) -> None:
    with pytest.raises(AdapterRefused, match="adapter name") as refused:
        require_name(name, "adapters")
    assert refused.value.param == "adapters"


def test_a_number_stands_for_an_id_the_same_everywhere() -> None:
    assert (number_of(""), number_of("sql@0123456789abcdef")) == (0, 3801727962)
    assert number_of("sql@0123456789abcdee") != number_of("sql@0123456789abcdef") > 0
