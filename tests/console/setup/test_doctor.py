"""`baton doctor` against real things: a taken port, a Redis that answers or doesn't, certificates, this machine."""

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis as client
from typer.testing import CliRunner

from baton.cluster.config import load_config
from baton.console.main import app
from baton.console.setup.doctor import examine, machine, services
from baton.console.setup.findings import Finding, exit_code
from baton.engine.backends.cuda.gpu import Gpu, probe
from baton.kv.transport import FROM_CARD, IN_PROCESS, names
from baton.launch.ports import free_ports
from baton.launch.redis_server import find_server
from baton.tls.authority import Authority


def config(**sections):
    return load_config(flags=sections, search=Path("/nowhere"))


def states(found) -> dict[str, str]:
    return {f.subject: f.state for f in ([found] if isinstance(found, Finding) else found)}


def test_it_examines_this_machine_and_says_so_in_json(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[router]\nport = 0\ngrpc_port = 0\n[worker]\ndevice = 'paced:zero'\n")
    result = CliRunner().invoke(app, ["doctor", "--quick", "--json", "--config", str(file)])
    found = json.loads(result.stdout)
    assert found["ok"] == (result.exit_code == 0)
    seen = {f["subject"] for f in found["findings"]}
    assert {
        "cpu",
        "memory",
        "huge pages",
        "nofile",
        "memlock",
        "clock",
        "mtu",
        "kernels",
        "gpu",
        "redis",
        "ray",
    } <= seen
    assert all(f.get("remedy") or f["state"] in ("ok", "skip") for f in found["findings"])


def test_a_wrong_config_is_the_one_finding(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[router]\nprot = 1\n")
    assert states(examine.examine(str(file), quick=True)) == {"config": "fail"}


def test_a_port_that_is_taken_fails_with_the_key() -> None:
    [port] = free_ports(1)  # that nobody else takes once it is free again
    with socket.create_server(("127.0.0.1", port)):
        found = services.ports(config(router={"port": port, "grpc_port": 0}))
    assert states(found) == {f"port {port}": "fail"}
    assert "router.port" in found[0].what
    assert states(services.ports(config(router={"port": port, "grpc_port": 0}))) == {f"port {port}": "ok"}


def test_a_redis_that_answers_and_one_that_does_not(tmp_path: Path) -> None:
    [port] = free_ports(1)
    away = services.redis_server(config(redis={"url": f"redis://:secret@127.0.0.1:{port}/0"}))
    assert states(away) == {"redis": "fail"}
    assert "secret" not in away[0].what
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    options += ["--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"]
    server = subprocess.Popen([find_server(), *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 90
        while "clocks" not in states(
            found := services.redis_server(config(redis={"url": f"redis://127.0.0.1:{port}/0"}))
        ):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert states(found)["clocks"] == "ok"
        assert states(found)["redis memory"] == "fail"
        with client.Redis(port=port) as connection:
            connection.config_set("maxmemory-policy", "noeviction")
            seen = services.redis_server(config(redis={"url": f"redis://127.0.0.1:{port}/0"}))
            assert states(seen)["redis memory"] == "ok"
            connection.config_set("maxmemory", connection.info("memory")["used_memory"])
            seen = services.redis_server(config(redis={"url": f"redis://127.0.0.1:{port}/0"}))
            assert states(seen)["redis memory"] == "warn"
    finally:
        server.kill()
        server.wait()


def test_a_ray_that_nobody_hears_fails() -> None:
    assert states(services.ray(config(ray={"address": "127.0.0.1:1"}, redis={"url": "redis://x"}))) == {
        "ray": "fail"
    }
    assert states(services.ray(config(ray={"address": "nonsense"}, redis={"url": "redis://x"}))) == {"ray": "fail"}
    assert states(services.ray(config())) == {"ray": "ok"}


def test_more_kv_than_memory_fails() -> None:
    assert states(machine.memory(config(worker={"kv_memory_bytes": 1 << 50}))) == {"memory": "fail"}


def test_a_gpu_that_is_asked_for_and_not_here_or_too_old_fails_with_its_remedy() -> None:
    def none():
        return probe("libno-such-driver.so")

    for ask in (
        none,
        lambda: Gpu("T4", (7, 5), (13, 0), 16 << 30),
        lambda: Gpu("H100", (9, 0), (12, 4), 80 << 30),
    ):
        found = machine.gpu(config(worker={"device": "cuda"}), ask)
        assert (found.state, bool(found.remedy)) == ("fail", True)
        assert states(machine.gpu(config(), ask)) == {"gpu": "skip"}
    good = machine.gpu(config(worker={"device": "auto"}), lambda: Gpu("H100", (9, 0), (13, 0), 80 << 30))
    assert good.state == "ok"
    assert good.what.startswith("H100, 80 GiB, a driver for CUDA 13.0; ")
    other = machine.gpu(config(worker={"device": "auto"}), lambda: Gpu("L40S", (8, 9), (13, 0), 48 << 30))
    assert other.state == "ok"
    assert "torch's ops serve there, not our own kernels" in other.what
    assert ": the host's bounds it; " in other.what or ": the card's bounds it; " in other.what
    named = machine.gpu(
        config(worker={"device": "cuda", "pages": 9}), lambda: Gpu("H100", (9, 0), (13, 0), 80 << 30)
    )
    assert "KV takes what worker.kv_memory_bytes or worker.pages says" in named.what


def test_the_room_for_kv_is_divided_as_a_start_divides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = {"name": "far", "role": "decode", "count": 3, "worker": {"device": "paced:zero"}}

    def said(worker: object = {"device": "auto"}, **sections: object) -> str:
        card = Gpu("H100", (9, 0), (13, 0), 80 << 30)
        return machine.gpu(config(worker=worker, **sections), lambda: card).what

    small, mirrors = 1 << 30, ("whole", "demand")
    monkeypatch.setattr(machine, "available_bytes", lambda: small)
    told = [said(worker={"device": "auto", "kv_mirror": mirror}) for mirror in mirrors]
    assert [": the host's bounds it; " in each for each in told] == [True, False]
    assert "the card's bounds it, and copies are made on demand; " in told[1]
    half, whole = "the card has room for 33.0 GiB", "the card has room for 67.0 GiB"
    assert half in said()
    assert half in said(cluster={"pools": [paced]})
    assert whole in said(ray={"address": "ray://a"}, redis={"url": "redis://a"})


def test_which_way_kv_leaves_a_gpu_is_said_and_what_keeps_it_from_the_card() -> None:
    def said(exclusive: bool, way: str) -> Finding:
        gpu = Gpu("H100", (9, 0), (13, 0), 80 << 30, exclusive)
        return machine.gpu(config(worker={"device": "cuda", "kv_transport": way}), lambda: gpu)

    assert said(False, "auto").what.endswith("KV goes from card to card: cuda_ipc on one, nccl between two")
    for way in sorted(set(names()) - FROM_CARD - IN_PROCESS):
        assert said(False, way).what.endswith(f"KV leaves by the host's pages (worker.kv_transport is {way})")
    refused = said(True, "auto")
    assert (refused.state, refused.remedy) == ("warn", "nvidia-smi -c DEFAULT, or kv_transport = shm")
    assert said(True, "tcp").state == "ok"


def test_whatever_is_wrong_has_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(
        "[router]\nport = 0\ngrpc_port = 0\n[worker]\ndevice = 'cuda'\nmodel = '/none'\n"
        "[redis]\nurl = 'redis://127.0.0.1:1'\n[ray]\naddress = '127.0.0.1:1'\n[tls]\ndir = '/none'\n"
    )
    found = [f for f in examine.examine(str(file), quick=True) if f.state in ("warn", "fail")]
    assert {"gpu", "model", "redis", "ray", "tls router", "tls worker"} <= {f.subject for f in found}
    assert all(f.remedy for f in found), found


def test_kernels_of_an_older_isa_are_told_where_the_compiler_is_too_old(monkeypatch) -> None:
    from baton.kernels.abi import build, native

    def built(isa: str) -> Path:
        if isa == "avx_vnni":
            raise build.BuildError("unrecognized command-line option '-mavxvnni'")
        return Path(f"{isa}.so")

    monkeypatch.setattr(native, "isa", lambda: "avx_vnni")
    for module in (build, native):
        monkeypatch.setattr(module, "built", built)
    assert machine.compiler() == Finding("kernels", "ok", "avx2.so"), "what a worker of this machine loads"


def test_without_a_compiler_kernels_come_from_the_prebuilt_folder(tmp_path: Path, monkeypatch) -> None:
    from baton.kernels.abi import build, native

    library = build.built(native.isa())
    name = build.prebuilt_name(native.isa(), (*build.FLAGS, *build.ISA_FLAGS[native.isa()]))
    monkeypatch.setenv("PATH", "/nowhere")
    assert states(machine.compiler()) == {"kernels": "warn"}
    (tmp_path / name).symlink_to(library)
    monkeypatch.setenv("BATON_KERNELS_DIR", str(tmp_path))
    assert states(machine.compiler()) == {"kernels": "ok"}
    assert build.built(native.isa()) == tmp_path / name


def test_transports_are_measured() -> None:
    found = services.transports()
    assert {f.subject for f in found} == {"kv by shm", "kv by tcp", "kv by grpc"}
    assert all("GB/s" in f.what for f in found)


def test_certificates_are_looked_at(tmp_path: Path) -> None:
    assert states(services.certificates(config())) == {"tls": "skip"}
    missing = services.certificates(config(tls={"dir": str(tmp_path / "none")}))
    assert states(missing) == {"tls router": "fail", "tls worker": "fail"}
    made = CliRunner().invoke(app, ["certs", "make", str(tmp_path / "certs")])
    assert made.exit_code == 0, made.output
    assert states(services.certificates(config(tls={"dir": str(tmp_path / "certs")}))) == {
        "tls router": "ok",
        "tls worker": "ok",
    }


def test_a_certificate_that_ends_soon_is_a_warning_and_one_that_is_over_a_failure(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.make()
    authority.issue("router", ["router.baton.internal"], days=6)
    authority.issue("worker", ["worker.baton.internal"], days=-2)
    authority.issue("public", ["api.example"], days=30)
    public = {"public_cert": str(tmp_path / "public.crt"), "public_key": str(tmp_path / "public.key")}
    found = services.certificates(config(tls={"dir": str(tmp_path), **public}))
    assert states(found) == {"tls router": "warn", "tls worker": "fail", "tls public": "ok"}
    assert "days left" in found[0].what
    assert "ended 2 days ago" in found[1].what
    assert all("renew" in f.remedy for f in found)


def test_an_examination_that_breaks_does_not_stop_the_others(monkeypatch) -> None:
    def broken(_):
        raise RuntimeError("odd kernel")

    monkeypatch.setitem(examine.LOOKS, "clock", broken)
    found = {f.subject: f for f in examine.examine(None, quick=True)}
    assert found["clock"].state == "warn"
    assert "odd kernel" in found["clock"].what
    assert "ray" in found


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("skip", 0), ("fail", 1)])
def test_only_a_failure_gives_a_failing_exit_code(state, code) -> None:
    assert exit_code([Finding("a", "ok", ""), Finding("b", state, "")]) == code
