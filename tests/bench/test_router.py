"""The router's benchmark, small: it measures, and its clients see what a router sends."""

import json

import pytest
import uvloop

from baton.bench import rows
from baton.bench.router import measure
from baton.bench.router.cluster import BenchCluster
from baton.bench.router.load import closed_loop, open_loop, request


@pytest.mark.thorough
def test_its_clients_measure_a_real_router_and_rows_say_where():
    with BenchCluster(decode=1) as cluster:
        found = uvloop.run(measure.overhead(cluster, 10))
        found += uvloop.run(measure.throughput(cluster, 1, 64, streams=4))
        found.append(uvloop.run(measure.cpu_per_request(cluster, 1, 10, long=False)))
        refused = uvloop.run(closed_loop(cluster.host, cluster.port, 1, lambda i: request("x", 0), 2))
        poisson = uvloop.run(open_loop(cluster.host, cluster.port, 50, 0.5, lambda i: request("hello", 3)))
    assert [o.status for o in refused] == [400, 400]
    assert all(o.good and o.tokens == 3 and 0 < o.ttft_s <= o.total_s for o in poisson)
    by_name = {row.name: row for row in found}
    assert {"TTFT added, p50", "TTFT added, p99", "CPU per request, 1k in / 128 out"} <= by_name.keys()
    assert by_name["streamed, one router, this machine"].value > 0
    [first, *_] = json.loads(rows.to_json(found))
    assert {"name", "value", "unit", "peer", "ratio", "spread", "commit", "machine"} <= first.keys()
