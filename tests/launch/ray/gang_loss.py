"""Kills a node of a real Ray while a slot that needs two is being placed there; prints what became of it, as JSON.

Run by ``test_gang_loss``, in a process of its own: ``gang_loss FOLDER``.
"""

import json
import os
import sys
import time
from pathlib import Path

from baton.launch.ray.app import PlacementSpec, quiet_environment
from baton.launch.ray.seats import Seats
from baton.launch.supervise import HostPlan

PATIENCE_S = 90.0
FAST_DEATH = {
    "RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "2", "RAY_health_check_initial_delay_ms": "500",
}  # fmt: skip
FAKE = Path(__file__).parents[1] / "fake_host.py"


def main(folder: Path) -> None:
    os.environ.update(quiet_environment(PlacementSpec((), str(folder), auth_mode="disabled")) | FAST_DEATH)
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group_table

    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
    nodes = {
        node.node_id: node for node in (cluster.add_node(resources={"baton_decode": 1}, **small) for _ in "abc")
    }
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="t")
    seats = Seats(ray)
    seats.want([wide(folder)])
    seats.tend()
    [placed] = [seated.seat.node_ids for seated in seats._seats.values()]
    cluster.remove_node(nodes[placed[1]], allow_graceful=False)
    began, state = time.monotonic(), ""
    while state != "ready" and time.monotonic() - began < PATIENCE_S:
        seats.tend()
        state = seats.statuses()[0]["decode-0"].state
        time.sleep(0.1)
    [now] = [seated.seat.node_ids for seated in seats._seats.values()]
    groups = [group["state"] for group in placement_group_table().values()]
    left = {
        node: room.get("baton_decode", 0)
        for node, room in ray._private.state.available_resources_per_node().items()
    }
    said = {
        "state": state, "killed": placed[1], "now": now, "groups": sorted(groups),
        "free": [node for node in nodes if node not in now and left.get(node, 0)],
    }  # fmt: skip
    seats.stop_all(1.0)
    print(json.dumps(said), flush=True)
    ray.shutdown()
    cluster.shutdown()


def wide(folder: Path) -> HostPlan:
    """A slot on two nodes, whose host is a fake one; its ranks are served by real actors."""
    key, spec = folder / "key", folder / "host"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    spec.write_text(f"{folder}|decode-0|stay")
    command = (sys.executable, str(FAKE), str(spec))
    return HostPlan(
        "decode-0", "decode", "", str(folder), str(folder / "log"), command, hosts=2, rank_key_file=str(key)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
