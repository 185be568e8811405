"""A slab against the slow obvious version, over restarts and damage."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.kv.tiers.memory import MemoryStore, host_slab
from baton.kv.tiers.slab import RECORD_BYTES, Eviction, Slab

PAGE, SLOTS = 64, 5


def block(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def content(number: int) -> bytes:
    return block(number) * (PAGE // 32)


class Bytes:
    """Holds the memory that a slab lies in and that outlives it."""

    def __init__(self) -> None:
        self.pages = np.zeros((SLOTS, PAGE), np.uint8)
        self.records = bytearray(SLOTS * RECORD_BYTES)

    def slab(self) -> Slab:
        return Slab(MemoryStore(self.pages, memoryview(self.records)), "lru")


def put(slab: Slab, number: int) -> bytes | None:
    return slab.put(block(number), memoryview(content(number)))


def loaded(slab: Slab, number: int) -> bytes | None:
    into = bytearray(PAGE)
    return bytes(into) if slab.load(block(number), memoryview(into)) else None


def test_what_was_put_is_loaded_and_the_least_recently_used_goes_first():
    slab = Bytes().slab()
    assert [put(slab, n) for n in range(SLOTS)] == [None] * SLOTS
    slab.touch(block(0))
    assert put(slab, 9) == block(1)
    assert loaded(slab, 1) is None
    assert loaded(slab, 0) == content(0)
    slab.check()


def test_every_flipped_bit_is_refused_and_the_slot_is_used_again():
    for at in range(PAGE * 8):
        memory = Bytes()
        slab = memory.slab()
        put(slab, 3)
        slot = slab._slots[block(3)]
        memory.pages[slot, at // 8] ^= 1 << at % 8
        assert loaded(slab, 3) is None
        assert (slab.damaged, len(slab), block(3) in slab) == (1, 0, False)
        put(slab, 3)
        assert loaded(slab, 3) == content(3)


def test_every_flipped_bit_of_a_record_is_refused_after_a_restart():
    for at in range(RECORD_BYTES * 8):
        memory = Bytes()
        put(memory.slab(), 3)
        slot = memory.slab()._slots[block(3)]
        memory.records[slot * RECORD_BYTES + at // 8] ^= 1 << at % 8
        again = memory.slab()
        assert loaded(again, 3) is None
        assert again.damaged == 1
        again.check()


def test_blocks_that_come_back_outlast_those_that_never_do():
    def found(eviction: Eviction) -> int:
        slab, hits, page = host_slab(200 * (PAGE + RECORD_BYTES), PAGE, eviction), 0, memoryview(bytes(PAGE))
        assert slab is not None
        for turn in range(1000):
            for number in (turn % 150, 1000 + 2 * turn, 1001 + 2 * turn):
                hits += block(number) in slab
                slab.put(block(number), page)
        slab.check()
        return hits

    assert found("worth") > 200
    assert found("lru") == 0


def test_a_block_that_was_lost_counts_as_no_use_and_leaves_the_next_in_its_slot_no_history():
    memory = Bytes()
    slab = Slab(MemoryStore(memory.pages, memoryview(memory.records)))
    put(slab, 1)
    memory.pages[:] ^= 1
    assert loaded(slab, 1) is None
    slab.check()
    assert [put(slab, number) for number in range(2, 2 + SLOTS)] == [None] * SLOTS
    assert put(slab, 9) == block(2), "none was ever used, and it is the oldest"
    slab.check()


def test_what_is_worth_least_is_learned_anew_after_a_restart():
    memory = Bytes()
    slab = Slab(MemoryStore(memory.pages, memoryview(memory.records)))
    for number in range(3 * SLOTS):
        put(slab, number % (SLOTS + 1))
        slab.check()
    slab = Slab(MemoryStore(memory.pages, memoryview(memory.records)))
    assert len(slab) == SLOTS
    slab.check()
    put(slab, 77)
    slab.drop(block(77))
    slab.check()


class Slabs(RuleBasedStateMachine):
    """The model is a dict in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Bytes()
        self.slab = self.memory.slab()
        self.model: dict[int, None] = {}

    @rule(number=st.integers(0, 9))
    def put(self, number: int) -> None:
        gone = put(self.slab, number)
        self.model.pop(number, None)
        expected = next(iter(self.model)) if len(self.model) == SLOTS else None
        if expected is not None:
            del self.model[expected]
        self.model[number] = None
        assert gone == (None if expected is None else block(expected))

    @rule(number=st.integers(0, 9))
    def touch(self, number: int) -> None:
        self.slab.touch(block(number))
        if number in self.model:
            del self.model[number]
            self.model[number] = None

    @rule(number=st.integers(0, 9))
    def load(self, number: int) -> None:
        assert loaded(self.slab, number) == (content(number) if number in self.model else None)

    @rule(number=st.integers(0, 9))
    def drop(self, number: int) -> None:
        self.slab.drop(block(number))
        self.model.pop(number, None)

    @rule(number=st.integers(0, 9), byte=st.integers(0, PAGE - 1))
    def damage(self, number: int, byte: int) -> None:
        slot = self.slab._slots.get(block(number))
        if slot is not None:
            self.memory.pages[slot, byte] ^= 0x10
            assert loaded(self.slab, number) is None
            del self.model[number]

    @rule()
    def restart(self) -> None:
        self.slab = self.memory.slab()

    @invariant()
    def it_is_what_the_model_is(self) -> None:
        self.slab.check()
        assert self.slab.hashes() == tuple(map(block, self.model))


TestSlabs = Slabs.TestCase
TestSlabs.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
