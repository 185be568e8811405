from pathlib import Path

import pytest

from baton.cluster.config import BatonConfig, load_config
from baton.protos.errors import ConfigError


def test_flags_win_over_the_environment_which_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baton.toml").write_text("[router]\nport = 1111\ngrpc_port = 2222\nmax_n = 3\n")
    monkeypatch.setenv("BATON_ROUTER__GRPC_PORT", "4444")
    monkeypatch.setenv("BATON_ROUTER__PORT", "5555")
    router = load_config(search=tmp_path, flags={"router": {"port": 6666, "host": None}}).router
    assert (router.port, router.grpc_port, router.max_n, router.host) == (6666, 4444, 3, "127.0.0.1")


def test_defaults_need_no_file(tmp_path: Path) -> None:
    assert load_config(search=tmp_path) == BatonConfig()


def test_classes_can_be_given_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        '[[router.context_classes]]\nname = "small"\nmax_tokens = 10\n[[router.context_classes]]\nname = "big"\n'
    )
    assert [c.name for c in load_config(str(file)).router.context_classes] == ["small", "big"]


def test_a_config_survives_json() -> None:
    config = load_config(flags={"worker": {"model": "x"}, "cluster": {"prefill": 3}})
    assert BatonConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("flags", "param", "remedy"),
    [
        ({"router": {"prot": 1}}, "router.prot", "grpc_port"),
        ({"nothing": {"a": 1}}, "nothing", "sections are router"),
        ({"router": {"host": "0.0.0.0"}}, "router.host", "--insecure"),
        ({"router": {"port": 7, "grpc_port": 7}}, "router.grpc_port", "--grpc-port"),
        ({"router": {"port": 70000}}, "router.port", "65535"),
        ({"cluster": {"prefill": 0}}, "cluster.prefill", "--colocated"),
        ({"cluster": {"decode": 0}}, "cluster.decode", "1"),
        ({"worker": {"dtype": "int3"}}, "worker.dtype", "bfloat16"),
        ({"worker": {"device": "tpu"}}, "worker.device", "paced"),
        ({"worker": {"adapters": {"a/b": "x"}}}, "worker.adapters", "letters"),
        ({"worker": {"adapters": {"demo": "x"}}}, "worker.adapters", "'demo' is the name of the model"),
        ({"worker": {"adapters": {"qwen": "x"}, "model": "some/qwen"}}, "worker.adapters", "worker.model_name"),
        ({"worker": {"adapters": {"a": "x"}, "model_name": "a"}}, "worker.adapters", "give the adapter another"),
        ({"worker": {"adapters": {"a": "x"}}, "adapters": {"max_loaded": 0}}, "adapters.max_loaded", "raise it"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(flags: dict, param: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags)
    assert caught.value.param == param
    assert remedy in caught.value.message


@pytest.mark.parametrize(
    ("pool", "reserved"),
    [
        ({"resources": {"GPU": 8}}, "8 GPUs"),
        ({"resources": {"GPU": 1}, "gang": 2}, "2 GPUs"),
        ({"gang": 2, "worker": {"device": "cuda"}}, "2 GPUs"),
    ],
)
def test_a_worker_that_would_reserve_more_gpus_than_its_engine_computes_on_is_refused(pool, reserved) -> None:
    pools = [{"name": "wide", "role": "decode"} | pool]
    with pytest.raises(ConfigError, match=f"wide: {reserved} would be reserved for each worker.*GPU = 1, gang = 1"):
        load_config(flags={"cluster": {"pools": pools}})
    load_config(flags={"cluster": {"pools": [pools[0] | {"gang": 1, "resources": {"GPU": 1}}]}})


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("worker", "device", "gpu", r"worker\.device: not of the form wanted here \(cpu, cuda, auto .*got 'gpu'"),
        ("worker", "kv_selection", "half", r"worker\.kv_selection: .*sinks:64,window:4096"),
        ("cluster", "namespace", "a b", r"cluster\.namespace: .*letters, digits"),
        ("router", "context_classes", [{"name": "A B"}], r"router\.context_classes\.0\.name: .*lower-case letter"),
        ("cluster", "pools", [{"name": "w", "role": "decode", "worker": {"device": "tpu"}}], r"device: .*PROFILE"),
    ],
)
def test_a_text_of_another_form_is_refused_in_words(section: str, key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_config(flags={section: {key: value}})
    assert "pattern" not in refused.value.message


def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ROUTER__PORT", "many")
    with pytest.raises(ConfigError, match="BATON_ROUTER__PORT"):
        load_config()


def test_classes_out_of_order_are_refused() -> None:
    classes = [{"name": "rest", "max_tokens": 0}, {"name": "short", "max_tokens": 5}]
    with pytest.raises(ConfigError, match="rising order"):
        load_config(flags={"router": {"context_classes": classes}})


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[router\n")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config(str(tmp_path / "bad.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml is no UTF-8 text") as refused:
        load_config(str(tmp_path / "binary.toml"))
    assert "environment" not in refused.value.message


@pytest.mark.parametrize("url", ["nosense", "http://127.0.0.1:6379", "redis://h:6379?socket_timeout=x"])
def test_a_url_that_is_of_no_redis_is_named_before_anything_starts(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is no Redis URL .*redis://HOST:6379") as refused:
        load_config(flags={"redis": {"url": url}})
    assert refused.value.param == "redis.url"


def test_a_routable_address_is_allowed_when_told() -> None:
    assert load_config(flags={"router": {"host": "0.0.0.0", "insecure": True}}).router.insecure
