"""No endless work is started but as work that lasts, so that a failure is counted and the work is begun again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.docs.sources import modules

# Where endless work is a part of other work, which waits for it and ends with it.
WAITED_FOR = {
    "decode_worker/io/host_receivers.py": {"run"},  # whose end is the news that a host is lost
    "kv/transport/loopback.py": {"_run"},  # whose end ends its stream
    "kv/transport/nccl.py": {"_watch"},  # nor is what waits for one channel to break
    "kv/tiers/stack.py": {"run"},  # a tier's ``run`` is no endless one
    "prefill_worker/io/divided_handoff.py": {"_run"},  # nor is a part's of a handoff
    "prefill_worker/io/host_handoff.py": {"_pass_on"},  # whose call's answer says how it ended
    "router/api/batch/lane.py": {"_end_if_cancelled"},
    "router/dispatch/dispatcher.py": {"run"},  # nor is a choice's
    "router/workers/link.py": {"_watch", "write_all", "read_all"},
    "router/workers/link_table.py": {"run"},  # a link makes itself anew
    "worker/rank_sender.py": {"run"},  # nor is a handoff's
}


def test_endless_work_is_started_as_lasting_work_alone() -> None:
    """A task that nobody waits for would end unseen with its first exception, and never do its work again."""
    endless = {node.name for nodes in served().values() for node in nodes if is_endless(node)}
    assert {"_run", "run", "watch_scale", "beat"} <= endless, "the search itself works"
    found = {(file, name) for file, nodes in served().items() for name in started(nodes) if name in endless}
    allowed = {(file, name) for file, names in WAITED_FOR.items() for name in names}
    assert found - allowed == set(), "start it by baton.tasks.lasting.lasting"
    assert allowed - found == set(), "these are started so no more"


def test_endless_work_that_survives_a_failed_turn_counts_it() -> None:
    """Such a task never fails, so that nobody would see that each of its turns does."""
    uncounted, counted = set[str](), set[str]()
    for path, nodes in served().items():
        for node in nodes:
            if is_endless(node):
                for handler in handlers_of_anything(node):
                    calls = {called(part) for part in ast.walk(handler) if isinstance(part, ast.Call)}
                    at = f"{path}: {getattr(node, 'name', '')}"
                    (counted if "count_failure" in calls else uncounted).add(at)
    assert "cluster/membership.py: _run" in counted, "the search itself works"
    assert uncounted == set(), "call baton.tasks.lasting.count_failure"


def handlers_of_anything(node: ast.AST) -> Iterator[ast.ExceptHandler]:
    """Yields the handlers of ``node`` that catch every exception and raise none."""
    for part in of_itself(node):
        catches = isinstance(part, ast.ExceptHandler) and getattr(part.type, "id", "") == "Exception"
        if catches and not any(isinstance(inner, ast.Raise) for inner in ast.walk(part)):
            yield part


def served() -> dict[str, tuple[ast.AST, ...]]:
    """Returns the nodes of each module of the product but those whose tasks fail a run of their own."""
    return {
        path.removeprefix("baton/"): nodes
        for path, nodes in modules("baton").items()
        if not path.startswith(("baton/drill/", "baton/bench/"))
    }


def is_endless(node: ast.AST) -> bool:
    """Returns whether ``node`` is a coroutine with a loop that only an exception ends."""
    return isinstance(node, ast.AsyncFunctionDef) and any(
        isinstance(part, ast.While)
        and isinstance(part.test, ast.Constant)
        and not any(isinstance(inner, ast.Return | ast.Break) for inner in of_itself(part))
        for part in of_itself(node)
    )


def of_itself(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all parts of ``node`` but those of functions within it."""
    for part in ast.iter_child_nodes(node):
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from of_itself(part)


def started(nodes: tuple[ast.AST, ...]) -> Iterator[str]:
    """Yields the names of the functions whose coroutines become tasks in another way."""
    for node in nodes:
        if isinstance(node, ast.Call) and called(node) in ("create_task", "ensure_future") and node.args:
            work = node.args[0]
            yield called(work) if isinstance(work, ast.Call) else ""


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
