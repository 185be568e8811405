"""Tests the error tree: one place that maps an error to gRPC, HTTP and a metric label."""

import re

import grpc
import pytest

from baton.protos import errors


@pytest.mark.parametrize("cls", errors.BY_NAME.values(), ids=lambda c: c.__name__)
def test_every_error_maps_to_a_real_grpc_status_and_an_http_status(cls):
    assert hasattr(grpc.StatusCode, cls.grpc_status)
    assert 400 <= cls.http_status < 600
    assert re.fullmatch(r"[a-z_]+", cls.label)


def test_labels_are_unique_so_that_metrics_tell_errors_apart():
    labels = [cls.label for cls in errors.BY_NAME.values()]
    assert len(labels) == len(set(labels))


def test_an_error_survives_the_trip_as_data():
    error = errors.PoolExhausted("no pages", param="token_ids", retry_after_s=0.25)
    back = errors.from_info(errors.to_info(error))
    assert type(back) is errors.PoolExhausted
    assert (back.message, back.param, back.retry_after_s) == ("no pages", "token_ids", 0.25)


def test_a_foreign_exception_becomes_the_root_with_its_text_kept():
    info = errors.to_info(ValueError("odd"))
    assert (info.type, info.message) == ("BatonError", "ValueError: odd")


def test_an_unknown_type_from_a_newer_peer_becomes_the_root():
    assert type(errors.from_info(errors.ErrorInfo("FromTheFuture", "x"))) is errors.BatonError


def test_the_docstring_draws_every_class_with_its_true_statuses():
    for cls in errors.BY_NAME.values():
        row = rf"{cls.__name__}\s+{cls.grpc_status}\s+{cls.http_status}\s+{cls.label}\b"
        assert re.search(row, errors.__doc__), cls.__name__
