"""The engine process's parts: a torch-free paced build, and what can't start."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.backends.paced.runner import PacedRunner
from baton.engine.config import EngineConfig
from baton.engine.plan import Runner
from baton.kv.layout.page import layout_for
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos.channel import EngineReady
from baton.protos.errors import BatonError, ConfigError, RankLost
from baton.worker import engine_main
from baton.worker.engine_main import build
from baton.worker.spec import GROUPS, WorkerSpec, dump_spec, load_spec

TORCH_FREE = (
    "baton.prefill_worker.engine.scheduler",
    "baton.decode_worker.engine.scheduler",
    "baton.prefill_worker.engine.loop",
    "baton.decode_worker.engine.loop",
    "baton.worker.engine_main",
    "baton.worker.host",
)


class Wire:
    """Remembers what an engine says at its start."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def send_fd(self, fd: int) -> None:
        self.sent.append(fd)


def spec(**fields: Any) -> WorkerSpec:
    return WorkerSpec.of(
        **{"slot": "s", "role": "decode", "slot_dir": "x", "device": "paced:zero", "pages": 16} | fields
    )


@pytest.mark.parametrize(("role", "loop"), [("prefill", PrefillLoop), ("decode", DecodeLoop)])
def test_the_pages_come_first_and_then_what_the_model_is(role: str, loop: type) -> None:
    wire = Wire()
    assert isinstance(build(spec(role=role), wire), loop)  # type: ignore[arg-type]
    fd, ready = wire.sent
    assert isinstance(fd, int)
    assert isinstance(ready, EngineReady)
    assert ready.pages == 16


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_runner_prepares_for_its_steps_before_anybody_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, block_tokens: int
) -> None:
    wire, heard = Wire(), list[tuple[int, ...]]()
    warm = lambda self, *sizes: heard.append((*sizes, len(wire.sent)))  # noqa: E731
    monkeypatch.setattr(PacedRunner, "warm", warm, raising=False)
    asked = spec(max_batch=7, prefill_chunk_tokens=96, block_tokens=block_tokens, speculation="suffix")
    build(asked, wire)  # type: ignore[arg-type]
    assert heard == [(7, 96, 112, 0)]  # sequences, a prompt's tokens, drafts; and what was announced before


@pytest.mark.parametrize(("fields", "beside"), [({}, 100), ({"adapter_root": "/srv", "max_adapter_bytes": 7}, 107)])
def test_pages_leave_room_for_the_weights_and_for_adapters_that_may_come(
    fields: dict[str, Any], beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_main, "kv_bytes", lambda cache, device, taken, held, whole: 1000 - taken)
    assert engine_main.page_count(spec(**fields), 1, 100) == 1000 - beside


def test_pages_on_demand_and_a_transport_that_registers_all_of_them_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="kv_mirror is demand, and nixl registers all pages"):
        engine_main._require_no_registration(spec(kv_mirror="demand", kv_transport="nixl"))


def test_a_card_of_several_ranks_takes_its_heads_share_of_each_page() -> None:
    layout = layout_for("bfloat16", 2, 8, 64)
    assert engine_main._share_on_card(spec(device="cuda", tp=1), layout) == 1.0
    assert engine_main._share_on_card(spec(device="cuda", tp=2), layout) == 1 / 2


def test_an_engine_is_told_which_part_of_a_card_is_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[EngineConfig] = []

    def load(config: EngineConfig) -> Runner:
        heard.append(config)
        raise ConfigError("enough", "device")

    monkeypatch.setattr(engine_main, "load_runner", load)
    asked = spec(device="cuda", model="m", kv_memory_share=0.6, card_sharers=2, kv_memory_bytes=1 << 30)
    with pytest.raises(ConfigError, match="enough"):
        build(asked, Wire())  # type: ignore[arg-type]
    assert [(config.card_share, config.card_kv_bytes) for config in heard] == [(0.3, 1 << 30)]


@pytest.mark.parametrize(
    "fields", [{"device": "paced:nothing"}, {"device": "tpu"}, {"device": "cpu", "model": "/no/where"}]
)
def test_what_can_not_start_raises_a_typed_error(fields: dict[str, str]) -> None:
    with pytest.raises(BatonError):
        build(spec(**fields), Wire())  # type: ignore[arg-type]


def test_an_engine_whose_drafts_can_not_be_made_says_so_before_anything_else() -> None:
    wire = Wire()
    with pytest.raises(ConfigError, match="speculation self"):
        build(spec(speculation="self"), wire)  # type: ignore[arg-type]
    assert wire.sent == [], "its worker would take it for one that died, and start it again for ever"


def test_a_spec_survives_json_and_a_mistake_in_it_is_named(tmp_path: Any) -> None:
    file = tmp_path / "spec.json"
    file.write_text(dump_spec(spec()))
    assert load_spec(str(file)) == load_spec(dump_spec(spec())) == spec()
    with pytest.raises(ConfigError, match="rolle"):
        load_spec('{"slot": "s", "rolle": "decode"}')
    with pytest.raises(ConfigError, match="No such file"):
        load_spec("/no/such/spec.json")


def test_a_spec_is_written_flat_and_without_what_has_its_default() -> None:
    told = {"slot": "s", "role": "decode", "slot_dir": "x", "device": "paced:zero", "pages": 16, "beat_s": 0.1}
    assert msgspec.json.decode(dump_spec(spec(beat_s=0.1, port=0))) == told


def test_no_two_groups_of_a_spec_have_a_setting_of_one_name() -> None:
    names = [*WorkerSpec.__struct_fields__, *(n for group in GROUPS.values() for n in group.__struct_fields__)]
    assert len(names) == len(set(names))


def test_schedulers_loops_and_both_mains_load_without_torch() -> None:
    code = f"import sys, {', '.join(TORCH_FREE)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_paced_engine_with_ranks_is_told_which_profile_has_them() -> None:
    with pytest.raises(
        ConfigError, match=r"ep is 2: a paced engine is one process; .*, as paced:zero@ep2"
    ) as caught:
        build(spec(ep=2), Wire())  # type: ignore[arg-type]
    assert caught.value.param == "ep"


def test_a_rank_that_is_lost_as_adapters_are_loaded_is_no_fault_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(*_: Any) -> None:
        raise RankLost("rank 1 is gone", rank=1)

    monkeypatch.setattr(engine_main, "read_here", lost)
    asked = spec(adapters={"sql": "/adapters/sql"}, max_adapters=1)
    with pytest.raises(RankLost, match="rank 1 is gone"):
        build(asked, Wire())  # type: ignore[arg-type]
