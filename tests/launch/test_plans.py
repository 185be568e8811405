import os
from pathlib import Path

import pytest

from baton.cluster.config import BatonConfig, load_config
from baton.cluster.served_model import DEMO, model_name, resolve_model, text_directory
from baton.launch.plans import lent_cores, slots_of, worker_plans
from baton.protos.errors import CheckpointError, ConfigError
from baton.tls.identity import TlsFiles
from baton.worker.spec import load_spec

ROLES = ("prefill", "decode")
PACED = {"name": "paced", "role": "prefill", "worker": {"device": "paced:zero"}}


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
    assert (spec.role, spec.cache.pages, spec.engine.seed, spec.member.lease_s, spec.member.redis_url) == (
        "prefill",
        77,
        5,
        9.0,
        "unix:///x",
    )


def test_the_demo_model_is_the_default() -> None:
    assert DEMO.parent.name == "models"
    assert model_name(config(), str(DEMO)) == "demo"


def test_a_paced_engine_needs_no_model() -> None:
    settings = config(worker={"device": "paced:zero"})
    assert resolve_model(settings) == ""
    assert text_directory("") is None
    assert model_name(settings, "")


def test_a_checkpoint_without_a_tokenizer_is_refused_by_name_at_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    for ask in (
        lambda: resolve_model(config(worker={"model": str(tmp_path)})),
        lambda: text_directory(str(tmp_path)),
    ):
        with pytest.raises(
            CheckpointError, match=r"has no tokenizer\.json \(it has tokenizer\.model, .*save_pretrained"
        ):
            ask()
    paced = config(worker={"model": str(tmp_path), "device": "paced:zero"})
    assert resolve_model(paced) == str(tmp_path.resolve())
    assert text_directory(str(tmp_path), paced=True) is None


def test_a_hub_id_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    assert resolve_model(config(worker={"model": "Qwen/Qwen3-0.6B"})) == "Qwen/Qwen3-0.6B"
    assert resolve_model(config(worker={"model": str(tmp_path)})) == str(tmp_path.resolve())


@pytest.mark.parametrize("model", ["/no/such/model", "./nothing", "a/b/c", "~/nothing-here", "no-such-model"])
def test_a_path_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match="no model directory at"):
        resolve_model(config(worker={"model": model}))


def test_a_pool_on_other_hardware_has_slots_resources_and_settings_of_its_own(tmp_path: Path) -> None:
    pool = {
        "name": "long", "role": "prefill", "count": 2, "resources": {"baton_long": 1}, "labels": {"gpu": "h200"},
        "worker": {"prefill_chunk_tokens": 2048, "threads": 3},
    }  # fmt: skip
    flags = {"cluster": {"pools": [pool]}, "worker": {"device": "paced:zero"}}
    plans = worker_plans(load_config(flags=flags, search=tmp_path), "", "", tmp_path, tmp_path)
    assert [(p.slot, p.role) for p in plans] == [
        ("prefill-0", "prefill"), ("decode-0", "decode"), ("long-0", "prefill"), ("long-1", "prefill"),
    ]  # fmt: skip
    assert plans[2].resources == {"baton_long": 1}
    assert plans[2].labels == {"gpu": "h200"}
    assert plans[0].resources == {}
    specs = [load_spec(plan.spec) for plan in plans]
    assert [spec.steps.prefill_chunk_tokens for spec in specs] == [512, 512, 2048, 2048]
    assert specs[2].engine.threads == 3


def test_a_pool_may_be_all_the_prefill_there_is_and_its_mistakes_are_named(tmp_path: Path) -> None:
    def load(**pool: object) -> None:
        cluster = {"prefill": 0, "pools": [{"name": "long", "role": "prefill"} | pool]}
        load_config(flags={"cluster": cluster}, search=tmp_path)

    load()
    for wrong, text in (
        ({"name": "prefill"}, "give each a name of its own"),
        ({"worker": {"dtyp": "float32"}}, r"cluster.pools long: worker\.dtyp"),
        ({"count": 0}, r"cluster\.prefill is 0"),
        ({"role": "king"}, "role"),
    ):
        with pytest.raises(ConfigError, match=text):
            load(**wrong)


def test_fixed_ports_are_for_one_worker_per_machine(tmp_path: Path) -> None:
    fixed = {"device": "paced:zero", "port": 8100, "data_port": 8101, "metrics_port": 8102}
    with pytest.raises(ConfigError, match=r"worker\.port 8100") as refused:
        worker_plans(config(worker=fixed), "", "unix:///x", tmp_path, tmp_path)
    assert refused.value.param == "worker.port"
    alone = worker_plans(config(worker=fixed, cluster={"colocated": True}), "", "unix:///x", tmp_path, tmp_path)
    spec = load_spec(alone[0].spec)
    assert (spec.server.port, spec.server.data_port, spec.server.metrics_port) == (8100, 8101, 8102)


def test_an_unknown_speculation_is_refused_before_anything_starts(tmp_path: Path) -> None:
    draft = f"draft:{tmp_path}"
    for name, known in (("suffix+prompt_lookup", True), (f"suffix+{draft}", True), ("magic", False)):
        settings = config(worker={"device": "paced:zero", "speculation": name})
        if known:
            plans = worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)
            assert load_spec(plans[1].spec).steps.speculation == name
            continue
        with pytest.raises(ConfigError, match="'magic' isn't known; choose from none, auto, prompt_lookup, suffix"):
            worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)


def test_weights_are_packed_in_the_home_that_the_setting_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = config(worker={"device": "paced:zero", "cache_dir": "~/packed"})
    plans = worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)
    assert load_spec(plans[0].spec).engine.cache_dir == f"{tmp_path}/packed"


def test_adapters_and_their_limits_reach_each_worker(tmp_path: Path) -> None:
    settings = config(worker={"adapters": {"sql": "/adapters/sql"}}, adapters={"root": "/adapters", "max_rank": 32})
    plan, *_ = worker_plans(settings, "m", "", tmp_path, tmp_path)
    found = load_spec(plan.spec).lora
    assert found.adapters == {"sql": "/adapters/sql"}
    assert (found.limits.root, found.limits.max_rank, found.limits.max_loaded) == ("/adapters", 32, 16)


def test_each_role_has_its_ranks_and_a_pool_its_own(tmp_path: Path) -> None:
    """In a pool that asks for resources each rank has a bundle, all on one node."""
    pool = {"name": "wide", "role": "prefill", "resources": {"CPU": 4.0}, "worker": {"tp": 4}}
    widths = {"prefill_tp": 2, "pools": [pool]}
    settings = config(cluster=widths, worker={"device": "paced:zero", "tp": 3})
    plans = worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)
    found = {plan.slot: (load_spec(plan.spec).engine.tp, plan.gang) for plan in plans}
    assert found == {"prefill-0": (2, 1), "decode-0": (3, 1), "wide-0": (4, 4)}


def test_a_roles_own_kind_of_ranks_takes_the_place_of_the_workers(tmp_path: Path) -> None:
    settings = config(cluster={"prefill_cp": 2, "decode_pp": 3}, worker={"device": "paced:zero", "tp": 4})
    plans = worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)
    found = {plan.slot: load_spec(plan.spec).engine for plan in plans}
    assert {slot: (own.tp, own.cp, own.pp) for slot, own in found.items()} == {
        "prefill-0": (1, 2, 1), "decode-0": (1, 1, 3),
    }  # fmt: skip


def test_experts_and_stages_of_several_ranks_are_settings_of_a_role_and_of_a_pool(tmp_path: Path) -> None:
    pool = {"name": "deep", "role": "decode", "resources": {"CPU": 4.0}, "worker": {"tp": 2, "pp": 3, "ep": 1}}
    settings = config(
        cluster={"prefill_ep": 4, "decode_tp": 2, "decode_pp": 2, "pools": [pool]},
        worker={"device": "paced:zero", "ep": 3},
    )
    plans = worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)
    found = {plan.slot: (load_spec(plan.spec).engine, plan.gang) for plan in plans}
    assert {slot: (own.tp, own.pp, own.ep, gang) for slot, (own, gang) in found.items()} == {
        "prefill-0": (1, 1, 4, 1), "decode-0": (2, 2, 1, 1), "deep-0": (2, 3, 1, 6),
    }  # fmt: skip


@pytest.mark.parametrize(("device", "cards"), [("cpu", 1), ("cuda", 2), ("auto", 2)])
def test_ranks_take_a_gpu_each_where_their_worker_runs_on_gpus(tmp_path: Path, device: str, cards: int) -> None:
    settings = config(worker={"device": device, "tp": 2})
    assert [plan.cards for plan in worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)][-1:] == [cards]


CARDS = {"name": "wide", "role": "decode", "worker": {"device": "cuda", "tp": 2}}


@pytest.mark.parametrize(
    ("resources", "gang", "asked"), [({"GPU": 1.0}, 1, 2.0), ({"GPU": 1.0}, 2, 2.0), ({"own": 1.0}, 1, None)]
)
def test_ranks_on_cards_of_a_pool_ask_for_all_their_gpus_in_one_bundle(
    tmp_path: Path, resources: dict[str, float], gang: int, asked: float | None
) -> None:
    settings = config(cluster={"pools": [CARDS | {"resources": resources, "gang": gang}]})
    plan = worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)[-1]
    assert (plan.gang, plan.cards, plan.resources.get("GPU")) == (1, 2, asked)
    assert sum(plan.resources.values()) == 2.0


@pytest.mark.parametrize(("resources", "gang"), [({"GPU": 2.0}, 1), ({"GPU": 0.5}, 1), ({"GPU": 1.0}, 4)])
def test_a_pool_that_names_other_than_a_gpu_per_rank_is_refused(resources: dict[str, float], gang: int) -> None:
    with pytest.raises(ConfigError, match="its engine computes on 2: say GPU = 1, gang = 2"):
        config(cluster={"pools": [CARDS | {"resources": resources, "gang": gang}]})


WIDE = {"name": "wide", "role": "decode", "resources": {"GPU": 1.0}, "hosts": 2}


def test_ranks_of_a_worker_on_several_nodes_are_dealt_among_them(tmp_path: Path) -> None:
    pool = WIDE | {"worker": {"tp": 2, "pp": 3, "rank_key_file": "/key"}}
    settings = config(cluster={"pools": [pool]}, worker={"device": "paced:zero"}, ray={"address": "head:6379"})
    (wide,) = worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)[2:]
    assert (wide.hosts, wide.gang, wide.rank_key_file, wide.rank_tls) == (2, 3, "/key", None)


def test_ranks_of_several_hosts_encrypt_with_the_workers_certificate(tmp_path: Path) -> None:
    sections = {"tls": {"dir": str(tmp_path)}, "ray": {"address": "head:6379"}}
    pool, far = WIDE | {"worker": {"pp": 2}}, {"device": "paced:zero", "rank_hosts": ["h:1"], "pp": 2}
    (wide,) = worker_plans(
        config(cluster={"pools": [pool]}, worker={"device": "paced:zero"}, **sections),
        "", "unix:///x", tmp_path, tmp_path,
    )[2:]  # fmt: skip
    assert wide.rank_tls == TlsFiles(*(str(tmp_path / name) for name in ("worker.crt", "worker.key", "ca.crt")))
    named = worker_plans(config(worker=far, **sections), "", "unix:///x", tmp_path, tmp_path)
    assert {load_spec(plan.spec).server.tls for plan in named} == {wide.rank_tls}


@pytest.mark.parametrize(
    ("address", "worker", "said"),
    [
        ("", {"pp": 2}, "there is one node: join a Ray cluster"),
        ("head:6379", {}, "a worker has 1 ranks: raise worker.pp or worker.tp to 2"),
        ("head:6379", {"pp": 2, "rank_hosts": ["h:1"]}, "worker.rank_hosts names hosts: drop one"),
    ],
)
def test_nodes_that_a_worker_cannot_have_are_refused(
    tmp_path: Path, address: str, worker: dict[str, object], said: str
) -> None:
    pools = [WIDE | {"worker": worker}]
    settings = config(cluster={"pools": pools}, worker={"device": "paced:zero"}, ray={"address": address})
    with pytest.raises(ConfigError, match=said):
        worker_plans(settings, "", "unix:///x", tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("sections", "lending", "lent"),
    [
        ({}, {"prefill-0": 2, "decode-0": 2}, 4),
        ({"cluster": {"prefill": 2}}, {"prefill-0": 1, "prefill-1": 1, "decode-0": 1}, 4),
        ({"cluster": {"prefill": 3, "decode": 3}}, {f"{role}-{i}": 1 for role in ROLES for i in range(3)}, 4),
        ({"cluster": {"lend_cores": False}}, {}, 0),
        ({"cluster": {"colocated": True}}, {}, 0),
        ({"worker": {"threads": 2}}, {}, 0),
        ({"worker": {"tp": 2}}, {}, 0),
        ({"worker": {"cp": 2}}, {}, 0),
        ({"worker": {"device": "paced:zero"}}, {}, 0),
        ({"ray": {"address": "ray://there"}, "redis": {"url": "redis://there"}}, {}, 0),
        ({"cluster": {"pools": [PACED]}}, {"prefill-0": 1, "decode-0": 1}, 3),
        ({"cluster": {"decode_tp": 2, "prefill": 2}}, {"prefill-0": 1, "prefill-1": 1}, 3),
    ],
)
def test_workers_of_one_machine_lend_the_cores_that_were_not_given_to_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict, lending: dict, lent: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    settings = config(**sections)
    specs = [load_spec(plan.spec).engine for plan in worker_plans(settings, "m", "", tmp_path, tmp_path, "/page")]
    slots = [slot for slot, _ in slots_of(settings)]
    found = {slot: spec for slot, spec in zip(slots, specs, strict=True) if spec.cores_page}
    assert {slot: spec.threads for slot, spec in found.items()} == lending
    assert {(spec.cores_page, spec.all_cores) for spec in found.values()} == ({("/page", lent)} if lent else set())
    assert lent_cores(settings) == lent


@pytest.mark.parametrize(
    ("pace_s", "wanted", "found"),
    [(0.05, (), 0.05), (0.05, (0.06, 0.2), 0.03), (0.0, (0.2,), 0.0), (0.05, (0.2,), 0.05)],
)
def test_a_decode_worker_keeps_a_pace_that_every_class_may_have(
    tmp_path: Path, pace_s: float, wanted: tuple[float, ...], found: float
) -> None:
    classes = [
        {"name": f"c{at}", "max_tokens": 100 * (at + 1), "slo_tpot_s": tpot} for at, tpot in enumerate(wanted)
    ]
    settings = config(
        worker={"pace_beside_prompts_s": pace_s}, router={"context_classes": classes} if classes else {}
    )
    specs = [load_spec(plan.spec) for plan in worker_plans(settings, "m", "", tmp_path, tmp_path)]
    assert {spec.steps.pace_beside_prompts_s for spec in specs} == {found}


@pytest.mark.parametrize(
    ("sections", "sharers"),
    [
        ({"worker": {"device": "cuda"}}, {(2, 2)}),
        ({"worker": {"device": "cuda"}, "cluster": {"colocated": True}}, {(1, 1)}),
        ({"worker": {"device": "cuda"}, "cluster": {"pools": [PACED]}}, {(2, 2)}),
        ({"worker": {"device": "cuda"}, "ray": {"address": "ray://a"}, "redis": {"url": "redis://a"}}, {(1, 1)}),
        ({"worker": {"device": "cuda", "tp": 2}}, {(2, 1)}),  # four cards, and one host
        ({"worker": {"device": "cuda"}, "cluster": {"prefill_tp": 2, "decode": 2}}, {(3, 1), (3, 2)}),
        ({}, {(1, 1)}),
    ],
)
def test_workers_know_how_many_divide_the_host_and_their_card(
    tmp_path: Path, sections: dict, sharers: set[tuple[int, int]]
) -> None:
    specs = [load_spec(plan.spec) for plan in worker_plans(config(**sections), "m", "", tmp_path, tmp_path)]
    assert {(spec.cache.kv_sharers, spec.cache.card_sharers) for spec in specs} == sharers
