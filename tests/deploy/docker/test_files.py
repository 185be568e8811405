"""Dockerfiles and the compose file, judged without Docker: pinned, non-root, and of one piece."""

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from baton.cluster.config import load_config

DOCKER = Path(__file__).parents[3] / "deploy" / "docker"
ROOT = DOCKER.parents[1]
DIGEST = r"@sha256:[0-9a-f]{64}$"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())


@pytest.mark.parametrize("file", sorted(DOCKER.glob("*.Dockerfile")), ids=lambda f: f.name)
def test_an_image_is_pinned_and_nobody_in_it_is_root(file: Path) -> None:
    text = file.read_text()
    bases = re.findall(r"^ARG (?:BUILD_)?BASE=(\S+)$", text, re.M)
    assert bases
    assert all(re.search(r":[\w.-]*\d+\.\d+[\w.-]*" + DIGEST, base) for base in bases)
    assert re.findall(r"^USER (\S+)$", text, re.M) == ["10001:10001"]
    assert "HEALTHCHECK" in text
    assert 'ENTRYPOINT ["baton"]' in text
    assert "-c constraints.txt" in text
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M):
        assert all(list(ROOT.glob(part)) for part in source.split()), source


def test_the_routers_image_has_no_torch_and_no_compiler() -> None:
    text = (DOCKER / "router.Dockerfile").read_text()
    assert "[worker" not in text
    assert "g++" not in text


def test_a_worker_image_has_every_kernel_that_its_devices_load() -> None:
    """The image has no compiler: what is built ahead must go by the name that the product looks for."""
    from baton.kernels.abi import build

    for name, commands in (
        ("worker", ["baton.kernels.abi.build"]),
        ("worker-cuda", ["baton.kernels.abi.build", "baton.kernels.cuda.build"]),
    ):
        text = (DOCKER / f"{name}.Dockerfile").read_text()
        folder = re.search(r"BATON_KERNELS_DIR=(\S+)", text)[1]
        assert re.findall(r"python -m (baton\.kernels\S+) (\S+)", text) == [(c, folder) for c in commands]
    assert build.prebuilt_name("plain", build.FLAGS).startswith("baton-plain-prebuilt-")
    packaged = (ROOT / "pyproject.toml").read_text().partition("[tool.setuptools.package-data]")[2]
    for file in (p for p in (ROOT / "baton" / "kernels").rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh")):
        assert f'"**/*{file.suffix}"' in packaged, "its text is part of the name"


@pytest.mark.parametrize("name", ["worker", "worker-cuda"])
def test_a_worker_image_takes_further_extras_such_as_the_client_of_buckets(name: str) -> None:
    text = (DOCKER / f"{name}.Dockerfile").read_text()
    build = text[: text.rindex("\nFROM ")]
    assert "\nARG EXTRAS=worker,ray\n" in build[build.rindex("\nFROM ") :], (
        "an ARG before FROM is none of a stage's"
    )
    assert '-c constraints.txt ".[${EXTRAS}]"' in build


def test_constraints_pin_every_direct_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(
        line.split("==") for line in (DOCKER / "constraints.txt").read_text().splitlines() if "==" in line
    )
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["worker"], *extras["ray"], *extras["s3"]):
        name = re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")
        assert name in pinned, f"{name}: add it to deploy/docker/constraints.txt"


# What deploy/docker/compose.yaml uses of the Compose specification; anything else in it is a slip.
WORDS = {"type": "array", "items": {"type": "string"}}
SERVICE = {
    "type": "object",
    "required": ["image"],
    "additionalProperties": False,
    "properties": {
        "image": {"type": "string"},
        "build": {
            "type": "object",
            "required": ["context", "dockerfile"],
            "additionalProperties": False,
            "properties": {"context": {"type": "string"}, "dockerfile": {"type": "string"}},
        },
        "command": WORDS,
        "hostname": {"type": "string"},
        "ports": WORDS,
        "volumes": WORDS,
        "tmpfs": WORDS,
        "cap_drop": WORDS,
        "security_opt": WORDS,
        "user": {"type": "string"},
        "read_only": {"type": "boolean"},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "stop_grace_period": {"type": "string", "pattern": r"^\d+(s|m)$"},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["condition"],
                "additionalProperties": False,
                "properties": {"condition": {"enum": ["service_started", "service_healthy"]}},
            },
        },
        "healthcheck": {
            "type": "object",
            "required": ["test"],
            "additionalProperties": False,
            "properties": {
                "test": WORDS,
                "interval": {"type": "string"},
                "timeout": {"type": "string"},
                "retries": {"type": "integer"},
            },
        },
    },
}


def test_the_compose_file_is_one_that_compose_takes() -> None:
    extensions = {key for key in COMPOSE if key.startswith("x-")}
    assert set(COMPOSE) == {"name", "services"} | extensions
    for service in COMPOSE["services"].values():
        jsonschema.validate(service, SERVICE)
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in COMPOSE["services"][other]
    for broken in ({"red_only": True}, {"healthcheck": {"test": "redis-cli ping"}}, {"restart": "sometimes"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(COMPOSE["services"]["redis"] | broken, SERVICE)


def test_a_container_has_longer_to_leave_than_its_drain_takes() -> None:
    config = load_config(str(DOCKER / "compose" / "baton.toml"))
    longest = max(config.worker.drain_grace_s, config.router.shutdown_grace_s)
    for name in ("router", "prefill", "decode"):
        assert int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s")) > longest


def test_the_compose_file_names_files_that_exist_and_pins_its_images() -> None:
    for name, service in COMPOSE["services"].items():
        ours, untold = (
            "build" in service,
            name in ("otel-collector", "jaeger"),
        )  # a version is what is known of these
        assert re.search(r":v?\d+\.\d+[\w.-]*" + ("$" if ours or untold else DIGEST), service["image"]), name
        for volume in service.get("volumes", []):
            assert (DOCKER / volume.split(":")[0]).exists(), volume
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), port
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_compose_config_is_one_the_product_takes() -> None:
    config = load_config(str(DOCKER / "compose" / "baton.toml"))
    scraped = yaml.safe_load((DOCKER / "compose" / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {target for job in scraped for static in job["static_configs"] for target in static["targets"]}
    assert targets == {
        f"router:{config.router.port}",
        f"prefill-0:{config.worker.metrics_port}",
        f"decode-0:{config.worker.metrics_port}",
    }
    collector = yaml.safe_load((DOCKER / "compose" / "otel-collector.yaml").read_text())
    listens = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert config.telemetry.otlp_endpoint.rpartition(":")[2] == listens.rpartition(":")[2]
