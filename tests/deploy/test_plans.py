from pathlib import Path

import pytest

from baton.cluster.config import BatonConfig, load_config
from baton.deploy.plans import DEMO, model_name, resolve_model, slots_of, text_directory, worker_plans
from baton.deploy.worker_spec import load_spec
from baton.protos.errors import CheckpointError


def config(**sections: dict) -> BatonConfig:
    return load_config(flags=sections, search=Path("/nowhere"))


def test_two_prefill_and_one_decode() -> None:
    expected = [("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode")]
    assert slots_of(config(cluster={"prefill": 2})) == expected


def test_colocated_has_decode_workers_only() -> None:
    assert slots_of(config(cluster={"colocated": True, "decode": 2})) == [
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]


def test_every_worker_gets_a_spec_its_host_can_read(tmp_path: Path) -> None:
    settings = config(worker={"device": "paced:zero", "pages": 77, "seed": 5}, redis={"lease_s": 9.0})
    plans = worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)
    spec = load_spec(plans[0].spec)
    assert [p.slot for p in plans] == ["prefill-0", "decode-0"]
    assert (spec.role, spec.pages, spec.seed, spec.lease_s, spec.redis_url) == ("prefill", 77, 5, 9.0, "unix:///x")


def test_the_demo_model_is_the_default() -> None:
    assert DEMO.parent.name == "models"
    assert model_name(config(), str(DEMO)) == "demo"


def test_a_paced_engine_needs_no_model() -> None:
    settings = config(worker={"device": "paced:zero"})
    assert resolve_model(settings) == ""
    assert text_directory("") is None
    assert model_name(settings, "")


def test_a_hub_id_is_passed_on(tmp_path: Path) -> None:
    assert resolve_model(config(worker={"model": "Qwen/Qwen3-0.6B"})) == "Qwen/Qwen3-0.6B"
    assert resolve_model(config(worker={"model": str(tmp_path)})) == str(tmp_path.resolve())


@pytest.mark.parametrize("model", ["/no/such/model", "./nothing", "a/b/c", "~/nothing-here"])
def test_a_path_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match="no model directory at"):
        resolve_model(config(worker={"model": model}))
