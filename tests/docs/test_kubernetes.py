"""The blocks of docs/kubernetes.md: its values render, its manifests are valid, its names are the chart's."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm.charts import CRDS, check, check_custom, profile, render_text

pytestmark = pytest.mark.usefixtures("helm_engine")
PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
MANIFESTS, VALUES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M)


def rendered(values: dict) -> list[dict]:
    """Returns the manifests of `helm install baton … -n llm`."""
    import helm_python

    from baton.console.setup.check import CHART

    texts = helm_python.Chart.load(CHART).render(values, name="baton", namespace="llm")
    return [m for name, t in texts.items() if not name.endswith(".txt") for m in yaml.safe_load_all(t) if m]


def production() -> dict:
    from baton.console.setup.check import overlaid

    return overlaid(profile("values-h100.yaml"), yaml.safe_load(VALUES))


def test_the_production_values_give_valid_manifests() -> None:
    for manifest in rendered(production()):
        check(manifest, "1.34.0")


def test_the_product_finds_nothing_wrong_with_them(tmp_path: Path) -> None:
    from baton.console.setup.check import CHART, check_files
    from baton.console.setup.findings import exit_code

    (tmp_path / "production.yaml").write_text(VALUES)
    found = check_files([str(CHART / "values-h100.yaml"), str(tmp_path / "production.yaml")], None)
    assert exit_code(found) == 0, found
    assert not [f for f in found if f.state == "warn"], found


def test_the_certificates_are_what_cert_manager_takes_and_what_the_values_name() -> None:
    issuer, authority, signer = yaml.safe_load_all(MANIFESTS)
    check_custom(authority, json.loads((CRDS / "certificate.json").read_text()))
    assert authority["spec"]["issuerRef"]["name"] == issuer["metadata"]["name"]
    assert signer["spec"]["ca"]["secretName"] == authority["spec"]["secretName"]
    assert yaml.safe_load(VALUES)["tls"]["issuerRef"]["name"] == signer["metadata"]["name"]


def test_objects_that_commands_name_are_the_releases() -> None:
    names = {f"{m['kind'].lower()}/{m['metadata']['name']}" for m in rendered(production())}
    named = set(re.findall(r"(?:deployment|statefulset|service)/[a-z-]+", PAGE))
    named |= {f"deployment/{name}" for name in re.findall(r"deploy/(baton-\w+) --", PAGE)}
    assert named <= names, named - names
    made = set(re.findall(r"create secret generic (\S+)", PAGE))
    values = yaml.safe_load(VALUES)
    assert {values["auth"]["existingSecret"], values["redis"]["existingSecret"]} == made


def test_the_quick_start_is_served_without_a_key() -> None:
    assert "auth" in profile("values-dev.yaml")
    assert not profile("values-dev.yaml")["auth"]["enabled"]
    assert "NOTES.txt" in next(name for name in render_text(profile("values-dev.yaml")) if "NOTES" in name)
