"""Facts that must be equal on all nodes: every setting but those that each host may choose for itself."""

import json
from dataclasses import fields

import pytest

from oarlock.workers import fingerprint
from oarlock.workers.config import WorkerConfig
from oarlock.workers.fingerprint import node_facts
from oarlock.workers.ranks.nodes import first_difference
from tests.golden.tiny_models import make_tiny

OF_ONE_HOST = {"model_path", "num_threads", "cpu_affinity", "log_level", "kv_cache_bytes", "gpu_memory_utilization"}
OF_ONE_HOST |= {"kv_offload_path", "kv_offload_disk_bytes", "log_format"}


@pytest.fixture
def checkpoint(tmp_path):
    return make_tiny(tmp_path / "model", "qwen2")


def difference(ours, theirs):
    """Difference as the head finds it: the other node's facts come as JSON."""
    error = first_difference(ours, "node 0", json.loads(json.dumps(theirs)), "node 1")
    return None if error is None else error.cause


def test_every_setting_but_those_of_one_host_is_compared(checkpoint):
    config = WorkerConfig(str(checkpoint))
    facts = node_facts(config)
    assert facts["setting"].keys() == {field.name for field in fields(WorkerConfig)} - OF_ONE_HOST
    assert difference(facts, node_facts(config)) is None
    own = config.with_(num_threads=3, cpu_affinity="none", log_level="DEBUG", kv_cache_bytes=5)
    assert difference(facts, node_facts(own)) is None
    assert (
        difference(facts, node_facts(config.with_(max_model_len=64)))
        == "The nodes differ in the setting max_model_len: null on node 0, 64 on node 1."
    )


def test_another_copy_of_the_model_is_the_same_and_another_model_is_named_by_its_file(checkpoint, tmp_path):
    facts = node_facts(WorkerConfig(str(checkpoint)))
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert difference(facts, node_facts(WorkerConfig(str(copy)))) is None
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    named = difference(facts, node_facts(WorkerConfig(str(copy))))
    assert named is not None and named.startswith("The nodes differ in the weights in model.safetensors: ")
    weights.unlink()
    named = difference(facts, node_facts(WorkerConfig(str(copy))))
    assert named is not None and named.endswith("nothing on node 1.")


def test_noise_for_weights_needs_no_weights_on_each_host(checkpoint):
    config = WorkerConfig(str(checkpoint), load_format="dummy")
    facts = node_facts(config)
    (checkpoint / "model.safetensors").unlink()
    assert difference(facts, node_facts(config)) is None


def test_versions_are_named_before_what_follows_from_them(checkpoint, monkeypatch):
    config = WorkerConfig(str(checkpoint))
    facts = node_facts(config)
    found = fingerprint.versions()
    monkeypatch.setattr(fingerprint, "versions", lambda: found | {"torch": "0.1"})
    monkeypatch.setattr(fingerprint, "sources", lambda: "of another day")
    named = difference(facts, node_facts(config.with_(seed=9)))
    assert named == f"The nodes differ in the version of torch: {found['torch']} on node 0, 0.1 on node 1."
    monkeypatch.setattr(fingerprint, "versions", lambda: found)
    named = difference(facts, node_facts(config.with_(seed=9)))
    assert (
        named is not None
        and "version of the sources in workers/ and base/" in named
        and "of another day on node 1" in named
    )


def test_keys_of_only_one_node_are_a_difference():
    assert (
        difference({"a": {}}, {"a": {"b": None}}) == "The nodes differ in the a b: nothing on node 0, null on node 1."
    )
    assert difference({}, {"new": {"thing": 1}}) == "The nodes differ in the new thing: nothing on node 0, 1 on node 1."


def test_texts_of_other_nodes_are_safe_to_show():
    named = difference({"a": {}}, {"a": {"b\x1b[31m": "x" * 1000 + "\n"}})
    assert named is not None and named.isprintable() and len(named) < 400
