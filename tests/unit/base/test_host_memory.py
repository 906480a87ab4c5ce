"""Memory that is available: the machine's, or the part that control groups leave."""

import pytest

from oarlock.base import host_memory
from oarlock.base.python_child import start_python


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_limit_what_counts_as_free(tmp_path, version):
    base = tmp_path / "fs" / ("memory" if version == 1 else "")
    group = base / "slice" / "box"
    group.mkdir(parents=True)
    limit, usage = host_memory._CGROUP_FILES[0 if version == 2 else 1]
    membership = tmp_path / "cgroup"
    membership.write_text("5:memory:/slice/box\n3:cpu:/x\n" if version == 1 else "0::/slice/box\n")
    (group.parent / limit).write_text("10000\n")  # the parent's limit binds
    (group.parent / usage).write_text("4000\n")
    (group.parent / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    (group / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    (group / usage).write_text("3000\n")
    assert host_memory.free_host_bytes(tmp_path / "fs", membership) == 6500
    (group.parent / usage).write_text("20000\n")
    assert host_memory.free_host_bytes(tmp_path / "fs", membership) == 0


def test_without_control_groups_the_machine_counts(tmp_path):
    free = host_memory.free_host_bytes(tmp_path, tmp_path / "missing")
    assert free > 1 << 20


@pytest.mark.slow
def test_a_limit_on_addresses_counts():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, resource.RLIM_INFINITY))"
    asked = "from oarlock.base.host_memory import free_host_bytes; assert 0 < free_host_bytes() < 2 << 30"
    with start_python(["-c", f"{limit}; {asked}"]) as process:
        assert process.wait(60) == 0
