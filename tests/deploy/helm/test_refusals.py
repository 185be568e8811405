"""Wrong values are refused before anything is installed, with a message that names the key."""

import pytest
import yaml

from tests.deploy.helm.charts import render

WRONG = {
    "workers: {mode: statefulset}": "/workers/mode",
    "workers: {modes: pods}": "modes",
    "ratio: {prefill: -3, decode: 1}": "/ratio",
    "ratio: {prefill: 3, decode: 0}": "/ratio",
    "ratio: automatic": "/ratio",
    "ratio: null": "workers.pools.decode.replicas is missing",
    "workers: {pools: {decode: {replicas: 2}}}": "workers.pools.decode.replicas and ratio both",
    "workers: {pools: {decode: {role: writer}}}": "/workers/pools/decode",
    "workers: {pools: {decode: null}}": "no pool with role: decode",
    "workers: {pools: {prefill: null}}": "no pool with role: prefill",
    "workers: {mode: raycluster, autoscaling: {enabled: true}}": "autoscaling.enabled needs workers.mode: pods",
    "{ratio: auto, workers: {autoscaling: {enabled: true}}}": "workers.autoscaling.enabled and ratio: auto both",
    "{ratio: auto, config: {controller: {mode: 'off'}}}": "config.controller.mode is set by ratio: auto",
    "config: {controller: {most_workers: 4}}": "config.controller.most_workers asks `baton place`",
    "workers: {pools: {long: {role: prefill}}}": "ratio can't say how the prefill pools",
    "workers: {defaults: {device: gpu}}": "/workers/defaults/device",
    "workers: {defaults: {device: cuda}}": "gpus is 0: set gpus: 1",
    "workers: {defaults: {device: cuda, gpus: 8}}": "gpus is 8, and a worker's engine computes on one: set gpus: 1",
    "workers: {autoscaling: {enabled: true}}": "networkPolicy.monitoring is empty, so that nobody reaches workers'",
    "metrics: {serviceMonitor: {enabled: true}}": "and metrics.serviceMonitor needs them: name who asks",
    "networkPolicy: {egress: {mroe: []}}": "/networkPolicy/egress",
    "workers: {defaults: {gpus: 1}}": "device is cpu: set device: cuda",
    "workers: {defaults: {settings: {batch: 3}}}": "/workers/defaults/settings': additional properties 'batch'",
    "workers: {pools: {decode: {settings: {port: 9000}}}}": "pools.decode.settings.port is set by the chart",
    "workers: {pools: {decode: {diskTier: {enabled: true}, settings: {disk_tier_dir: /x}}}}": (
        "workers.pools.decode.settings.disk_tier_dir is set by the chart where diskTier.enabled is"
    ),
    "{workers: {defaults: {diskTier: {enabled: true}}}, config: {worker: {disk_tier_dir: /x}}}": (
        "config.worker.disk_tier_dir is set by the chart"
    ),
    "workers: {pools: {decode: {minReplicas: 9}}}": "pools.decode.minReplicas 9 is more than its maxReplicas",
    "workers: {ports: {grpc: 8101}}": "workers.ports: grpc, data and metrics",
    "workers: {ports: {grpc: 0}}": "/workers/ports/grpc",
    "workers: {defaults: {resources: {limits: {memory: lots}}}}": "/workers/defaults/resources/limits/memory",
    "workers: {pools: {decode: {rankHosts: 1}}}": "its worker has 1 ranks: set settings.pp to 2",
    "workers: {pools: {decode: {rankHosts: 3, settings: {tp: 3}}}}": "its worker has 3 ranks: set settings.pp to 4",
    "workers: {mode: raycluster, defaults: {rankHosts: 1, settings: {pp: 2}}}": "needs workers.mode: pods",
    "workers: {defaults: {rankHosts: 1, settings: {pp: 2}, device: 'paced:zero'}}": "ranks run on the cpu only",
    "{workers: {autoscaling: {enabled: true}, defaults: {rankHosts: 1, settings: {pp: 2}}}}": "autoscaling would",
    "config: {worker: {rank_hosts: ['a:1']}}": "config.worker.rank_hosts is set by the chart",
    "router: {replicas: 0}": "/router/replicas",
    "router: {ports: {http: 8001}}": "router.ports: http and grpc",
    "router: {autoscaling: {minReplicas: 20}}": "router.autoscaling.minReplicas",
    "model: {source: s3}": "/model/source",
    "model: {source: pvc}": "model.pvc.claimName is empty",
    "model: {source: hub}": "model.hub.id is empty",
    "model: {source: hostPath}": "model.hostPath is empty",
    "model: {source: imageVolume}": "model.imageVolume.reference is empty",
    "model: {source: pvc, path: models, pvc: {claimName: m}}": 'model.path "models"',
    "adapters: {source: pvc}": "adapters.pvc.claimName is empty",
    "adapters: {source: hostPath}": "adapters.hostPath is empty",
    "adapters: {serve: {sql: {path: sql}}}": "adapters.source is none",
    "adapters: {prune: true}": "adapters.source is none",
    "adapters: {source: hostPath, hostPath: /a, fetch: {image: i}}": "adapters.fetch fills a claim",
    "adapters: {serve: {'a b': {path: sql}}}": "invalid propertyName 'a b'",
    "adapters: {serve: {sql: {path: /etc}}}": "/adapters/serve/sql/path",
    "{adapters: {source: hostPath, hostPath: /a, serve: {sql: {path: s, hub: a/b}}}}": "sql.hub is fetched into a",
    "{adapters: {source: hostPath, hostPath: /a, serve: {sql: {path: s}}}, auth: {existingSecret: k}}": (
        "adapters.adminKeySecret.name"
    ),
    "config: {adapters: {root: /x}}": "config.adapters.root is set by the chart: use adapters.path",
    "auth: {enabled: false}": "auth.allowInsecure: true",
    "redis: {enabled: false}": "redis.external.url is empty",
    "redis: {enabled: false, external: {url: 'redis://:pw@host:6379'}}": "redis.external.url holds a password",
    "redis: {external: {url: 'http://host'}}": "/redis/external/url",
    "tls: {mode: 'yes'}": "/tls/mode",
    "tls: {mode: certManager}": "tls.issuerRef.name is empty",
    "tls: {mode: secret, existingSecrets: {router: a}}": "tls.existingSecrets.worker is empty",
    "ingress: {enabled: true}": "ingress.host is empty",
    "gateway: {enabled: true}": "gateway.parentRefs is empty",
    "config: {router: {polici: cost}}": "/config/router",
    "config: {router: {max_queue: many}}": "/config/router/max_queue",
    "config: {router: {port: 9000}}": "config.router.port is set by the chart: use router.ports.http",
    "config: {worker: {model: x}}": "config.worker.model is set by the chart",
    "config: {redis: {password: x}}": "config.redis.password is set by the chart",
    "podSecurityContext: {runAsUser: 0}": "/podSecurityContext/runAsUser",
    "imagee: {}": "imagee",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_values_are_refused_by_name(text: str) -> None:
    with pytest.raises(Exception) as refused:
        render(yaml.safe_load(text))
    message = str(refused.value).replace("\\", "")
    assert WRONG[text] in message, message
