"""Each process of a cluster settles its heap before it serves: no later collection walks what it began with."""

import subprocess
import sys

from baton.deploy import engine_main, router_host, worker_host
from baton.deploy.heap import settle_heap

CODE = """
import gc
kept = [{i: [i]} for i in range(200_000)]
gc.collect()
from baton.deploy.heap import settle_heap
settle_heap()
print(gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_what_was_made_before_is_never_walked_again():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    frozen, walked = map(int, done.stdout.split())
    assert frozen > 400_000
    assert walked < 1_000


def test_router_worker_and_engine_do_it():
    assert all(host.settle_heap is settle_heap for host in (router_host, worker_host, engine_main))
