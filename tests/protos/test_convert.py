"""Nouns survive the trip through protobuf unchanged."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protos import convert, nouns
from baton.protos.errors import ErrorInfo
from baton.protos.v1 import common_pb2, worker_pb2

ids = st.integers(0, 2**31 - 1)
texts = st.text(max_size=12)
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
logprob = st.builds(nouns.TokenLogprob, ids, f32, ids)
groups = st.builds(nouns.LayerGroup, texts, st.lists(texts, max_size=2).map(tuple), ids, ids, ids, ids)
# Every field of each noun, so that a new one that is not carried is noticed.
FIELDS: dict[type, dict[str, st.SearchStrategy]] = {
    nouns.Sampling: {
        "temperature": f32,
        "top_k": ids,
        "top_p": f32,
        "min_p": f32,
        "presence_penalty": f32,
        "frequency_penalty": f32,
        "repetition_penalty": f32,
        "logit_bias": st.dictionaries(ids, f32, max_size=3),
        "seed": st.integers(0, 2**64 - 1),
        "logprobs": st.none() | st.integers(0, 20),
        "max_tokens": ids,
        "min_tokens": ids,
        "stop_token_ids": st.lists(ids, max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "grammar": st.none() | st.builds(nouns.Grammar, texts, texts),
        "allowed_token_ids": st.lists(ids, max_size=3).map(tuple),
        "bad_words": st.lists(st.lists(ids, max_size=3).map(tuple), max_size=2).map(tuple),
        "prompt_logprobs": st.none() | st.integers(0, 20),
        "pooling": st.sampled_from(["", "mean", "last"]),
        "logprob_token_ids": st.lists(ids, max_size=3).map(tuple),
        "max_drafts": st.none() | ids,
    },
    nouns.TokenRun: {
        "output_index": ids,
        "token_ids": st.lists(ids, max_size=4).map(tuple),
        "logprobs": st.lists(
            st.builds(nouns.TokenLogprobs, logprob, st.lists(logprob, max_size=2).map(tuple)), max_size=3
        ).map(tuple),
        "finish_reason": texts,
        "stop_token_id": st.none() | ids,
        "accepted_drafts": ids,
        "rejected_drafts": ids,
    },
    nouns.KvLayout: {
        "dtype": texts,
        "groups": st.lists(groups, max_size=2).map(tuple),
        "page_bytes": ids,
        "fidelity": texts,
        "block_tokens": st.integers(1, 8).map(lambda runs: 16 * runs),
        "shard_rank": ids,
        "shard_count": ids,
        "version": st.integers(1, 9),
        "states": st.lists(
            st.builds(nouns.StatePlane, texts, ids, st.lists(ids, max_size=3).map(tuple)), max_size=2
        ).map(tuple),
        "windows": st.lists(ids, max_size=3).map(tuple),
    },
}
samplings, runs, layouts = (st.builds(noun, **fields) for noun, fields in FIELDS.items())


@pytest.mark.parametrize("noun", FIELDS)
def test_every_field_of_a_noun_is_tried_on_the_wire(noun):
    assert set(FIELDS[noun]) == set(noun.__struct_fields__)


@given(samplings)
def test_sampling_survives_the_wire(sampling):
    pb = common_pb2.Sampling.FromString(convert.sampling_to_pb(sampling).SerializeToString())
    assert convert.sampling_from_pb(pb) == sampling


@given(runs)
def test_a_token_run_survives_the_wire(run):
    pb = common_pb2.TokenRun.FromString(convert.run_to_pb(run).SerializeToString())
    assert convert.run_from_pb(pb) == run


@given(layouts)
def test_a_layout_survives_the_wire(layout):
    pb = common_pb2.KvLayout.FromString(convert.layout_to_pb(layout).SerializeToString())
    assert convert.layout_from_pb(pb) == layout


@given(layouts, st.lists(ids, max_size=3).map(tuple))
def test_a_workers_description_survives_the_wire(layout, eos):
    info = nouns.WorkerInfo(
        "w0", "inc", "decode", "127.0.0.1:1", "m", "ff", layout, 2048, 300, eos, 64, kv_backing="small pages",
        widths={"tp": 2}, rank_hosts=("", "10.0.0.2:7100"), bridges_windows=True,
        role_error=ErrorInfo("ConfigError", "no such file", "speculation"),
    )  # fmt: skip
    pb = worker_pb2.WorkerInfo.FromString(convert.info_to_pb(info).SerializeToString())
    assert convert.info_from_pb(pb) == info


def test_a_pool_snapshot_and_an_error_survive_the_wire():
    snapshot = nouns.PoolSnapshot(10, 1, 2, 3, 4, 5, 6, 7, 8, "i", 0.5, 9, True)
    assert convert.snapshot_from_pb(convert.snapshot_to_pb(snapshot)) == snapshot
    error = ErrorInfo("PoolExhausted", "full", "token_ids", 1.5)
    assert convert.error_from_pb(convert.error_to_pb(error)) == error


def test_a_held_adapter_survives_the_wire():
    adapter = nouns.AdapterInfo("sql@0123456789abcdef", "sql", 8, 4096, ("q_proj", "v_proj"), True, 2, True)
    assert convert.adapter_from_pb(convert.adapter_to_pb(adapter)) == adapter


def test_an_empty_sampling_message_takes_every_default():
    assert convert.sampling_from_pb(common_pb2.Sampling()) == nouns.Sampling()
    assert convert.sampling_fields(common_pb2.Sampling()) == {}


def test_an_admit_becomes_an_engine_request_that_knows_what_was_replayed():
    pb = worker_pb2.Admit(
        request_id="r",
        token_ids=[1, 2, 3],
        prompt_tokens=2,
        choice=1,
        sampling=convert.sampling_to_pb(nouns.Sampling(seed=7)),
        tenant_salt=b"s",
    )
    request = convert.engine_request(pb)
    assert request.token_ids == (1, 2, 3)
    assert request.replayed == 1
    assert request.sampling.seed == 7
    assert request.tenant_salt == b"s"
    assert not request.retained
    assert convert.engine_request(worker_pb2.PrefillRequest(retained=True)).retained
    hinted = convert.engine_request(worker_pb2.Admit(retained=True, retained_tokens=50))
    assert (hinted.retained_tokens, hinted.hinted_blocks(16), request.hinted_blocks(16)) == (50, 3, 0)
    assert math.isclose(request.sampling.temperature, 1.0)
