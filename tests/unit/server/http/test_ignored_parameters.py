"""The report of ignored parameters: one line of the log for each client and name, and bounded memory."""

from __future__ import annotations

import logging

import pytest

from oarlock.engine.errors import RequestError
from oarlock.server.http.ignored_parameters import HEADER, IgnoredParameters, refuse, with_ignored


@pytest.fixture
def lines(caplog):
    """The lines of the log, as dictionaries."""
    caplog.set_level(logging.INFO, "oarlock.requests")
    return lambda: [record.msg.fields for record in caplog.records]


def test_each_client_is_logged_once_for_each_name(lines):
    ignored = IgnoredParameters()
    for _ in range(3):
        ignored.report(["a", "b"], "team", "agent/1.0")
    ignored.report(["b", "c"], "team", "agent/1.0")
    ignored.report(["a"], "team", "agent/2.0")
    ignored.report(["a"])
    ignored.report([])
    assert [(line.get("client"), line.get("agent"), line["names"]) for line in lines()] == [
        ("team", "agent/1.0", "a,b"),
        ("team", "agent/1.0", "c"),
        ("team", "agent/2.0", "a"),
        (None, None, "a"),
    ]
    assert ignored.counts == {"a": 5, "b": 4, "c": 1}


def test_clients_and_names_are_bounded(lines):
    ignored = IgnoredParameters()
    for number in range(3000):
        ignored.report([f"name_{number}"], None, "one")
        ignored.report(["x" * 10_000], None, f"agent/{number}" + "y" * 10_000)
    assert len(ignored._logged) <= 256 and len(ignored.counts) <= 1025
    assert sum(ignored.counts.values()) == 6000
    assert max(map(len, ignored.counts)) <= 65
    assert sum(line["agent"] == "one" for line in lines()) == 256
    assert max(len(line["agent"]) for line in lines()) == 64


def test_a_client_that_keeps_coming_is_remembered(lines):
    ignored = IgnoredParameters()
    for number in range(1000):
        ignored.report(["a"], "steady", None)
        ignored.report(["a"], None, f"agent/{number}")
    assert sum(line.get("client") == "steady" for line in lines()) == 1


def test_the_header_grows_and_names_only_what_is_safe_in_it():
    headers = with_ignored({"A": "b"}, ["later", "bad name", "x\r\ny"])
    assert headers == {"A": "b", HEADER: "later, +2"}
    assert with_ignored(headers, ["effort"]) == {"A": "b", HEADER: "effort, later, +2"}
    assert with_ignored(headers, []) is headers


def test_a_refusal_names_the_first():
    refuse([])
    with pytest.raises(RequestError) as refused:
        refuse(["alpha", "zeta"])
    assert (refused.value.param, refused.value.code) == ("alpha", "unknown_parameter")
    assert "alpha, zeta" in refused.value.message
