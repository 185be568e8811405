"""``baton check -f FILE``: checks a baton.toml, or values of the Helm chart. Nothing is started.

Knows nothing of machines (``baton doctor`` does). Values are rendered by the real Helm engine where
``helm-python-sdk`` is installed, and the result is checked as the product would read it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

import baton
from baton.cluster.config import BatonConfig, load_config
from baton.cluster.served_model import is_paced
from baton.console.setup.findings import Finding, remedy_of, tried
from baton.console.setup.places import files_of, places_of
from baton.cost.profiles import load_profile
from baton.launch.servable import servable_model
from baton.protos.errors import BatonError, ConfigError
from baton.protos.json import Json

CHART = Path(baton.__file__).resolve().parents[1] / "deploy" / "helm" / "baton"
Values = Json


def check_files(files: Sequence[str], chart: str | None) -> list[Finding]:
    """Returns the findings for a baton.toml, or for Helm values files laid over one another.

    Raises ConfigError for unreadable files.
    """
    if not files:
        raise ConfigError("name a file: baton check -f baton.toml, or -f values.yaml", "file")
    kinds = {Path(file).suffix for file in files}
    if kinds <= {".yaml", ".yml"}:
        return check_values([read_values(file) for file in files], Path(chart) if chart else CHART)
    if len(files) > 1 or kinds != {".toml"}:
        raise ConfigError("give one baton.toml, or values files (.yaml) that are laid over one another", "file")
    return check_toml(files[0])


def check_toml(file: str) -> list[Finding]:
    """Returns the findings for a baton.toml as it would apply here and now, environment variables included."""
    try:
        config = load_config(file)
    except BatonError as error:
        return [Finding(error.param or "config", "fail", error.message, remedy_of(error))]
    given = sorted(name for name in os.environ if re.fullmatch(r"BATON_[A-Z]+__[A-Z_]+", name))
    said = f"every key is known; {len(given)} of them from the environment" if given else "every key is known"
    return [
        Finding("config", "ok", said),
        *names_of(config),
        *files_of(config),
        *places_of(config),
        *_model(config),
    ]


def names_of(config: BatonConfig) -> list[Finding]:
    """Returns findings on settings that name a policy, a KV transport, a parser or speculators."""
    from baton.engine.speculate.names import speculator_names
    from baton.kv.transport import check_name
    from baton.router.policies import load_policy
    from baton.router.text import reasoning_parsers, tool_parsers

    checks = {
        "router.policy": lambda: load_policy(config.router.policy),
        "router.tool_parser": lambda: tool_parsers.load(config.router.tool_parser),
        "router.reasoning_parser": lambda: reasoning_parsers.load(config.router.reasoning_parser),
        "worker.kv_transport": lambda: check_name(config.worker.kv_transport),
        "worker.speculation": lambda: speculator_names(config.worker.speculation) and config.worker.speculation,
    }
    return [tried(key, check) for key, check in checks.items()]


def profile_of(config: BatonConfig) -> list[Finding]:
    """Returns the finding on the profile of a paced engine; none for another device."""
    kind, _, name = config.worker.device.partition(":")
    return [tried("worker.device", lambda: load_profile(name) and name)] if kind == "paced" else []


def _model(config: BatonConfig) -> list[Finding]:
    if is_paced(config):
        none = Finding("worker.model", "ok", f"none is needed: {config.worker.device}")
        return [*profile_of(config), none]
    return [tried("worker.model", lambda: servable_model(config))]


# ---- values of the chart -----------------------------------------------------------------------------------


def read_values(file: str) -> Values:
    """Returns the Helm values in YAML file ``file``. Raises ConfigError."""
    try:
        found = yaml.safe_load(Path(file).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}", "file") from None
    if not isinstance(found or {}, dict):
        raise ConfigError(f"{file}: values are a map of keys, this is a {type(found).__name__}", "file")
    return found or {}


def check_values(layers: Sequence[Values], chart: Path) -> list[Finding]:
    """Returns findings on values ``layers``, as ``helm install -f A -f B`` would see them.

    Raises ConfigError if ``chart`` is no chart.
    """
    values: Values = {}
    for layer in layers:
        values = overlaid(values, layer)
    try:
        import helm_python
    except ImportError:
        skipped = Finding("chart", "skip", "helm-python-sdk is not installed: only `config` was checked")
        return [skipped, *_check_sections(values.get("config") or {})]
    if not (chart / "Chart.yaml").is_file():
        raise ConfigError(f"{chart} is no chart: name it with --chart DIR", "chart")
    try:
        loaded = helm_python.Chart.load(chart)
        rendered = loaded.render(values, name="check", namespace="check")
    except helm_python.errors.HelmError as error:
        return [Finding(key, "fail", text, _known_keys(chart, key, text)) for key, text in refusals(str(error))]
    objects = [m for n, t in rendered.items() if not n.endswith(".txt") for m in yaml.safe_load_all(t) if m]
    kinds = sorted({m["kind"] for m in objects})
    said = Finding("chart", "ok", f"renders {len(objects)} objects: {', '.join(kinds)}")
    toml = next(m["data"]["baton.toml"] for m in objects if m["kind"] == "ConfigMap" and "baton.toml" in m["data"])
    whole = loaded.merge_values(values)
    return [said, *_check_text(toml), *_check_pools(whole["workers"], toml), *_advice(whole)]


def refusals(text: str) -> list[tuple[str, str]]:
    """Returns (key, what is wrong) for each refusal in a message of the Helm engine, by the schema or by a
    template.
    """
    lines = re.findall(r"- at '([^']*)': (.+)", text)
    if lines:
        return [(path.strip("/").replace("/", ".") or "values", what) for path, what in lines]
    found = re.search(r"values: (.+)", text)
    said = found[1].strip() if found else text.strip().splitlines()[-1]
    key = re.match(r"[A-Za-z][\w.-]*", said)
    return [(key[0].rstrip(".") if key else "values", said)]


def _known_keys(chart: Path, key: str, text: str) -> str:
    """Returns in words which keys there are at ``key`` of the chart's values, if a key is refused there as none."""
    if not text.startswith("additional properties"):
        return ""
    schema = json.loads((chart / "values.schema.json").read_bytes())
    found = schema
    for part in () if key == "values" else key.split("."):
        found = found.get("properties", {}).get(part) or found.get("additionalProperties")
        if not isinstance(found, dict):
            return ""
        found = next((one for one in found.get("anyOf", ()) if one.get("type") != "null"), found)
        if "$ref" in found:
            found = schema["$defs"][found["$ref"].rpartition("/")[2]]
    known = sorted(found.get("properties", {}))
    return f"keys of {key}: {', '.join(known)}" if known else ""


def _check_text(toml: str) -> list[Finding]:
    try:
        config = _loaded(toml, {})
    except BatonError as error:
        return [Finding(f"config.{error.param}", "fail", error.message)]
    return [Finding("config", "ok", "the rendered baton.toml is right"), *names_of(config)]


def _check_pools(workers: Values, toml: str) -> list[Finding]:
    """Returns what each pool's pods get in their environment: its device, and settings of its own."""
    found = []
    for name, own in workers["pools"].items():
        pool = overlaid(workers["defaults"], own or {})
        try:
            _loaded(toml, {"worker": {"device": pool["device"], **pool["settings"]}})
        except BatonError as error:
            key = (error.param or "").removeprefix("worker.")
            found.append(Finding(f"workers.pools.{name}.settings.{key}", "fail", error.message))
    return found


def _loaded(toml: str, flags: Values) -> BatonConfig:
    """Reads the configuration as a pod reads it. Raises ConfigError."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(toml)
        file.flush()
        return load_config(file.name, flags)


def _check_sections(sections: Values) -> list[Finding]:
    try:
        load_config(None, sections, Path("/nonexistent"))
    except BatonError as error:
        return [Finding(f"config.{error.param}", "fail", error.message)]
    return [Finding("config", "ok", "every key is known")]


def _advice(values: Values) -> list[Finding]:
    """Returns findings for settings that are allowed and seldom wanted in production."""
    found = []
    if not values["auth"]["enabled"]:
        found.append(Finding("auth.enabled", "warn", "anybody who reaches the router may use it", "enable auth"))
    if values["tls"]["mode"] == "off":
        text = "router, workers and Redis speak plaintext to one another"
        found.append(Finding("tls.mode", "warn", text, "certManager with an Issuer that has a CA"))
    if not values["networkPolicy"]["enabled"]:
        text = "every pod of the cluster reaches workers' KV ports"
        found.append(
            Finding("networkPolicy.enabled", "warn", text, "enable it where the network plugin enforces it")
        )
    if values["router"]["replicas"] < 2 and not values["router"]["autoscaling"]["enabled"]:
        found.append(
            Finding("router.replicas", "warn", "one router: an upgrade or a lost node is an outage", "2 or more")
        )
    return found


def overlaid(below: Values, above: Values) -> Values:
    """Returns ``below`` with ``above`` merged in: maps merge, other values are replaced, null removes a key, as in
    Helm.
    """
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = overlaid(merged[key], value) if both else value
    return merged
