"""The paced engine's profiles: one contract over the folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.cost.curves import decode_seconds, prefill_seconds, transfer_seconds
from baton.cost.profiles import FOLDER, load_profile, profile_names
from baton.protos.errors import ConfigError


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_in_the_folder_is_sound(name: str) -> None:
    profile = load_profile(name)
    assert profile.about
    assert profile.kv_bytes_per_token % 16 == 0
    assert profile.pages * 16 >= 1000, "the pool holds a prompt or two"
    assert profile.pages * 16 * profile.kv_bytes_per_token <= 256 << 20, "a laptop carries several of them"


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "zero"])
def test_times_are_of_the_order_that_real_machines_show(name: str) -> None:
    profile = load_profile(name)
    assert 1e-3 < decode_seconds(profile.step, 8, 8000) < 0.2
    assert 0.01 < prefill_seconds(profile.step, 1000, 0, profile.prefill_chunk) < 1.0
    assert transfer_seconds(profile.transfer, 1000 * profile.kv_bytes_per_token) < 1.0


def test_zero_takes_no_time() -> None:
    zero = load_profile("zero")
    assert prefill_seconds(zero.step, 10_000) == decode_seconds(zero.step, 100, 10**6) == 0.0
    assert transfer_seconds(zero.transfer, 1 << 30) == 0.0


def test_an_unknown_profile_lists_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile("tpu")
    assert all(name in caught.value.message for name in profile_names())


def test_a_profile_may_be_ones_own_file(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text((FOLDER / "laptop.toml").read_text().replace("pages = 4096", "pages = 7"))
    assert load_profile(str(own)).pages == 7


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("pages = 4096", "pages = 0", "pages must be at least 1"),
        ("pages = 4096", 'pages = "many"', "pages"),
        ("pages = 4096", "", "pages"),
        ("pages = 4096", "pages = 4096\nspeed = 1", "speed"),
        ("fixed = 0.003", "fixed = -1.0", "fixed must be 0 or more"),
        ("fixed = 0.003", "", "[step] needs exactly the fields fixed, prefill_token"),
        ("[transfer]", "[transfers]", "[transfer] needs"),
        ("kv_bytes_per_token = 1024", "kv_bytes_per_token = 1000", "multiple of 16"),
        ("[step]", "[step", "laptop"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    own, text = tmp_path / "laptop.toml", (FOLDER / "laptop.toml").read_text()
    assert old in text
    own.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_profile(str(own))
    assert words in caught.value.message


RANKED = """
about = "measured on two ranks"
kv_bytes_per_token = 64
model_kv_bytes_per_token = 64
pages = 7
vocab_size = 100
max_model_len = 100
[step]
fixed = 0.012
prefill_token = 0.002
prefill_pair = 2e-8
decode_sequence = 0.004
decode_context_token = 1e-6
[transfer]
fixed = 0.0
per_byte = 0.0
[ranks]
shared = "SHARED"
count = 2
widths = [1, 2, 4]
meetings = 100
meeting_s = 2e-5
"""


@pytest.mark.parametrize(
    ("shared", "fixed", "token", "sequence"),
    [("tp", 0.005 + 0.006, 0.001, 0.002), ("cp", 0.010 + 0.006, 0.001, 0.002), ("pp", 0.010 + 0.006, 0.001, 0.004)],
)
def test_other_ranks_divide_what_they_share_and_meet(
    tmp_path: Path, shared: str, fixed: float, token: float, sequence: float
) -> None:
    file = tmp_path / "ranked.toml"
    file.write_text(RANKED.replace("SHARED", shared))
    found = load_profile(f"{file}@{shared}4")
    step = found.step
    assert (step.fixed, step.prefill_token, step.decode_sequence) == pytest.approx((fixed, token, sequence))
    assert found.about == f"measured on two ranks, {shared} 4"
    same = load_profile(f"{file}@{shared}2").step
    assert msgspec.structs.astuple(same) == pytest.approx(msgspec.structs.astuple(load_profile(str(file)).step))


def test_ranks_that_cannot_be_are_refused_with_those_that_can(tmp_path: Path) -> None:
    file = tmp_path / "ranked.toml"
    file.write_text(RANKED.replace("SHARED", "tp"))
    for asked in ("tp3", "cp2"):
        with pytest.raises(ConfigError, match=f"{asked[:2]} can't be {asked[2]}; use tp 1, 2, 4"):
            load_profile(f"{file}@{asked}")
    with pytest.raises(ConfigError, match="says nothing of ranks"):
        load_profile("zero@tp2")


@pytest.mark.parametrize("wrong", ["count = 0", "widths = [0, 2]", "meetings = -1", "meeting_s = -1.0"])
def test_counts_of_ranks_that_no_worker_has_are_refused(tmp_path: Path, wrong: str) -> None:
    file, name = tmp_path / "ranked.toml", wrong.partition(" ")[0]
    lines = [wrong if line.startswith(f"{name} =") else line for line in RANKED.replace("SHARED", "tp").split("\n")]
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=f"ranks.{name}|ranks.count"):
        load_profile(f"{file}@tp2")
