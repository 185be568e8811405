"""Dockerfiles and the compose file, judged without Docker: pinned, non-root, and of one piece."""

import re
from pathlib import Path

import pytest
import yaml

from baton.cluster.config import load_config

DOCKER = Path(__file__).parents[3] / "deploy" / "docker"
ROOT = DOCKER.parents[1]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())


@pytest.mark.parametrize("file", sorted(DOCKER.glob("*.Dockerfile")), ids=lambda f: f.name)
def test_an_image_is_pinned_and_nobody_in_it_is_root(file: Path) -> None:
    text = file.read_text()
    bases = re.findall(r"^ARG (?:BUILD_)?BASE=(\S+)$", text, re.M)
    assert bases
    assert all(re.search(r":[\w.-]*\d+\.\d+", base) for base in bases)
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


def test_constraints_pin_every_direct_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(
        line.split("==") for line in (DOCKER / "constraints.txt").read_text().splitlines() if "==" in line
    )
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["worker"], *extras["ray"]):
        name = re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")
        assert name in pinned, f"{name}: add it to deploy/docker/constraints.txt"


def test_the_compose_file_names_files_that_exist_and_pins_its_images() -> None:
    for name, service in COMPOSE["services"].items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name
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
