"""``baton keys add|list|revoke``: edits the file of API keys that `router.keys_file` names.

Knows nothing of routers; a running one reads the file again when it changes.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.cluster.config import load_config
from baton.console.output import print_table, results
from baton.router.access.keys import add_key, read_keys, revoke_key

DEFAULT = "keys.json"
COLUMNS = (
    "id",
    "tenant",
    "name",
    "state",
    "requests/min",
    "tokens/min",
    "weight",
    "priority",
    "models",
    "adapters",
    "admin",
)


def add(file: str | None, tenant: str, fields: dict[str, object]) -> int:
    """Adds an API key with ``fields`` of ApiKey and prints the key alone to stdout, for scripts; returns 0.

    Raises ConfigError.
    """
    path = keys_path(file)
    print(add_key(path, tenant, time.time(), **fields))
    told = f"a key of {tenant}, kept in {path} as a hash; it isn't shown again. Serve with --keys {path}"
    Console(stderr=True, highlight=False).print(told, soft_wrap=True)
    return 0


def show(file: str | None) -> int:
    """Prints a row per API key, without the keys themselves; returns 0. Raises ConfigError."""
    table = Table(box=None)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for key in read_keys(keys_path(file)):
        limits = [str(rate) if rate else "any" for rate in (key.requests_per_min, key.tokens_per_min)]
        row = [key.id, key.tenant, key.name, "revoked" if key.revoked else "open", *limits, f"{key.weight:g}"]
        adapters = ", ".join(key.adapters) or "all"
        bound = f" (bound to {key.adapter})" if key.adapter else ""
        models = ", ".join(key.models) or "all"
        table.add_row(*row, str(key.priority), models, adapters + bound, "yes" if key.admin else "")
    print_table(table)
    return 0


def revoke(file: str | None, key_id: str) -> int:
    """Revokes the API key with id ``key_id``, which stays in the list; returns 0.

    Raises ConfigError for an unknown id.
    """
    found = revoke_key(keys_path(file), key_id)
    results().print(f"{found.id} of {found.tenant} is revoked")
    return 0


def keys_path(file: str | None) -> Path:
    """Returns the path ``file``, else the configuration's ``router.keys_file``, else keys.json in the working
    directory.
    """
    return Path(file or load_config().router.keys_file or DEFAULT).resolve()
