"""Bugs to plant in the product's own source: what `baton drill` has to find.

Each is one replacement or a few, of a class that serving systems have had: a late frame accepted, a page reused
early, an index emitted twice, a migration that forgets.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from baton.drill.scenario import FAULTS, FaultKind, Size

USUAL = Size(
    crowded=0.0,
    tiered=0.0,
    hasty=0.0,
    split=0.0,
    apart=0.0,
    disked=0.0,
    drafted=0.0,
    ahead=0.0,
    chats=0.0,
    paged=0.0,
    pinned=0.0,
    scaled=0.0,
    surfaces=0.0,
    tensors=0.0,
    ranked=0.0,
    floats=0.0,
    selected=0.0,
    hosted=0.0,
    keyed=0.0,
    cancelled_jobs=0.0,
    overloaded=0.0,
    narrow=0.0,
    tight=0.0,
    ordered=0.0,
    kept_roles=0.0,
    drained=0.0,
    turned=0.0,
    held=0.0,
    conversing=0.0,
    lent=0.0,
)
PRESSED, ADAPTED = (msgspec.structs.replace(USUAL, **{share: 1.0}) for share in ("pressed", "adapted"))
OVER_HTTP, FLOODED = (msgspec.structs.replace(USUAL, **{share: 1.0}) for share in ("http", "flooded"))
CHATTING = msgspec.structs.replace(USUAL, http=1.0, chats=0.9)
AHEAD = msgspec.structs.replace(USUAL, ahead=1.0)
DRAFTED = msgspec.structs.replace(USUAL, drafted=1.0)
PINNED = msgspec.structs.replace(USUAL, pinned=1.0, flooded=0.0)
KEYED = msgspec.structs.replace(USUAL, http=1.0, keyed=1.0, flooded=0.0)
ENDING = msgspec.structs.replace(USUAL, aimed=1.0, ending=1.0, flooded=0.0)
SURFACES = msgspec.structs.replace(USUAL, http=1.0, chats=0.5, surfaces=1.0)
TENSORS = msgspec.structs.replace(USUAL, http=1.0, tensors=1.0)
RANKED = msgspec.structs.replace(USUAL, http=1.0, ranked=0.5, flooded=0.0)
FLOATS = msgspec.structs.replace(USUAL, floats=1.0, flooded=0.0)
SELECTED = msgspec.structs.replace(USUAL, selected=1.0, flooded=0.0)
ON_HOSTS = msgspec.structs.replace(USUAL, hosted=1.0, flooded=0.0)
SCALED = msgspec.structs.replace(USUAL, scaled=1.0, flooded=0.0)
PAGED = msgspec.structs.replace(USUAL, paged=1.0)
FEW_BYTES = msgspec.structs.replace(USUAL, overloaded=0.0, flooded=0.0, http=0.0, tight=1.0)
ORDERED = msgspec.structs.replace(USUAL, overloaded=0.0, flooded=0.0, ordered=1.0)
KEPT_ROLES = msgspec.structs.replace(USUAL, flooded=0.0, kept_roles=1.0)
DRAINED, TURNED, HELD, LENT = (
    msgspec.structs.replace(USUAL, flooded=0.0, **{share: 1.0}) for share in ("drained", "turned", "held", "lent")
)
TALKING = msgspec.structs.replace(USUAL, flooded=0.0, conversing=1.0, requests=8)
OVERLOADED = msgspec.structs.replace(USUAL, overloaded=1.0, flooded=0.0)
SMALL = msgspec.structs.replace(USUAL, flooded=0.0, pressed=0.0, workers=2)
CROWDED = msgspec.structs.replace(SMALL, crowded=1.0, requests=24)
TIERED = msgspec.structs.replace(SMALL, tiered=1.0, requests=30, seconds=8.0)
HASTY = msgspec.structs.replace(SMALL, hasty=1.0, requests=16, seconds=5.0)
SPLIT = msgspec.structs.replace(SMALL, split=1.0, requests=6, seconds=8.0)

BETWEEN_STEPS = "a prompt would have to be preempted between two of its steps, and find its own blocks again"


class Bug(NamedTuple):
    """A replacement in a file of the package; ``also`` names others (file, old, new) that the bug takes.

    ``faults`` are the kinds that it is hunted with, because it shows under those alone; all kinds by default.
    ``size`` says what its scenarios are like, such as one of those above.
    ``missed`` says why it can't be found yet.
    """

    name: str
    file: str
    old: str
    new: str
    also: tuple[tuple[str, str, str], ...] = ()
    faults: tuple[FaultKind, ...] = ()
    size: Size = USUAL
    missed: str = ""

    @property
    def edits(self) -> tuple[tuple[str, str, str], ...]:
        """Returns every replacement as (file, old text, new text)."""
        return ((self.file, self.old, self.new), *self.also)

    @property
    def hunted(self) -> Size:
        """Returns what the scenarios are like in which it is hunted."""
        return msgspec.structs.replace(self.size, kinds=self.faults or FAULTS)


BUGS = (
    Bug(
        "a page is reused before its stream has closed",
        "decode_worker/engine/leases.py",
        "return not self._gate and not self._writers",
        "return not self._gate",
    ),
    Bug(
        "a page is reused although frames may still be accepted for it",
        "decode_worker/engine/leases.py",
        "return not self._gate and not self._writers",
        "return not self._writers",
    ),
    Bug(
        "a stream of an old epoch goes on, and its frames are taken",
        "decode_worker/io/handoff_leases.py",
        "        for stream in lease.open_streams:\n            stream.stop(StaleEpoch",
        "        for stream in ():\n            stream.stop(StaleEpoch",
        (("decode_worker/io/handoff_sink.py", "        if frame.epoch != lease.epoch:", "        if False:"),),
        faults=("slow", "cut_one_way", "stuck"),
    ),
    Bug(
        "an index is emitted twice at the seam of a migration",
        "router/request/request.py",
        "fresh = unseen(run, len(self.emitted))",
        "fresh = run",
        faults=("kill", "leave"),
    ),
    Bug(
        "a reservation is not given back when a worker refuses or is lost",
        "router/dispatch/runner.py",
        "                    if not run.progress.end_where_full():\n                        placed.close()",
        "                    if not run.progress.end_where_full():\n"
        "                        placed.close = lambda: None",
    ),
    Bug(
        "a retry starts before Rearm is answered",
        "router/workers/decode_session.py",
        "        rearmed = await self._answer\n        self.epoch = rearmed.epoch\n"
        "        return tuple(rearmed.received_blocks)",
        "        self.epoch += 1\n        return ()",
    ),
    Bug(
        "a cancelled lease is never told to the worker",
        "router/workers/decode_session.py",
        "            self._session.send(w.SessionUp(cancel=cancel))",
        "            pass",
    ),
    Bug(
        "a lost session leaves its requests running",
        "decode_worker/io/service.py",
        "        for request in tuple(session.requests.values()):\n            self._cancel(request, reason)\n"
        "            self._drop(request)",
        "        pass",
        faults=("break", "cut", "router_dies"),
    ),
    Bug(
        "the hash root has no tenant in it",
        "kv/layout/prefix.py",
        "adapter.encode(), salt)",
        "adapter.encode(), b'')",
    ),
    Bug(
        "pages that were read for others stay pinned",
        "engine/steps/sharing.py",
        "                self._mirror.let_go(lease.pages)\n            lease.close()",
        "                self._mirror.let_go(lease.pages)",
    ),
    Bug(
        "a removed sequence keeps its pages",
        "decode_worker/engine/scheduler.py",
        "        self.drop(job)\n        job.close()",
        "        self.drop(job)",
    ),
    Bug(
        "a step planned ahead begins at the token that the step before it wrote",
        "decode_worker/engine/following.py",
        "    computed = item.start + len(item.tokens)\n",
        "    computed = item.start + len(item.tokens) - 1\n",
        size=AHEAD,
    ),
    Bug(
        "what an answer held that ended in flight is never given back",
        "decode_worker/engine/async_loop.py",
        "        for key, job in held:\n            super()._let_go(key, job)\n",
        "",
        size=AHEAD,
    ),
    Bug(
        "a prompt's pages are never given back after a failed handoff",
        "prefill_worker/engine/loop.py",
        "            shipment.close()\n            shipment.release()",
        "            shipment.close()",
    ),
    Bug(
        "a block is sealed under its neighbour's hash",
        "prefill_worker/engine/scheduler.py",
        "self.held_lease.seal(index, self.hashes[index])",
        "self.held_lease.seal(index, self.hashes[max(0, index - 1)])",
    ),
    Bug(
        "a block that is half computed is shipped",
        "prefill_worker/engine/loop.py",
        "blocks = computed // self.job.block_tokens if",
        "blocks = -(-computed // self.job.block_tokens) if",
    ),
    Bug(
        "a request that was cancelled while it queued keeps its place",
        "router/dispatch/choice_run.py",
        "        self.ticket.leave()",
        "        pass",
    ),
    Bug(
        "a lost link doesn't end its leases",
        "router/workers/decode_session.py",
        "lease.over(error), leases.values())",
        "lease.over(error), ())",
        faults=("break", "cut", "kill"),
    ),
    Bug(
        "the second choice is drawn with the first one's key",
        "engine/backends/paced/runner.py",
        'spec.choice.to_bytes(8, "little"))\n    number',
        '(0).to_bytes(8, "little"))\n    number',
    ),
    Bug(
        "a lease's time is not extended by progress",
        "decode_worker/engine/leases.py",
        "    def _progress(self, now: float) -> None:\n        self._deadline = now + self._ttl_s",
        "    def _progress(self, now: float) -> None:\n        pass",
        faults=("kill", "break", "engine_dies"),
        size=HASTY,
    ),
    Bug(
        "a preempted sequence goes on after blocks that it no longer has",
        "decode_worker/engine/job.py",
        "        self.sequence.computed = pages.held * pages.block_tokens\n",
        "        self.sequence.computed = max(self.sequence.computed, pages.held * pages.block_tokens)\n",
        (("decode_worker/engine/scheduler.py", "        job.sequence.computed = 0\n", ""),),
        size=PRESSED,
    ),
    Bug(
        "pages are given back while a tier's thread still writes them",
        "kv/tiers/stack.py",
        "            await access.revoke()\n            raise",
        "            raise",
        faults=("tier_slow",),
        size=TIERED,
    ),
    Bug(
        "a preempted embedding goes on in the middle of its sum",
        "decode_worker/engine/scheduler.py",
        "limit, aside = job.holdable, job.swap_entry",
        "limit, aside = (tokens - 1) // size, job.swap_entry",
        (("engine/sequence.py", "            assert start == 0 or before,", "            assert True,"),),
        size=PRESSED,
        missed=BETWEEN_STEPS,
    ),
    Bug(
        "a half-written answer goes on on other weights",
        "router/dispatch/placing.py",
        "        if all(pin.allows(d.info) for d in snapshot.decode):\n            return snapshot",
        "        if True:\n            return snapshot",
        (
            ("router/dispatch/runner.py", "        if not run.request.pin.allows(link.info):", "        if False:"),
            ("router/request/weights.py", "        assert self.weights in (None, weights)\n", ""),
        ),
        faults=("weights", "kill"),
    ),
    Bug(
        "an admission that fails between its pages and its registration keeps them",
        "decode_worker/engine/loop.py",
        "            found.close()\n            raise",
        "            raise",
        (
            (
                "decode_worker/engine/loop.py",
                "        self._ages += 1\n",
                "        self._ages += 1\n"
                "        if self._ages % 5 == 0:\n            raise Overloaded('planted')\n",
            ),
        ),
    ),
    Bug(
        "an answer that its client left is written on",
        "decode_worker/engine/loop.py",
        "        if message.key in self.requests:\n"
        "            self._end(message.key)\n            self.channel.send(ch.Ended",
        "        if message.key in self.requests and self.requests[message.key].awaited:\n"
        "            self._end(message.key)\n            self.channel.send(ch.Ended",
    ),
    Bug(
        "a migration forgets the grammar",
        "router/dispatch/messages.py",
        "    if attempt.choice:\n        out.Clear",
        "    if len(attempt.tokens) > len(attempt.request.token_ids):\n        out.ClearField('grammar')\n"
        "    if attempt.choice:\n        out.Clear",
        faults=("kill", "leave"),
    ),
    Bug(
        "a migration forgets the seed",
        "router/dispatch/messages.py",
        "    if attempt.choice:\n        out.Clear",
        "    if len(attempt.tokens) > len(attempt.request.token_ids):\n        out.seed = 0\n"
        "    if attempt.choice:\n        out.Clear",
        faults=("kill", "leave"),
    ),
    Bug(
        "a role changes with requests and streams open",
        "decode_worker/engine/loop.py",
        "        return not self.requests and not self.receives",
        "        return True",
        (
            (
                "worker/control.py",
                '            self._service.cancel_all("it changes its role")\n        await',
                "            pass\n        await",
            ),
            (
                "worker/control.py",
                '        if self._service.cancel_all("it changes its role"):',
                "        if False:",
            ),
        ),
        faults=("role", "ratio"),
        missed="routers cancel their streams within milliseconds of a change unless they are cut off just then",
    ),
    Bug(
        "a fill counts a block that has not come",
        "kv/exchange/filling.py",
        "self._send(ch.Filled(key, done))",
        "self._send(ch.Filled(key, min(done + 1, len(hashes)) if done else 0))",
        faults=("tier_slow", "tier_fails", "cut"),
        size=TIERED,
    ),
    Bug(
        "a sequence that was set aside comes back with its pages in another order",
        "decode_worker/engine/swap.py",
        "[*entry.pages[held:], *entry.state]",
        "[*entry.pages[held:][::-1], *entry.state]",
        size=CROWDED,
    ),
    Bug(
        "what was set aside of a sequence that ended is kept",
        "decode_worker/engine/scheduler.py",
        "            self.swap.drop(job.swap_entry)\n            job.swap_entry = None",
        "            job.swap_entry = None",
        size=CROWDED,
    ),
    Bug(
        "the engine never hears that an ended lease takes no more streams",
        "decode_worker/io/service.py",
        "                self._send(ch.IntakeClosed(message.key))",
        "                pass",
        faults=("cut", "cut_one_way"),
        size=HASTY,
    ),
    Bug(
        "the engine never hears that a cancelled handoff reads no more",
        "prefill_worker/io/service.py",
        "        self._send(ch.SendClosed(key))",
        "        if job.done is not None:\n            self._send(ch.SendClosed(key))",
        size=HASTY,
    ),
    Bug(
        "frames that share a write lose the first one's log-probabilities",
        "decode_worker/io/router_session.py",
        "logprobs=first.run.logprobs + then.run.logprobs",
        "logprobs=then.run.logprobs",
    ),
    Bug(
        "a prompt is scored twice after a preemption",
        "engine/sequence.py",
        "            self.scores += found[len(self.scores) - start :]",
        "            self.scores += found",
        size=PRESSED,
        missed=BETWEEN_STEPS,
    ),
    Bug(
        "a router that lost its claim on a batch job writes on",
        "cluster/batch_scripts.py",
        "FENCE = \"if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end\\n\"",
        'FENCE = ""',
        (
            (
                "cluster/batch_scripts.py",
                "if KEYS[6] and redis.call('GET', KEYS[6]) ~= ARGV[8] then return -2 end\n",
                "",
            ),
        ),
        faults=("cut", "router_dies"),
        size=SPLIT,
    ),
    Bug(
        "a batch job that another router began is not gone on with",
        "router/api/batch/lane.py",
        "            found |= answers.keys()",
        "            found |= {number + 1 for number in answers}",
        faults=("cut", "router_dies"),
        size=SPLIT,
    ),
    Bug(
        "a rate takes nothing from its bucket",
        "cluster/store/buckets.py",
        "levels[i] - tonumber(ARGV[i*3])",
        "levels[i]",
    ),
    Bug(
        "one tenant's requests count as everybody's, so that a flood goes first",
        "router/dispatch/fair_queue.py",
        "self._last[pool].get(load.tenant, 0.0)",
        "max(self._last[pool].values(), default=0.0)",
        size=FLOODED,
    ),
    Bug(
        "a request that passes others moves newcomers behind all of them",
        "router/dispatch/fair_queue.py",
        "min([placed.begin, *passed])",
        "placed.begin",
        size=FLOODED,
    ),
    Bug(
        "an answer whose grammar was complete as its worker was lost writes on at another one",
        "prefill_worker/engine/loop.py",
        "first = job.sequence.late_end() or job.sequence.append(",
        "first = job.sequence.append(",
        faults=("kill", "engine_dies", "leave"),
        size=ENDING,
    ),
    Bug(
        "a revoked key is taken for as long as its router runs",
        "router/access/keys.py",
        "if self._clock() - self._looked < LOOK_EVERY_S:",
        "if True:",
        size=KEYED,
    ),
    Bug(
        "a key of no known secret is taken for the one whose id it has",
        "router/access/keys.py",
        "if entry is None or not matches or entry.revoked:",
        "if entry is None or entry.revoked:",
        size=KEYED,
    ),
    Bug(
        "a call over gRPC needs no key",
        "router/api/access.py",
        'caller = self._access.gate.identify(metadata.get("authorization"))',
        "caller = NOBODY",
        size=msgspec.structs.replace(KEYED, surfaces=1.0),
    ),
    Bug(
        "tenants' keys don't keep their cached blocks apart",
        "router/access/caller.py",
        "return self.key.salt + cache_salt if self.key else cache_salt",
        "return cache_salt",
        size=KEYED,
    ),
    Bug(
        "a key may use every model",
        "router/access/keys.py",
        "return not (adapter and self.adapters) or adapter in self.adapters or adapter == self.adapter",
        "return True",
        also=(
            (
                "router/access/keys.py",
                "if self.models and model_id not in self.models and adapter not in self.models:",
                "if False:",
            ),
        ),
        size=KEYED,
    ),
    Bug(
        "a batch job is completed although Redis lost answers",
        "router/api/batch/lane.py",
        "len(good.keys() | bad.keys()) < job.total",
        "len(good.keys() | bad.keys()) < 0",
        faults=("redis_forgets",),
        size=SPLIT,
    ),
    Bug(
        "a deadline is not kept",
        "router/dispatch/runner.py",
        "        run.timer.reschedule(asyncio.get_running_loop().time() + run.limit_s)\n",
        "",
    ),
    Bug(
        "the hash root has no adapter in it",
        "kv/layout/prefix.py",
        "adapter.encode(), salt)",
        "b'', salt)",
        size=ADAPTED,
    ),
    Bug(
        "an adapter is evicted while a sequence uses it",
        "engine/adapters/table.py",
        "return not (self.pinned or self.users)",
        "return not self.pinned",
        size=ADAPTED,
    ),
    Bug(
        "an adapter that was replaced in place is taken for the one that it was",
        "router/adapters/registry.py",
        "        before, self._kept = self._served, dict(kept)\n",
        "        before, self._kept = self._served, dict(kept) | self._kept\n",
        size=ADAPTED,
    ),
    Bug(
        "a sequence that ended goes on using its adapter",
        "decode_worker/engine/loop.py",
        "        self.scheduler.remove(job)\n        self.parts.adapters.release(key)\n",
        "        self.scheduler.remove(job)\n",
        size=ADAPTED,
    ),
    Bug(
        "a migration forgets the adapter",
        "router/dispatch/messages.py",
        "        adapter_id=context.adapter_id,\n        token_ids=attempt.tokens,",
        "        adapter_id='' if len(attempt.tokens) > len(request.token_ids) else context.adapter_id,\n"
        "        token_ids=attempt.tokens,",
        faults=("kill", "leave"),
        size=ADAPTED,
    ),
    Bug(
        "a stop string that two tokens make is passed over",
        "router/text/detokenize.py",
        "        keep = max((m.matched for m in self._matchers), default=0)\n",
        "        keep = 0\n        self._matchers = tuple(_Matcher(m.stop) for m in self._matchers)\n",
        size=OVER_HTTP,
    ),
    Bug(
        "the router writes on for a client that hung up in the middle of a stream",
        "router/api/sse.py",
        "            await until_disconnect(receive, self._send_all(send))\n",
        "            await self._send_all(send)\n",
        size=OVER_HTTP,
    ),
    Bug(
        "usage counts tokens after a stop string",
        "router/answer/stream.py",
        '            if stopped:\n                return self._piece(run, taken, text, "stop")\n',
        "            if stopped:\n                self.tokens += len(run.token_ids) - taken + 1\n"
        '                return self._piece(run, taken, text, "stop")\n',
        size=OVER_HTTP,
    ),
    Bug(
        "a prompt that waits as the role ends reaches the next role's engine",
        "prefill_worker/io/service.py",
        '        self._lost = Draining("the prefill worker leaves its role; ask another")',
        "        pass",
        faults=("role", "ratio", "tier_slow"),
        size=TIERED,
    ),
    Bug(
        "a message without content on a router's session is passed over",
        "decode_worker/io/shell.py",
        "                if not message.ByteSize():",
        "                if False:",
        faults=("no_memory",),
        size=SMALL,
    ),
    Bug(
        "the token behind a rejected draft is taken as well",
        "engine/speculate/draft.py",
        "        return range(accepted(self.tokens, chosen[:-1]) + 1)",
        "        return range(min(accepted(self.tokens, chosen[:-1]) + 2, len(chosen)))",
        size=DRAFTED,
    ),
    Bug(
        "drafts are chosen as if an answer were no longer than without them, so that it may end early",
        "engine/sequence.py",
        "        banned = tuple(self._stops) if self.outputs + len(drafts) < sampling.min_tokens else ()",
        "        banned = tuple(self._stops) if self.outputs < sampling.min_tokens else ()",
        size=DRAFTED,
    ),
    Bug(
        "drafts stand that a grammar's state wasn't followed along",
        "engine/sequence.py",
        "        return rows if self._grammar is None else rows[: 1 + self._grammar.followed]",
        "        return rows",
        size=DRAFTED,
    ),
    Bug(
        "accepted drafts behind an answer's end are told",
        "decode_worker/engine/job.py",
        "                chosen, accepted = chosen[:count], min(count, accepted)\n",
        "                accepted = min(count, accepted)\n",
        size=DRAFTED,
    ),
    Bug(
        "choices of a streamed chat share the reader of thoughts and calls",
        "router/api/openai/shapes.py",
        "reader = self._readers.setdefault(piece.index, self._form.reader())",
        "reader = self._readers.setdefault(0, self._form.reader())",
        size=CHATTING,
    ),
    Bug(
        "what may be the beginning of a mark is lost at a stream's end",
        "router/api/openai/shapes.py",
        "(reader.flush() if piece.finish_reason else [])",
        "[]",
        size=CHATTING,
    ),
    Bug(
        "a thought that the prompt opened is taken for content",
        "router/api/openai/answer_format.py",
        "        return rendered.rstrip().endswith(reasoning.BEGIN)",
        "        return False",
        size=CHATTING,
    ),
    Bug(
        "white space that comes alone behind a call is lost",
        "router/text/marks.py",
        '            self._held += text\n            return ""\n        found',
        '            return ""\n        found',
        size=CHATTING,
    ),
    Bug(
        "a page that a window still shows a token of is given back",
        "kv/pages/window.py",
        "return max(0, tokens - window + 1) // block_tokens",
        "return max(0, tokens - window + 16) // block_tokens",
        size=PAGED,
    ),
    Bug(
        "layers of the second table get the first one's rows when pages are converted",
        "kv/layout/table_bridge.py",
        "        before = max(0, table - 1) * most",
        "        before = 0",
        size=PAGED,
    ),
    Bug(
        "a message's block isn't ended before the next one begins",
        "router/api/anthropic/shape.py",
        "        yield from self._close()\n        self._blocks.append(block)",
        "        self._blocks.append(block)",
        size=CHATTING,
    ),
    Bug(
        "the recurrent state after a block is found under the hash of the block before",
        "engine/states.py",
        "            self._mark(tokens, prompt, size, hash_of(tokens // size - 1), rolling)",
        "            self._mark(tokens, prompt, size, hash_of(max(0, tokens // size - 2)), rolling)",
        size=PAGED,
    ),
    Bug(
        "a prefix that is let go stays in its pages",
        "worker/cache/pins.py",
        "        found.timer.cancel()\n        self._source.let_go(found.key)",
        "        found.timer.cancel()",
        size=PINNED,
    ),
    Bug(
        "a prefix is said to be pinned, and isn't",
        "worker/cache/pins.py",
        "            return key, pages - len(seen)\n        self._source",
        "            self._source.let_go(key)\n            return key, pages - len(seen)\n        self._source",
        size=PINNED,
    ),
    Bug(
        "what a client that leaves wanted to pin stays pinned",
        "router/dispatch/prefix_control.py",
        "            await self._undo(pin, targets)\n            raise",
        "            raise",
        size=PINNED,
        faults=("kill", "weights", "cancel_again"),
    ),
    Bug(
        "a worker that changes its role is taken for a new one, so that its pins are forgotten",
        "worker/control.py",
        'f"{process_of(self.info.incarnation)}.{self._new_id()}"',
        "self._new_id().replace('.', '-')",
        size=PINNED,
        faults=("role", "ratio"),
    ),
    Bug(
        "a Redis that lost the numbers of workers is told the configuration's",
        "cluster/scale.py",
        "            now = self._asked if same else None",
        "            now = None",
        size=SCALED,
        faults=("redis_flushed", "redis_restarts"),
    ),
    Bug(
        "a drain waits for ever",
        "worker/control.py",
        "while self._service.active and asyncio.get_running_loop().time() < deadline:  # noqa",
        "while self._service.active and deadline:  # noqa",
        size=msgspec.structs.replace(SMALL, aimed=1.0),
        faults=("leave",),
    ),
    Bug(
        "an engine that dies while its worker drains goes unnoticed",
        "worker/server.py",
        "asyncio.wait((leaving, lost), return_when",
        "asyncio.wait((leaving,), return_when",
        size=msgspec.structs.replace(SMALL, aimed=1.0),
        faults=("leave", "engine_dies"),
    ),
    Bug(
        "every chunk of a stream over gRPC has the usage",
        "router/api/grpc/service.py",
        "usage=None if left else _usage(answer)",
        "usage=_usage(answer)",
        size=SURFACES,
    ),
    Bug(
        "the adapter that a call over gRPC names is forgotten",
        "router/api/grpc/service.py",
        "self._service.catalog.resolve(request.model, request.adapter)",
        "self._service.catalog.resolve(request.model)",
        size=msgspec.structs.replace(SURFACES, adapted=1.0, faults=0),
    ),
    Bug(
        "an item of a response isn't done before the next one begins",
        "router/api/responses/shape.py",
        "        yield from self._close()\n        self._open =",
        "        self._open =",
        size=SURFACES,
    ),
    Bug(
        "what may be the beginning of a mark is lost at a response's end",
        "router/api/responses/shape.py",
        "            for delta in self._reader.flush():",
        "            for delta in ():",
        size=msgspec.structs.replace(CHATTING, surfaces=1.0),
    ),
    Bug(
        "a batch job that is cancelled is answered to its end",
        "router/api/batch/lane.py",
        "                if held.refused or cancelled:",
        "                if held.refused:",
        size=msgspec.structs.replace(SMALL, cancelled_jobs=1.0, requests=6, seconds=5.0),
    ),
    Bug(
        "a client's bound on drafts is forgotten",
        "engine/sequence.py",
        "return max(0, room if asked.max_drafts is None else min(room, asked.max_drafts))",
        "return max(0, room)",
        size=DRAFTED,
    ),
    Bug(
        "every part of a stream of tensors is said to be the last",
        "router/api/open_inference/grpc.py",
        "response.parameters[FINAL].bool_param = not left",
        "response.parameters[FINAL].bool_param = True",
        size=TENSORS,
    ),
    Bug(
        "a prompt in binary begins where the JSON before it began",
        "router/api/open_inference/rest.py",
        "await parsed(InferBody, raw[:length]), length, []",
        "await parsed(InferBody, raw[:length]), 0, []",
        size=TENSORS,
    ),
    Bug(
        "parameters of a text that is asked as a tensor are forgotten",
        "router/api/open_inference/rest.py",
        "return oip.completion_fields(beside | self.parameters)",
        "return oip.completion_fields(beside)",
        size=TENSORS,
    ),
    Bug(
        "scores are told in the order in which they come",
        "router/api/rerank.py",
        "return [found[at] for at in range(len(generation.prompts))]",
        "return list(found.values())",
        size=RANKED,
    ),
    Bug(
        "documents of all tenants share cached blocks",
        "router/api/rerank.py",
        'tenant_salt=(self._body.cache_salt or "").encode(),',
        'tenant_salt=b"",',
        size=RANKED,
    ),
    Bug(
        "of the tokens that a client names the first alone is told",
        "protos/convert.py",
        'fields["logprob_token_ids"] = tuple(pb.logprob_token_ids)',
        'fields["logprob_token_ids"] = tuple(pb.logprob_token_ids)[:1]',
        size=RANKED,
    ),
    Bug(
        "an answer goes on where KV is of another fidelity",
        "router/request/weights.py",
        "return WeightsId(info.fingerprint, info.layout.fidelity.removesuffix(MARK))",
        'return WeightsId(info.fingerprint, "")',
        size=msgspec.structs.replace(FLOATS, aimed=1.0),
        faults=("kill", "weights", "leave"),
    ),
    Bug(
        "KV that went through a codec is found as exact KV",
        "kv/layout/prefix.py",
        "parts = (fingerprint.encode(), fidelity.encode(), adapter.encode(), salt)",
        'parts = (fingerprint.encode(), b"", adapter.encode(), salt)',
        size=FLOATS,
        missed="whoever takes in another worker's blocks, or a disk's, compares whole layouts as well",
    ),
    Bug(
        "a block that comes coded is taken as it is",
        "decode_worker/io/handoff_sink.py",
        "            land(coded, page, ours)",
        "            page[: len(coded)] = coded",
        size=FLOATS,
    ),
    Bug(
        "a block is sent under the hash of the sender's fidelity",
        "prefill_worker/io/service.py",
        "root = prefix.root(self._sender.fingerprint, theirs.fidelity, request.adapter_id, request.tenant_salt)",
        "root = prefix.root(self._sender.fingerprint, ours.fidelity, request.adapter_id, request.tenant_salt)",
        size=FLOATS,
    ),
    Bug(
        "blocks that a prompt's end selects are kept in the order of their scores",
        "kv/layout/selection.py",
        "return sorted(best[: self.slots])",
        "return best[: self.slots]",
        size=SELECTED,
    ),
    Bug(
        "an answer that goes on elsewhere selects anew by its own tokens",
        "kv/layout/selection.py",
        "return len(request.token_ids) if whole else request.prompt_tokens",
        "return len(request.token_ids)",
        size=msgspec.structs.replace(SELECTED, aimed=1.0),
        faults=("kill", "leave"),
    ),
    Bug(
        "attention sinks are not sent",
        "prefill_worker/io/service.py",
        "unseen = range(sunk_blocks(theirs), first_seen(",
        "unseen = range(0, first_seen(",
        size=SELECTED,
    ),
    Bug(
        "other hosts of a worker's ranks are not told of a Rearm",
        "decode_worker/io/host_intake.py",
        "            self._order(RearmLease(key, epoch, tuple(sorted(found.complete))))",
        "            pass",
        size=msgspec.structs.replace(ON_HOSTS, aimed=1.0),
        faults=("kill", "leave", "engine_dies"),
    ),
    Bug(
        "a router hears of a lease before every host of the ranks knows of it",
        "decode_worker/io/service.py",
        "            self._intake.when_known(entry.key, reply)",
        "            reply()",
        size=ON_HOSTS,
        missed="a handoff that comes too early to another host is refused there, and is tried again",
    ),
    Bug(
        "pages of a lease that ended are given back before other hosts write them no more",
        "decode_worker/io/host_intake.py",
        "        self._after_all(partial(self._ended, key))",
        "        self._ended(key)",
        size=msgspec.structs.replace(ON_HOSTS, aimed=1.0, requests=30, seconds=6.0, workers=2),
        faults=("cut",),
        missed="a frame has to reach the other host after its page is leased anew, and before the word of the end",
    ),
    Bug(
        "a page that is leased anew is still taken for one that came in parts",
        "engine/backends/ranks/host_pages.py",
        "        self._divided.difference_update(pages)\n        self._brought",
        "        self._brought",
        size=ON_HOSTS,
    ),
    Bug(
        "what only another host has of a page isn't brought before others read it",
        "engine/backends/ranks/host_pages.py",
        "            self._bring(wanted[first : first + AT_ONCE], self._missed)",
        "            pass",
        size=msgspec.structs.replace(ON_HOSTS, crowded=1.0, requests=24, workers=2),
    ),
    Bug(
        "a handoff is taken over once the lead's host has all of its parts",
        "decode_worker/io/divided_lease.py",
        "        if len(self._commits) < len(self._had):",
        "        if 0 not in self._commits:",
        size=ON_HOSTS,
    ),
    Bug(
        "a block counts once one host has its part of it",
        "decode_worker/io/divided_lease.py",
        "if all(block in had for had in self._had)]",
        "if any(block in had for had in self._had)]",
        size=msgspec.structs.replace(ON_HOSTS, aimed=1.0),
        faults=("kill", "leave", "engine_dies", "host_dies", "cut"),
    ),
    Bug(
        "nothing is said to another host of a worker's ranks",
        "worker/server.py",
        "        return await self.receivers.run()",
        "        return await asyncio.get_running_loop().create_future()",
        size=msgspec.structs.replace(ON_HOSTS, seconds=8.0),
        faults=("cut", "break", "half_open"),
    ),
    Bug(
        "a request that a full queue refuses counts as if it had been served",
        "router/dispatch/admission.py",
        "            self._shares.refund(pool, Place(ticket.order, load))\n",
        "",
        size=OVERLOADED,
    ),
    Bug(
        "a request that gives way in a full queue counts as if it had been served",
        "router/dispatch/admission.py",
        "            if not placed:\n                self._shares.refund(ticket.pool,",
        "            if not placed and ticket._refusal is None:\n                self._shares.refund(ticket.pool,",
        size=OVERLOADED,
    ),
    Bug(
        "all models share the places of a queue",
        "router/dispatch/admission.py",
        "if pool in self._pools and self._pools[pool].waiting(context_class) >= self._max_queue:",
        "if self._counted[context_class] >= self._max_queue:",
        (
            (
                "router/dispatch/admission.py",
                "last = self._pools[newcomer.pool].last(newcomer.queue)",
                "last = max((p.last(newcomer.queue) for p in self._pools.values() if p.waiting(newcomer.queue)), "
                "key=lambda w: w.order)",
            ),
        ),
        size=OVERLOADED,
    ),
    Bug(
        "a request that gives way in a full queue keeps its place",
        "router/dispatch/admission.py",
        "        if ticket.counted:\n            ticket.counted = False",
        "        if ticket.counted and ticket._refusal is None:\n            ticket.counted = False",
        size=OVERLOADED,
    ),
    Bug(
        "a tenant is refused as late for all that others have queued, also behind it",
        "router/dispatch/pool_queue.py",
        "of_class.work_before(order) for",
        "of_class.work_before((float('inf'), 0)) for",
        size=OVERLOADED,
    ),
    Bug(
        "a tenant's weight is ignored",
        "router/dispatch/fair_queue.py",
        "begin + load.work / load.weight",
        "begin + load.work",
        size=OVERLOADED,
    ),
    Bug(
        "a full queue refuses whoever comes, whatever others have had",
        "router/dispatch/admission.py",
        "        if last.order < newcomer.order:",
        "        if True:",
        size=OVERLOADED,
    ),
    Bug(
        "a queue has no bound",
        "router/dispatch/admission.py",
        ".waiting(context_class) >= self._max_queue:",
        ".waiting(context_class) >= 2 * self._max_queue:",
        size=OVERLOADED,
    ),
    Bug(
        "a call that is refused for a full queue is charged to its key's rate",
        "router/answer/stream.py",
        "            opening.give_back(error)\n",
        "",
        size=OVERLOADED,
    ),
    Bug(
        "a request's priority is forgotten where it is written",
        "router/dispatch/messages.py",
        "        priority=context.priority,\n        traceparent=attempt.traceparent,\n        prediction",
        "        traceparent=attempt.traceparent,\n        prediction",
        size=ORDERED,
    ),
    Bug(
        "requests in flight hold twice the bytes that they may",
        "router/dispatch/held_bytes.py",
        "self.total + newcomer.load.size - self.most, ",
        "self.total + newcomer.load.size - 2 * self.most, ",
        size=FEW_BYTES,
    ),
    Bug(
        "a request is refused for bytes of which a quarter are held",
        "router/dispatch/held_bytes.py",
        "self.total + newcomer.load.size - self.most, ",
        "4 * (self.total + newcomer.load.size) - self.most, ",
        size=FEW_BYTES,
    ),
    Bug(
        "a batch job's lines are as urgent as anybody's requests",
        "router/api/batch/lane.py",
        '{"priority": LOWEST_PRIORITY}',
        '{"priority": 0}',
    ),
    Bug(
        "a request's priority orders nobody",
        "router/dispatch/fair_queue.py",
        "return begin + load.priority * LEVEL_WORK, next(self._arrivals)",
        "return begin, next(self._arrivals)",
        size=OVERLOADED,
    ),
    Bug(
        "why a worker keeps its role is told to nobody",
        "worker/server.py",
        "self.next_role, self.role_error = message.role, message.error",
        "self.next_role, self.role_error = message.role, None",
        faults=("role", "ratio"),
        size=KEPT_ROLES,
    ),
    Bug(
        "who waits for a worker's role doesn't see that it has kept the other",
        "router/dispatch/role_control.py",
        "if link.up and info.role_error is not None and info.incarnation not in lives:",
        "if link.up and info.role_error is not None and info.incarnation in lives:",
        faults=("role", "ratio"),
        size=KEPT_ROLES,
    ),
    Bug(
        "an SLO is held against the pace at which another model's requests are placed",
        "router/dispatch/admission.py",
        "wait = self._pools[newcomer.pool].wait_s(newcomer.order) if newcomer.pool in self._pools else 0.0",
        "wait = max((one.wait_s(newcomer.order) for one in self._pools.values()), default=0.0)",
        size=OVERLOADED,
    ),
    Bug(
        "routers change roles without waiting for one another",
        "cluster/roles.py",
        "turn = await held.enter_async_context(self._lease.turn(PATIENCE_S))\n",
        'turn = LeaseTurn(self._lease, "")\n',
        (("cluster/roles.py", "        if not self._turn.is_sure:\n", "        if False:\n"),),
        faults=("role", "ratio"),
        size=TURNED,
    ),
    Bug(
        "a ratio counts workers before it has its turn",
        "router/dispatch/role_control.py",
        "        async with self._turn, self._undisturbed() as turn:  # counts when nobody else changes any\n"
        "            now = self.ratio()\n",
        "        now = self.ratio()\n        async with self._turn, self._undisturbed() as turn:\n",
        faults=("ratio",),
        size=TURNED,
    ),
    Bug(
        "a turn at changing roles isn't renewed",
        "cluster/store/lease.py",
        '            async with beside(partial(self._renew, turn), "lease"):\n                yield turn\n',
        "            yield turn\n",
        faults=("role", "stuck"),
        size=TURNED,
    ),
    Bug(
        "a router that stood still goes on with the roles that it had counted",
        "cluster/roles.py",
        "        if not self._turn.is_sure:\n",
        "        if False:\n",
        (("cluster/roles.py", "if ARGV[3] ~= '' and", "if false and"),),
        faults=("role", "stands"),
        size=TURNED,
    ),
    Bug(
        "what a drain's grace has left is cancelled instead of sent elsewhere",
        "worker/control.py",
        "        if self._service.send_away(away):\n            await asyncio.sleep(AWAY_S)\n        return",
        "        return",
        faults=("drain",),
        size=DRAINED,
    ),
    Bug(
        "a worker that changes its role forgets that it was drained",
        "worker/control.py",
        "        self.drains = True\n",
        "",
        faults=("drain", "role"),
        size=DRAINED,
    ),
    Bug(
        "a decode worker that drains admits what comes",
        "decode_worker/engine/loop.py",
        "        if self.draining:\n            raise Draining",
        "        if False:\n            raise Draining",
        faults=("drain",),
        size=DRAINED,
    ),
    Bug(
        "a drain is answered once its grace is over, whatever still runs",
        "worker/control.py",
        "        if cancelled:\n            await self._idle_within(1.0)\n        return",
        "        return",
        faults=("drain",),
        size=DRAINED,
    ),
    Bug(
        "who asks for the role of a worker that is held waits until time runs out",
        "router/dispatch/role_control.py",
        "if link.up and info.role == role and info.incarnation != lives[0]:",
        'if link.up and info.role == role and info.state == "ready":',
        faults=("role", "hold"),
        size=HELD,
    ),
    Bug(
        "a worker that leaves in order is taken for one that failed",
        "router/workers/session_call.py",
        'raise Draining(f"{session.worker_id} closed the session; go on elsewhere")',
        'raise WorkerLost(f"{session.worker_id} closed the session; go on elsewhere")',
        (
            (
                "router/workers/session_call.py",
                "from baton.protos.errors import Draining\n",
                "from baton.protos.errors import WorkerLost\n",
            ),
        ),
        faults=("drain", "leave"),
        size=DRAINED,
    ),
    Bug(
        "a session's turns go anywhere",
        "router/dispatch/placing.py",
        "        return msgspec.structs.replace(routing, session_worker=home)\n",
        "        return routing\n",
        size=TALKING,
    ),
    Bug(
        "sessions of one name are one session, whoever's they are",
        "router/dispatch/affinity.py",
        "    parts = (request.context.tenant, request.model_id,",
        "    parts = (request.model_id,",
        size=TALKING,
    ),
    Bug(
        "a turn goes home though that costs more, and not where it costs less",
        "router/policies/adjustments/session_affinity.py",
        "    if home.cost <= best.taken.cost:\n",
        "    if home.cost > best.taken.cost:\n",
        size=TALKING,
    ),
    Bug(
        "a step is held back though nobody reads prompts beside it",
        "decode_worker/engine/pace.py",
        "        self._held = self._left_s > 0 and self._has_to_wait()\n",
        "        self._held = self._left_s > 0\n",
        size=LENT,
    ),
    Bug(
        "an engine whose step is held back sleeps until a message comes",
        "decode_worker/engine/loop.py",
        "        return self.receives.patience(min(IDLE_WAIT_S, self.pace.patience))\n",
        "        return self.receives.patience(IDLE_WAIT_S)\n",
        size=LENT,
    ),
    Bug(
        "answers' steps don't wait while prompts are read beside them",
        "decode_worker/engine/pace.py",
        "        self._begun_at, self._held, self._pace_s = self._clock(), False, self._most_s\n",
        "        self._held, self._pace_s = False, self._most_s\n",
        size=LENT,
    ),
)
