"""Table of starts of two hosts that must fail: the mistake, the host that reports it, and the words of the report.

A start that fails prints one `error:` line and one `fix:` line on each host that ends, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.multihost.group import Flags

SHORT_WAIT: Flags = ("--node-timeout", 6)
TWO_RANKS: Flags = ("--tensor-parallel-size", 2)


@dataclass(frozen=True)
class BadInput:
    """`head` and `node`: a regular expression of the host's `error:` line; None: the host is not started.

    `{head}` and `{port}` in flags and variables stand for the head's address and --master-port.
    """

    name: str
    head: str | None
    node: str | None
    flags: Flags = TWO_RANKS
    head_flags: Flags = ()
    node_flags: Flags = ()
    head_env: Mapping[str, Any] = field(default_factory=dict)
    node_env: Mapping[str, Any] = field(default_factory=dict)
    node_model: str | None = None  # of `test_bad_inputs.py`
    node_oarlock: str | None = None  # of `test_bad_inputs.py`: `another version` or `another source`
    listens: str | None = None  # what has the head's port before: `nothing that answers` or `a web server`


def of_both(name: str, cause: str, **fields: Any) -> BadInput:
    return BadInput(name, head=cause, node=cause, **fields)


BAD_INPUTS = (
    # ------------------------------------------------------------------ hosts that differ
    of_both(
        "another type",
        r"differ in the setting dtype: bfloat16 on node 0 \(head, .*\), float32 on node 1 \(node1",
        head_flags=("--dtype", "bfloat16"),
        node_flags=("--dtype", "float32"),
    ),
    BadInput(
        "a secret, which there is no more", head="OARLOCK_NODE_SECRET", node=None, head_env={"OARLOCK_NODE_SECRET": "x"}
    ),
    of_both("other limits", "differ in the setting max_num_seqs: 64 .* 32 ", node_flags=("--max-num-seqs", 32)),
    of_both("other weights", r"differ in the weights in model\.safetensors", node_model="other weights"),
    of_both("another model", r"differ in the (setting|weights in) ", node_model="another model"),
    of_both(
        "another version of Oarlock",
        r"differ in the version of oarlock: \S+ on node 0 \(head, .*\), 99\.9 on node 1 \(node1",
        node_oarlock="another version",
    ),
    of_both(
        "other sources of the same version",
        r"differ in the version of the sources in workers/ and base/: "
        r"\w{16} on node 0 \(head, .*\), \w{16} on node 1 \(node1",
        node_oarlock="another source",
    ),
    of_both(
        "another number of ranks",
        "differ in the setting tensor_parallel_size: 2 .* 4 ",
        flags=(),
        head_flags=TWO_RANKS,
        node_flags=("--tensor-parallel-size", 4),
    ),
    of_both(
        "another number of hosts",
        "differ in the number of nodes: 2 .* 4 ",
        flags=("--tensor-parallel-size", 4),
        node_flags=("--nnodes", 4),
    ),
    # ------------------------------------------------------------------ who is missing, or not where it should be
    BadInput("the head never comes", head=None, node="could not reach node 0", node_flags=SHORT_WAIT),
    BadInput("the node never comes", head="node 1 of 2 did not join", node=None, head_flags=SHORT_WAIT),
    BadInput("the head's port is taken", head="{port}", node=None, listens="nothing that answers"),
    BadInput(
        "a web server has the head's port",
        head=None,
        node="is not the store of node 0",
        listens="a web server",
    ),
    BadInput(
        "the head's address is of another host", head="10.83.0.9", node=None, head_flags=("--master-addr", "10.83.0.9")
    ),
    BadInput(
        "no route to the head",
        head=None,
        node="No network of this host leads",
        node_flags=("--master-addr", "10.99.0.1"),
    ),
    BadInput(
        "an unknown name of the head",
        head=None,
        node="head.invalid",
        node_flags=("--master-addr", "head.invalid", *SHORT_WAIT),
    ),
    BadInput("an unknown interface", head=None, node="nope0 .*", node_flags=("--node-interface", "nope0")),
    BadInput(
        "the same number twice",
        head=None,
        node="is not one of this host's|not an address of this host|not one of this host",
        node_flags=("--node-rank", 0),
    ),
    BadInput("a number too high", head=None, node="with 2 hosts it is at most 1", node_flags=("--node-rank", 2)),
    # ------------------------------------------------------------------ sizes that cannot be
    of_both(
        "ranks that cannot be dealt", "1 tensor-parallel ranks .* cannot be divided equally among 2 nodes", flags=()
    ),
    of_both(
        "more stages than layers", "does not fit this model: it has 8 layers", flags=("--pipeline-parallel-size", 16)
    ),
    # ------------------------------------------------------------------ programs that start one process on each host
    BadInput(
        "torchrun with processes for other ranks",
        head=None,
        node="torchrun starts 3 processes, but .* is 2",
        node_env={"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "3"},
    ),
)
