"""Writes the chart's values.schema.json: the shape of the values, and of `config` what the product's own config is.

python deploy/helm/schema.py            writes it
python deploy/helm/schema.py --check    exit status 1 when the file is not what would be written
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from baton.cluster.config import BatonConfig

FILE = Path(__file__).parent / "baton" / "values.schema.json"
Schema = dict[str, Any]

NAME = re.compile("^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")  # as protos/adapter_id.py has it
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
MAP: Schema = {"type": "object"}
LIST: Schema = {"type": "array"}
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 1024}
SOME: Schema = {"type": "integer", "minimum": 1, "maximum": 1024}
SECONDS: Schema = {"type": "integer", "minimum": 0, "maximum": 86400}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$"}
DURATION: Schema = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)([0-9]+(s|m))*$"}
REDIS_SIZE: Schema = {"type": "string", "pattern": r"^[0-9]+(b|kb|mb|gb)$"}
UNAVAILABLE: Schema = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+%$"}]}
PULL: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}
ROLE: Schema = {"enum": ["prefill", "decode"]}


def table(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object with these keys and no others."""
    found: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return found | ({"required": list(required)} if required else {})


def image() -> Schema:
    digest = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
    return table(repository={"type": "string", "minLength": 1}, tag=TEXT, digest=digest, pullPolicy=PULL)


def resources() -> Schema:
    amounts = {"type": "object", "additionalProperties": {"anyOf": [QUANTITY, {"type": "integer", "minimum": 0}]}}
    return table(requests=amounts, limits=amounts, claims=LIST)


def marks() -> dict[str, Schema]:
    return {"podAnnotations": STRINGS, "podLabels": STRINGS}


def where() -> dict[str, Schema]:
    return {"nodeSelector": STRINGS, "tolerations": LIST, "affinity": MAP, "priorityClassName": TEXT} | marks()


def placement() -> dict[str, Schema]:
    return where() | {"topologySpreadConstraints": LIST, "extraEnv": LIST}


def pool(**more: Schema) -> Schema:
    """What a pool of workers may say; the defaults say the same, but for role and replicas."""
    scalar = {"type": ["string", "number", "boolean"]}
    return table(
        device={"type": "string", "pattern": "^(cpu|cuda|paced:.+)$"},
        settings=table(**dict.fromkeys(worker_keys(), scalar)),
        resources=resources(),
        gpus={"type": "integer", "minimum": 0, "maximum": 16},
        runtimeClassName=TEXT,
        schedulerName=TEXT,
        minReplicas=SOME,
        maxReplicas=SOME,
        rankHosts={"type": "integer", "minimum": 0, "maximum": 15},
        diskTier=table(enabled=FLAG, size=QUANTITY, storageClass=TEXT),
        **placement(),
        **more,
    )


def worker_keys() -> list[str]:
    """Of [worker] in baton.toml."""
    return sorted(type(BatonConfig.model_fields["worker"].default).model_fields)


def budget() -> Schema:
    return table(enabled=FLAG, maxUnavailable=UNAVAILABLE)


def workers() -> Schema:
    pools = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"},
        "additionalProperties": {"anyOf": [{"type": "null"}, pool(role=ROLE, replicas=COUNT)]},
    }
    return table(
        mode={"enum": ["pods", "raycluster"]},
        ports=table(grpc=PORT, data=PORT, metrics=PORT, ranks=PORT),
        rankKey=table(existingSecret=TEXT),
        drainSeconds=SECONDS,
        startupSeconds={"type": "integer", "minimum": 10, "maximum": 86400},
        defaults=pool(),
        pools=pools,
        autoscaling=table(
            enabled=FLAG,
            prefillWaitingTokens={"type": "integer", "minimum": 1},
            decodeCacheUsage=QUANTITY,
            decodeBatchFill=QUANTITY,
            stabilizationSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
        ),
        podDisruptionBudget=budget(),
        ray=table(
            version={"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
            upgradeStrategy={"enum": ["None", "Recreate"]},
            headResources=resources(),
            **where(),
        ),
    )


def router() -> Schema:
    scaling = table(
        enabled=FLAG,
        minReplicas=SOME,
        maxReplicas=SOME,
        targetCPUUtilizationPercentage={"type": "integer", "minimum": 1, "maximum": 100},
    )
    return table(
        replicas=SOME,
        ports=table(http=PORT, grpc=PORT),
        preStopSeconds=SECONDS,
        drainSeconds=SECONDS,
        resources=resources(),
        autoscaling=scaling,
        podDisruptionBudget=budget(),
        **placement(),
    )


def adapters() -> Schema:
    path = {"type": "string", "pattern": r"^[^/\\][^\\]*$"}
    hub_id = {"type": "string", "pattern": r"^([\w.-]+/[\w.-]+)?$"}
    one = table(("path",), path=path, pinned=FLAG, tenant=TEXT, hub=hub_id, base_model_name=TEXT)
    return table(
        source={"enum": ["none", "pvc", "hostPath"]},
        path={"type": "string", "pattern": "^/.+"},
        pvc=table(claimName=TEXT, subPath=TEXT),
        hostPath={"type": "string", "pattern": "^(/.*)?$"},
        serve={"type": "object", "propertyNames": {"pattern": NAME.pattern}, "additionalProperties": one},
        prune=FLAG,
        reconcile=TEXT,
        waitSeconds=SECONDS,
        adminKeySecret=table(name=TEXT, key=TEXT),
        fetch=table(image=TEXT, command={"type": "array", "items": TEXT}, env=LIST),
        **marks(),
    )


def config() -> tuple[Schema, dict[str, Schema]]:
    """Of baton.toml, and the definitions that it refers to."""
    found = BatonConfig.model_json_schema()
    definitions = found.pop("$defs")
    for part in (found, *definitions.values()):
        part.pop("description", None)
        for value in part.get("properties", {}).values():
            value.pop("default", None)
            value.pop("title", None)
    return {"type": "object", "additionalProperties": False, "properties": found["properties"]}, definitions


def whole() -> Schema:
    """The schema."""
    both = table(("prefill", "decode"), prefill=COUNT, decode=SOME)
    sections, definitions = config()
    monitor = {"enabled": FLAG, "labels": STRINGS}
    hub_id = {"type": "string", "pattern": r"^([\w.-]+(/[\w.-]+)?)?$"}
    redis_url = {"type": "string", "pattern": "^(rediss?://.+)?$"}
    service_type = {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}
    properties = {
        "global": MAP,
        "nameOverride": TEXT,
        "fullnameOverride": TEXT,
        "image": table(router=image(), worker=image(), redis=image(), pullSecrets={"type": "array", "items": TEXT}),
        "model": table(
            source={"enum": ["image", "pvc", "hostPath", "imageVolume", "hub"]},
            name=TEXT,
            path=TEXT,
            pvc=table(claimName=TEXT, subPath=TEXT),
            hostPath={"type": "string", "pattern": "^(/.*)?$"},
            imageVolume=table(reference=TEXT, pullPolicy=PULL),
            hub=table(id=hub_id, tokenSecret=table(name=TEXT, key=TEXT)),
            cacheSize=QUANTITY,
        ),
        "adapters": adapters(),
        "ratio": {"anyOf": [both, {"const": "auto"}, {"type": "null"}]},
        "workers": workers(),
        "router": router(),
        "service": table(
            type=service_type, annotations=STRINGS, httpPort=PORT, grpcPort=PORT
        ),
        "ingress": table(enabled=FLAG, className=TEXT, annotations=STRINGS, host=TEXT, tlsSecret=TEXT),
        "gateway": table(enabled=FLAG, parentRefs=LIST, hostnames={"type": "array", "items": TEXT}),
        "auth": table(enabled=FLAG, existingSecret=TEXT, allowInsecure=FLAG),
        "redis": table(
            enabled=FLAG,
            existingSecret=TEXT,
            maxMemory=REDIS_SIZE,
            resources=resources(),
            **where(),
            external=table(url=redis_url, existingSecret=TEXT, caSecret=TEXT),
        ),
        "tls": table(
            mode={"enum": ["off", "certManager", "secret"]},
            domain={"type": "string", "pattern": r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"},
            publicSecret=TEXT,
            trustedNetwork=FLAG,
            issuerRef=table(name=TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=TEXT),
            duration=DURATION,
            renewBefore=DURATION,
            existingSecrets=table(router=TEXT, worker=TEXT, redis=TEXT, monitor=TEXT),
        ),
        "networkPolicy": table(
            enabled=FLAG, clients=LIST, monitoring=LIST, egress=table(enabled=FLAG, dns=LIST, more=LIST)
        ),
        "metrics": table(
            serviceMonitor=table(**monitor, interval=DURATION),
            prometheusRule=table(**monitor),
            dashboards=table(**monitor, annotations=STRINGS),
        ),
        "telemetry": table(otlpEndpoint=TEXT, logLevel={"enum": ["debug", "info", "warning", "error"]}),
        "serviceAccount": table(create=FLAG, name=TEXT, annotations=STRINGS),
        "podSecurityContext": table(
            runAsUser={"type": "integer", "minimum": 1}, runAsGroup={"type": "integer", "minimum": 1},
            fsGroup={"type": "integer", "minimum": 1},
        ),
        "config": sections,
    }  # fmt: skip
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the baton chart"}
    return {**head, **table(**properties), "$defs": definitions}


def main() -> int:
    """Write or compare."""
    text = json.dumps(whole(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        if FILE.read_text() == text:
            return 0
        print(f"{FILE.name} is stale: run python deploy/helm/schema.py", file=sys.stderr)
        return 1
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
