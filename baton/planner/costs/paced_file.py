"""Worker costs written as a paced profile: a small TOML file for both the simulator and ``--device paced:FILE``.

Knows nothing of where the costs come from. A paced step has no ``max``: reading the weights is in every step.
"""

from __future__ import annotations

import json

from baton.planner.costs.worker import WorkerCosts
from baton.protos.nouns import BLOCK_TOKENS

SHIPPED_BYTES_PER_TOKEN = 64  # what a paced worker really ships per token


def to_toml(costs: WorkerCosts, vocab_size: int, max_model_len: int, prefill_chunk: int) -> str:
    """Returns the TOML text of a paced profile of a worker that costs ``costs``; sizes are in tokens."""
    scale = costs.kv_bytes_per_token / SHIPPED_BYTES_PER_TOKEN
    step, transfer = costs.curve, costs.transfer
    lines = [
        f"about = {json.dumps(costs.about, ensure_ascii=False)}",
        f"kv_bytes_per_token = {SHIPPED_BYTES_PER_TOKEN}",
        f"model_kv_bytes_per_token = {costs.kv_bytes_per_token}",
        f"pages = {max(1, costs.kv_tokens // BLOCK_TOKENS)}",
        f"vocab_size = {vocab_size}",
        f"max_model_len = {max_model_len}",
        f"prefill_chunk = {prefill_chunk}",
        "",
        "[step]",
        *(f"{name} = {getattr(step, name):.6g}" for name in step.__struct_fields__),
        "",
        "[transfer]",
        f"fixed = {transfer.fixed:.6g}",
        f"per_byte = {transfer.per_byte * scale:.6g}",
        "",
        "[overhead]",
        *(f"{name} = {getattr(costs.overhead, name):.6g}" for name in costs.overhead.__struct_fields__),
    ]
    if (ranks := costs.ranks) is not None:
        lines += [
            "",
            "[ranks]",
            f'shared = "{ranks.shared}"',
            f"count = {ranks.count}",
            f"widths = [{', '.join(map(str, ranks.widths))}]",
            f"meetings = {ranks.meetings}",
            f"meeting_s = {ranks.meeting_s:.6g}",
        ]
    if (adapters := costs.adapters) is not None:
        lines += [
            "",
            "[adapters]",
            *(f"{name} = {getattr(adapters, name):.6g}" for name in adapters.__struct_fields__),
        ]
    return "\n".join(lines) + "\n"
