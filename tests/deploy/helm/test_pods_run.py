"""Runs what the chart's pods run: the rendered commands, environment and config, as local processes."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from baton.engine.adapters.tensors import FILE as ADAPTER_FILE
from tests.deploy.helm.charts import ROOT, Manifest, profile
from tests.deploy.helm.running_pods import PACED, UP_S, Place, _ask, _wait, serve, up
from tests.fake_hub import hub


@pytest.mark.thorough  # run by make helm-check
def test_the_rendered_pods_answer_a_request_with_the_generated_key_and_password() -> None:
    serve(PACED)


@pytest.mark.thorough  # make helm-check runs it too
def test_the_adapters_job_serves_what_the_values_name_and_an_upgrade_takes_out_what_they_name_no_more(
    tmp_path: Path,
) -> None:
    for name in ("sql", "style"):
        _write_adapter(tmp_path / name)
    adapters: Manifest = {"source": "hostPath", "hostPath": str(tmp_path), "prune": True}
    both, one_left = ({"serve": {name: {"path": name} for name in names}} for names in (("sql", "style"), ("sql",)))
    with up({**PACED, "adapters": {**adapters, **both}}) as (place, _, _):
        assert _applied(place) == {"sql", "style"}
        assert _applied(place) == {"sql", "style"}, "again, as a schedule does"
        place.upgrade({**PACED, "adapters": {**adapters, **one_left}})
        assert _applied(place) == {"sql"}


@pytest.mark.thorough  # make helm-check runs it too
def test_the_adapters_job_first_fills_the_claim_from_which_workers_load(tmp_path: Path) -> None:
    for name in ("sql", "style"):
        _write_adapter(tmp_path / name)
    root = "/var/lib/baton/adapters"
    adapters: Manifest = {
        "source": "pvc",
        "pvc": {"claimName": "a"},
        "fetch": {
            "image": "any/image:1",
            "command": ["cp", "-r", str(tmp_path / "sql"), str(tmp_path / "style"), root],
        },
        "serve": {"sql": {"path": "sql", "pinned": True}, "style": {"path": "style", "hub": "acme/style"}},
    }
    with up({**PACED, "adapters": adapters}) as (place, _, _):
        assert not list(place.claim("a").iterdir())
        assert _applied(place, inits=["fetch", "hub"]) == {"sql", "style"}
        assert {path.name for path in place.claim("a").iterdir()} == {"sql", "style"}


# What `aws s3 sync` does of an adapter's folder, where the command isn't installed.
SYNC = """
import boto3, os, pathlib, sys
bucket, root = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]), pathlib.Path(sys.argv[2])
for entry in bucket.list_objects_v2(Bucket=sys.argv[1])["Contents"]:
    (root / entry["Key"]).parent.mkdir(parents=True, exist_ok=True)
    bucket.download_file(sys.argv[1], entry["Key"], str(root / entry["Key"]))
"""


@pytest.mark.thorough  # make helm-check runs it too
def test_the_adapters_job_fetches_from_an_object_store_and_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    for name in ("sql", "style"):
        _write_adapter(tmp_path / name)
    root = "/var/lib/baton/adapters"
    aws = ["aws", "s3", "sync", "s3://adapters", root]
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        address = "http://{}:{}".format(*server.get_host_and_port())
        given = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"), "us-east-1")
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        store = boto3.client("s3", endpoint_url=address)
        store.create_bucket(Bucket="adapters")
        for path in (tmp_path / "sql").iterdir():
            store.upload_file(str(path), "adapters", f"sql/{path.name}")
        with hub({"acme/style": tmp_path / "style"}) as endpoint:
            env = [{"name": name, "value": value} for name, value in given.items()]
            env += [{"name": "AWS_ENDPOINT_URL", "value": address}, {"name": "HF_ENDPOINT", "value": endpoint}]
            command = aws if shutil.which("aws") else [sys.executable, "-c", SYNC, "adapters", root]
            adapters: Manifest = {
                "source": "pvc",
                "pvc": {"claimName": "a"},
                "fetch": {"image": "any/image:1", "command": command, "env": env},
                "serve": {"sql": {"path": "sql"}, "style": {"path": "style/2", "hub": "acme/style"}},
            }
            with up({**PACED, "adapters": adapters}) as (place, _, _):
                assert _applied(place, inits=["fetch", "hub"]) == {"sql", "style"}
                assert (place.claim("a") / "style" / "2" / ADAPTER_FILE).is_file()
    finally:
        server.stop()


def _write_adapter(folder: Path) -> None:
    """A paced engine takes modules of any name."""
    folder.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    save_file({f"{module}_{half}.weight": np.ones((4, 4), np.float32) for half in "AB"}, folder / ADAPTER_FILE)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')


def _applied(place: Place, inits: Sequence[str] = ()) -> set[str]:
    """Returns the adapters that the chart's own key sees after the Job, whose init containers are ``inits``; each
    adapter has answered.
    """
    job = next(m for m in place.manifests if m["kind"] == "Job")
    before = [container["name"] for container in job["spec"]["template"]["spec"].get("initContainers", ())]
    assert before == list(inits)
    for container in (*range(len(inits)), None):
        pod = place.start("Job", job["metadata"]["name"], "127.0.0.1", container)
        assert pod.process.wait(UP_S) == 0, pod.log()
    headers = {"Authorization": f"Bearer {place.secret('demo-baton-keys')['api-key']}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{place.http}", headers=headers, timeout=60) as client:
        served = {model["id"] for model in client.get("/v1/models").json()["data"] if model.get("parent")}
        for name in served:
            answer = client.post("/v1/completions", json={"model": name, "prompt": [7] * 40, "max_tokens": 4})
            assert answer.status_code == 200, answer.text
    return served


@pytest.mark.thorough  # make helm-check runs it too
def test_with_mutual_tls_the_rendered_pods_answer_as_well(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "baton", "certs", "make", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    ca = (tmp_path / "ca.crt").read_text()
    secrets = {
        f"{role}-certificate": {
            "tls.crt": (tmp_path / f"{role}.crt").read_text(),
            "tls.key": (tmp_path / f"{role}.key").read_text(),
            "ca.crt": ca,
        }
        for role in ("router", "worker")
    }
    tls = {"mode": "secret", "existingSecrets": {"router": "router-certificate", "worker": "worker-certificate"}}
    redis = {"enabled": False, "external": {"url": "redis://demo-baton-redis:6379/0"}}
    serve({**PACED, "tls": tls, "redis": redis}, secrets)


@pytest.mark.soak
def test_the_dev_profile_answers_with_the_demo_model() -> None:
    values = profile("values-dev.yaml")
    serve({**values, "model": {"path": str(ROOT / "models" / "demo")}})


@pytest.mark.soak
def test_a_worker_whose_further_pod_comes_later_answers_and_ends_in_order() -> None:
    network = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
    values = {
        "workers": {
            "drainSeconds": 5,
            "pools": {"prefill": {"rankHosts": 1, "settings": {"pp": 2}}},
            "defaults": {"settings": {"kv_memory_bytes": 67108864}},
        },
        "model": {"path": str(ROOT / "models" / "demo")},
        "router": {"drainSeconds": 2},
    }
    with Place(values) as place:
        place.names["demo-baton-prefill-0-ranks-0.demo-baton-prefill-ranks"] = f"{network}.4"
        _wait(place.start("StatefulSet", "demo-baton-redis", "127.0.0.1"), "startupProbe")
        decode = place.start("StatefulSet", "demo-baton-decode", f"{network}.3")
        lead = place.start("StatefulSet", "demo-baton-prefill", f"{network}.2")
        router = place.start("Deployment", "demo-baton-router", "127.0.0.1")
        _wait(decode, "readinessProbe")
        assert not lead.passes("startupProbe"), "it waits for its ranks"
        ranks = place.start("StatefulSet", "demo-baton-prefill-0-ranks", f"{network}.4")
        _wait(ranks, "readinessProbe")
        for pod in (lead, router):
            _wait(pod, "readinessProbe")
        assert ranks.passes("livenessProbe")
        _ask(place, router)
        ranks.process.send_signal(signal.SIGTERM)  # as an upgrade tells all pods at once
        assert lead.stop() == 0, lead.log()
        assert ranks.process.wait(60) == 0, ranks.log()
        assert "ended by itself" not in lead.log(), "its ranks waited until it had drained"
