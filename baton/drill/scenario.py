"""Scenarios: the cluster, the requests and the faults of a simulated run. Knows nothing of how they are drawn.

A scenario is data. It can be printed, replayed, and made smaller by leaving parts out.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import msgspec

from baton.drill.language.oracle import Sight
from baton.drill.language.ranking import Ranking
from baton.drill.machines.network import KEEPALIVE_S
from baton.protos.nouns import BLOCK_TOKENS, Sampling
from baton.router.dispatch.runner import DispatchSettings

FaultKind = Literal[
    "kill", "engine_dies", "stuck", "slow", "cut", "cut_one_way", "break", "index_lies", "roster_silent",
    "router_dies", "redis_stalls", "redis_flushed", "redis_restarts", "redis_forgets", "clock_jumps",
    "tier_slow", "tier_fails", "role", "ratio", "hold", "leave", "weights", "cancel_again",
    "half_open", "no_descriptors", "roster_lies", "wall_jumps", "torn", "drift", "no_memory", "host_dies",
    "drain", "stands",
]  # fmt: skip
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
# Faults that delay the word that a client left.
HINDERING = ("cut", "cut_one_way", "half_open", "stuck", "slow", "tier_slow", "stands")
ENDING = ("kill", "engine_dies", "leave", "host_dies")  # faults that end a worker, and hinder nobody else
# Faults beside which a worker that is told to stop has left in time, because nothing keeps it from its peers.
LETS_LEAVE = (
    *ENDING,
    "stuck",
    "slow",
    "router_dies",
    "weights",
    "hold",
    "role",
    "ratio",
    "index_lies",
    "tier_fails",
    "drain",
)
# Faults beside which Redis keeps who has which lease, and each router hears of it, in time unless it stands still.
KEEPS_LEASES = (*LETS_LEAVE, "kill", "engine_dies", "tier_slow", "wall_jumps", "stands")
# Faults for which no router may take a worker for one that failed.
ORDERLY = ("drain", "leave", "hold", "role", "ratio", "router_dies", "index_lies", "tier_fails")
GONE_S = 3.0  # seconds that the word that a client left takes at most, without such a fault
# Of a request; ending: the last token is written. Of a worker: it begins to change its role. Of a router: it has
# its turn to change roles, or looks there who has which.
Phase = Literal["", "reading", "admitted", "receiving", "writing", "ending", "changing", "turning", "counting"]
OF_PROCESSES = ("changing", "turning", "counting")
PHASES: tuple[Phase, ...] = ("reading", "admitted", "receiving", "writing")
# Faults that may come while their target works on a certain request; those of the network towards its peer in that.
AIMED: frozenset[FaultKind] = frozenset(FAULTS) - {
    "index_lies", "router_dies", "redis_stalls", "redis_flushed", "redis_restarts", "redis_forgets", "clock_jumps",
    "roster_lies", "wall_jumps", "drift", "host_dies", "stands",
}  # fmt: skip
# Faults drawn by randomness of their own, so that the rest of a seed's scenario is as without them.
APART: tuple[FaultKind, ...] = (
    "half_open",
    "no_descriptors",
    "roster_lies",
    "wall_jumps",
    "torn",
    "drift",
    "no_memory",
)
HOSTED: tuple[FaultKind, ...] = ("host_dies",)  # drawn where workers' ranks are on several hosts
OPERATED: tuple[FaultKind, ...] = ("drain", "stands")  # drawn by randomness of their own as well
FAR = "/host"  # behind a worker's name: the process on the other host of its ranks
REDIS = "redis"  # the name of the Redis server's process
PEER = "peer"  # the other end of an aimed fault: who has the request's other half
AIM_S = 15.0  # seconds for which an aimed fault waits for its request's phase at most
SLOW_STEP_S = 0.1  # seconds of a step with which answers go on for so long that faults meet them
ABRUPT = 100.0  # the factor of a fault of weights whose worker ends without draining
# The factors of a drain that a second, impatient operator asks for as well, and of one whose operator hangs up.
TWICE, HANGS_UP = 2.0, 3.0
FLOODING = ("flood", "drop", "rare")  # tenants that are held against fair shares
Tools = Literal["", "auto", "named", "required"]
FORCED = ("named", "required")  # tools of which a call is demanded
POLICIES = ("cost", "round_robin", "least_loaded")


class Request(msgspec.Struct, frozen=True):
    """A client's request, and how the client behaves. Times are in seconds."""

    number: int
    at: float  # after the start of the run
    prompt: tuple[int, ...]
    sampling: Sampling  # parameters of the answer
    n: int = 1  # choices
    router: int = 0  # index of the router that is asked
    tenant: str = ""  # "" for none
    cancels: tuple[float, ...] = ()  # times after asking at which the client cancels
    read_pause: float = 0.0  # between two reads of the stream
    deadline_after: float | None = None  # seconds after asking; None for no deadline
    adapter: str = ""  # the name of a LoRA adapter, "" for none
    # "whole" or "stream": it is asked over HTTP, for text or an embedding; "": at the dispatcher
    over_http: str = ""
    stops: tuple[str, ...] = ()  # stop strings, over HTTP alone
    messages: tuple[str, ...] = ()  # of a chat over HTTP, whose prompt they are; the client's first
    tools: Tools = ""  # how the client of a chat offers tools
    thinks: bool = False  # whether the prompt of a chat ends within a thought
    anthropic: bool = False  # whether a chat is asked as Anthropic's clients ask
    responses: bool = False  # whether a chat is asked as clients of OpenAI's Responses API ask
    over_grpc: bool = False  # whether text is asked over gRPC instead of HTTP
    tensors: bool = False  # whether text is asked, over either, by the Open Inference Protocol
    ranking: Ranking | None = None  # documents that are to be ranked over HTTP; the prompt is the first one's
    key: int | None = None  # index of the client's API key in the scenario's; -1: one that nobody made; None: none
    model: int = 0  # index of the model that is asked
    priority: int = 0  # of the request; a lower one is more urgent
    slo_ttft_s: float = 0.0  # seconds in which the first token is to come, else the request may be refused; 0: none
    session: str = ""  # the conversation whose next turn it is, "" for none
    follows: int = -1  # number of the request after whose end it is asked at the earliest; -1: none


class Fault(msgspec.Struct, frozen=True):
    """Something that goes wrong at ``at`` seconds after the start of the run and lasts for ``seconds``.

    With an ``aim`` it waits until a worker begins that phase of request ``request``, for AIM_S at most, and
    ``after`` seconds more; that worker is the target then. With one of OF_PROCESSES it waits for its own target.
    """

    kind: FaultKind
    at: float
    target: str  # a worker or a router by name
    other: str = ""  # the other end of a network fault
    seconds: float = 0.0
    factor: float = 1.0  # how bad it is; its unit depends on ``kind``
    aim: Phase = ""
    request: int = -1
    after: float = 0.0
    asks: int = 0  # index of the router that an operator asks
    over_rest: bool = False  # whether the operator asks by the router's REST endpoints, which pin the ratio
    stays: float = 0.0  # seconds after a drain's answer for which the worker isn't told to stop

    @property
    def ends_at(self) -> float:
        """Returns the time, in seconds after the start of the run, at which the fault is over at the latest."""
        return self.at + self.seconds + self.stays + (AIM_S + self.after if self.aim else 0.0)


class Batch(msgspec.Struct, frozen=True):
    """A batch job that comes at ``at`` seconds: a greedy completion of ``max_tokens`` tokens for each prompt."""

    at: float
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    cancels: tuple[float, ...] = ()  # seconds after it came at which it is to be cancelled
    router: int = 0  # index of the router that is asked for that


class AdapterChange(msgspec.Struct, frozen=True):
    """An operator's change of adapter ``name`` at ``at`` seconds: it is loaded anew from ``path``, or unloaded."""

    at: float
    name: str
    content: int | None  # the number of the files' content; None: unload it
    path: str
    router: int = 0  # index of the router that the operator asks
    pinned: bool = False  # whether every worker is to hold it


class PrefixPin(msgspec.Struct, frozen=True):
    """A client's wish, ``at`` seconds after the start, that ``workers`` workers keep ``prompt`` for ``ttl_s``
    seconds.
    """

    at: float
    prompt: tuple[int, ...]
    ttl_s: float
    workers: int = 1
    tenant: str = ""
    router: int = 0  # index of the router that is asked
    leaves_after: float | None = None  # seconds after which the client hangs up; None: it waits
    leaves_as_pinned: bool = False  # whether they count from a worker's hearing of a pin, not from asking
    unpin_after: float | None = None  # seconds after the answer at which it is to be let go; None: at rest
    unpin_router: int = 0  # index of the router that is asked for that


class ScaleChange(msgspec.Struct, frozen=True):
    """An operator's wish, ``at`` seconds after the start, for other numbers of workers."""

    at: float
    prefill: int
    decode: int


class ClientKey(msgspec.Struct, frozen=True):
    """A tenant's API key. With ``bound_elsewhere`` it is for another model alone."""

    tenant: str
    revoked_at: float | None = None  # seconds after the start at which an operator revokes it; None: never
    bound_elsewhere: bool = False
    weight: float = 1.0  # of the tenant


class Tenant(msgspec.Struct, frozen=True):
    """A tenant that contends for full queues, and its share."""

    name: str
    weight: float = 1.0


class PageKind(NamedTuple):
    """Says how a worker keeps KV: whether layers with a window have ``own`` pages, and the tokens of a page.

    With a ``dtype`` KV is floats of that, which arrive coded by ``codec``.
    """

    own: bool = False
    block_tokens: int = BLOCK_TOKENS
    dtype: str = ""
    codec: str = "none"


class Scenario(msgspec.Struct, frozen=True):
    """Everything about a run; ``seed`` decides the rest, such as delays and the order of ready tasks."""

    seed: int
    prefill: int  # workers
    decode: int  # workers
    routers: int
    pages: int  # KV pages of each worker
    policy: str  # one of POLICIES, by which routers place requests
    local_max: int  # prompt tokens that a decode worker prefills itself, at most
    chunk_tokens: int  # prompt tokens of a prefill step, at most
    max_batch: int  # sequences of a step, at most
    step_s: float  # seconds that a step takes at least
    token_s: float  # seconds that each token adds to a step
    hedge: float  # times its predicted duration after which a prefill is tried elsewhere; 0: never
    swap: bool  # whether preempted sequences' pages are copied to host memory
    lease_ttl_s: float  # seconds that a lease lasts without progress
    tier_pages: int  # pages of the host tier of each worker
    delay_s: float  # least network delay in one direction
    requests_per_min: int  # rate limit of each tenant; 0 for none
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    batches: tuple[Batch, ...] = ()
    controller: bool = False  # whether a controller changes workers' roles
    adapters: tuple[AdapterChange, ...] = ()  # by time
    disk_pages: int = 0  # pages of the disk tier of each worker, which its lives pass on
    drafts_right: float = 0.0  # probability that a drafted token is the right one; 0: nothing is drafted
    steps_ahead: bool = False  # whether decode workers plan a step while the one before it runs, as on a GPU
    sight: Sight = Sight()  # what the model's layers see
    # of which workers of a role keep KV in turn; none: plain pages. Of floats the first is the prefill workers'.
    page_kinds: tuple[PageKind, ...] = ()
    # Machines on which workers lend one another cores, a prefill and a decode one on each or more; 0: none do.
    machines: int = 0
    pace_s: float = 0.0  # seconds between two steps of answers while prompts are read on the same cores
    host_counts: tuple[int, ...] = ()  # of which workers' ranks are on so many hosts in turn; none: on one
    pins: tuple[PrefixPin, ...] = ()  # by time
    placed: bool = False  # whether a placer runs the workers that are asked for
    scales: tuple[ScaleChange, ...] = ()  # by time
    placer_dies: tuple[float, ...] = ()  # seconds after the start
    room: int = 0  # workers that the placer has room for; 0: for all
    most_workers: int = 0  # up to which the controller adds some; 0: it adds and removes none
    keys: tuple[ClientKey, ...] = ()  # without which nobody is answered over HTTP and gRPC; none: no key is needed
    max_queue: int = 10_000  # requests of a model and a context class that wait at a router, at most
    max_inflight_bytes: int = 1 << 30  # estimated bytes that the requests of a router may hold
    short_tokens: int = 0  # prompt tokens of the first of two context classes, at most; 0: all prompts are of one
    models: int = 1  # of which a role's workers serve one each in turn
    paces: tuple[float, ...] = ()  # times that a step of each model takes; none: once
    keep_roles: tuple[str, ...] = ()  # slots of which no engine can begin another role
    tenants: tuple[
        Tenant, ...
    ] = ()  # whose requests are more than fit in the queues; none: nothing is held strictly

    @property
    def slots(self) -> tuple[int, int]:
        """Returns how many (prefill, decode) workers there are at most."""
        prefill = max([self.prefill] + [change.prefill for change in self.scales])
        decode = max([self.decode] + [change.decode for change in self.scales])
        return max(prefill, self.most_workers), max(decode, self.most_workers)

    @property
    def ends_at(self) -> float:
        """Returns the time, in seconds, at which the last request has come and the last fault is over."""
        times = [r.at for r in self.requests] + [f.ends_at for f in self.faults]
        times += [change.at for change in self.adapters] + [key.revoked_at or 0.0 for key in self.keys]
        times += [pin.at for pin in self.pins] + [change.at for change in self.scales] + list(self.placer_dies)
        return max(times, default=0.0)

    @property
    def spares_requests(self) -> bool:
        """Returns whether all faults end workers, and are fewer than a request's attempts or orderly, so that no
        request need fail.
        """
        kinds = [fault.kind for fault in self.faults if fault.kind not in ORDERLY]  # which cost no attempt
        ending = [kind in ENDING for kind in kinds]
        return not self.placed and all(ending) and len(ending) < DispatchSettings().max_attempts

    @property
    def tells_roles(self) -> bool:
        """Returns whether workers keep their roles for reasons of their own alone, which they can tell."""
        told = ("role", "ratio", "hold", "drain", "router_dies")
        return all(fault.kind in told for fault in self.faults) and not self.controller

    @property
    def loses_nobody(self) -> bool:
        """Returns whether workers leave, drain and change their roles in order alone, so that none fails."""
        return all(fault.kind in ORDERLY for fault in self.faults)

    @property
    def keeps_leases(self) -> bool:
        """Returns whether nothing takes a lease from a router that lives."""
        return all(fault.kind in KEEPS_LEASES for fault in self.faults)

    @property
    def settles_ratio(self) -> bool:
        """Returns whether nobody but operators changes workers' roles, and no worker goes. A controller may have
        changed them before, as long as operators pin what they ask for.
        """
        asked = all(fault.kind in ("role", "ratio", "hold", "stands") for fault in self.faults)
        alone = not self.controller or self.pins_ratio
        return asked and alone and not self.placed and self.models == 1

    @property
    def pins_ratio(self) -> bool:
        """Returns whether operators ask for roles by REST alone, so that the last ratio is pinned."""
        return all(fault.over_rest for fault in self.faults if fault.kind in ("role", "ratio"))

    @property
    def may_change_roles(self) -> bool:
        """Returns whether operators may change workers' roles: nobody places workers, and no KV is floats."""
        return not self.placed and not any(kind.dtype for kind in self.page_kinds)

    @property
    def stands_s(self) -> float:
        """Returns the seconds for which routers stand still, together."""
        return sum(fault.seconds for fault in self.faults if fault.kind == "stands")

    @property
    def lets_leave(self) -> bool:
        """Returns whether nothing may keep a worker that is told to stop from leaving in time."""
        return all(fault.kind in LETS_LEAVE for fault in self.faults)

    @property
    def heard_s(self) -> float:
        """Returns the seconds within which every engine must have heard that a client has left."""
        hindering = [fault.seconds for fault in self.faults if fault.kind in HINDERING]
        return GONE_S + 4 * self.delay_s + (KEEPALIVE_S + max(hindering) if hindering else 0.0)


class Size(msgspec.Struct, frozen=True):
    """Upper bounds for a drawn scenario."""

    workers: int = 4  # of each role
    requests: int = 40
    faults: int = 6
    seconds: float = 20.0  # in which requests and faults come
    kinds: tuple[FaultKind, ...] = FAULTS  # faults to draw from
    adapted: float = 0.15  # share of scenarios with adapters
    scaled: float = 0.15  # share of scenarios in which operators, or the controller, add and remove workers
    cancelled_jobs: float = 0.25  # share of batch jobs that are cancelled
    pinned: float = 0.15  # share of scenarios in which clients pin prefixes
    http: float = 0.2  # share of scenarios with requests over HTTP
    keyed: float = 0.3  # share of them in which clients need API keys
    surfaces: float = 0.4  # share of them, where others can ask so, that go over gRPC or the Responses API
    tensors: float = 0.15  # share of them, where it can ask so, that go by the Open Inference Protocol
    ranked: float = 0.1  # share of the requests over HTTP that ask for documents in order
    chats: float = 0.4  # share of the requests for text over HTTP that are chats
    ending: float = 0.15  # share of the aimed faults that come as the last token of an answer is written
    aimed: float = 0.6  # share of faults that come soon after a request or while a worker is at it
    pressed: float = 0.15  # share of scenarios with so many requests on so few pages that sequences are preempted
    flooded: float = 0.1  # share of scenarios in which one tenant floods a router, without faults
    crowded: float = 0.05  # share of scenarios in which short sequences are preempted, and set aside in host memory
    tiered: float = 0.05  # share of scenarios whose few prompts are kept in tiers, as the pages don't hold them
    hasty: float = 0.05  # share of scenarios whose prompts take longer than a lease lasts without progress
    apart: float = 0.3  # share of scenarios with faults that also have some of APART
    disked: float = 0.15  # share of scenarios whose workers have a disk tier
    paged: float = 0.25  # share of scenarios whose layers see windows, or whose pages are of several kinds
    floats: float = 0.1  # share of scenarios whose KV is floats, of which workers keep and take in several kinds
    hosted: float = 0.1  # share of scenarios in which workers' ranks are on one host or on two
    selected: float = 0.08  # share of scenarios whose model sees a part of a long context
    ahead: float = 0.25  # share of scenarios without them in which decode workers plan steps ahead
    drafted: float = 0.25  # share of scenarios whose decode workers speculate
    split: float = 0.05  # share of scenarios in which routers lose a batch job to one another
    overloaded: float = 0.1  # share of scenarios in which tenants contend for full queues, without faults
    narrow: float = 0.15  # share of the others with faults in which queues have few places
    tight: float = 0.1  # share of the others with faults in which requests may hold few bytes
    lent: float = 0.1  # share of scenarios in which engines of one machine lend one another cores
    conversing: float = 0.12  # share of scenarios with conversations, whose turns are asked one after another
    drained: float = 0.12  # share of scenarios with faults in which operators drain workers
    turned: float = 0.1  # share of the others with faults in which operators change roles at several routers
    held: float = 0.05  # share of the others with faults in which operators ask for roles of workers that are held
    kept_roles: float = 0.3  # share of the others whose roles change in which some workers can't begin another
    ordered: float = 0.2  # share of the others in which requests have priorities
