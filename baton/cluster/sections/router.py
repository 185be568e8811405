"""``[router]`` and its context classes. Knows nothing of what a router does with them."""

from __future__ import annotations

from pydantic import Field, model_validator

from baton.cluster.sections.base import Section


class ContextClass(Section):
    """Requests of at most ``max_tokens`` tokens (prompt), first class that fits; 0 takes the rest.

    SLOs in seconds for requests that name none themselves; 0: none. One that would miss it is refused early.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", description="of metrics and rules")
    max_tokens: int = Field(default=0, ge=0, description="of the prompt; 0: the rest")
    slo_ttft_s: float = Field(default=0.0, ge=0, description="wanted to the first token; 0: none")
    slo_tpot_s: float = Field(default=0.0, ge=0, description="wanted between tokens, in the mean; 0: none")


DEFAULT_CLASSES = (
    ContextClass(name="short", max_tokens=1024),
    ContextClass(name="medium", max_tokens=8192),
    ContextClass(name="long", max_tokens=0),
)


class RouterConfig(Section):
    """What clients meet. Times in seconds, sizes in bytes."""

    host: str = Field(
        default="127.0.0.1",
        description="address that both ports listen on; a routable one needs keys_file, a client CA or insecure",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="of REST; 0 takes a free one")
    grpc_port: int = Field(default=8001, ge=0, le=65535, description="of gRPC; 0 takes a free one")
    insecure: bool = Field(
        default=False, description="listen on a routable address without asking anybody for a key"
    )
    keys_file: str = Field(default="", description="API keys (`baton keys add`); empty asks nobody for a key")
    processes: int = Field(default=1, ge=1, le=64, description="router processes that share the ports")
    policy: str = Field(default="cost", description="how a way is chosen: round_robin, least_loaded or cost")
    hedge_prefill: float = Field(
        default=0.0, ge=0, description="a prefill this many times overdue goes to another worker; 0: never"
    )
    stall_s: float = Field(default=5.0, gt=0, description="a worker that makes no progress for so long is left")
    context_classes: tuple[ContextClass, ...] = Field(
        default=DEFAULT_CLASSES, description="requests by prompt length, each with a queue of its own"
    )
    max_queue: int = Field(default=1024, ge=1, description="requests that wait, per context class")
    max_inflight_bytes: int = Field(default=1 << 30, ge=1 << 20, description="prompts and answers held at once")
    request_timeout_s: float = Field(
        default=600.0, gt=0, description="a request that takes longer ends with an error"
    )
    shutdown_grace_s: float = Field(
        default=2.0, ge=0, description="what runs may finish in this time when the router is told to stop"
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="of one request")
    max_stored_bytes: int = Field(
        default=256 << 20, ge=1024, description="of one tenant's files, with which no new one is taken; in Redis"
    )
    max_n: int = Field(default=16, ge=1, description="choices in one request")
    max_stop: int = Field(default=16, ge=1, description="stop strings in one request")
    max_prompts: int = Field(default=64, ge=1, description="prompts in one completion request")
    local_prefill_max_tokens: int = Field(
        default=64, ge=0, description="uncached prompt tokens up to which the decode worker runs a prompt itself"
    )
    trace_file: str = Field(default="", description="redacted trace of what was served (.jsonl); empty: none")
    trace_file_bytes: int = Field(default=64 << 20, ge=1024, description="a trace file that long is rotated")
    tool_parser: str = Field(default="auto", description="format of tool calls: auto, hermes, llama3, mistral")
    reasoning_parser: str = Field(default="auto", description="format of the model's thinking: auto, none, think")

    @model_validator(mode="after")
    def _classes_in_order(self) -> RouterConfig:
        limits = [c.max_tokens or float("inf") for c in self.context_classes]
        names = [c.name for c in self.context_classes]
        if not limits or limits != sorted(limits) or len(set(names)) != len(names):
            raise ValueError(
                "context_classes: give distinct names in rising order of max_tokens (0, the rest, last)"
            )
        return self
