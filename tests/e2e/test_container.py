"""The image's own command where the image would run it: read-only root, an unprivileged user, no way to the network.

Linux namespaces stand in for the container, and /mnt for its /cache. The build of the image is not tested here.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oarlock.workers.kernels.cpu.build import cache_directory
from tests.e2e.running import QUICK_COMPILER
from tests.house import recipes
from tests.house.rules import ROOT

USER = 10001
# Runs as the root of new namespaces: closes the file system, opens the two places that may be written, drops the rest.
PREPARE = """
set -e
ip link set lo up
mount --make-rprivate /
mount -t tmpfs -o "mode=755,uid=$OWNER,gid=$OWNER" tmpfs /mnt
if [ -n "$KERNELS" ]; then
    mkdir /mnt/oarlock
    cp -r "$KERNELS" /mnt/oarlock/kernels
    chown -R "$OWNER:$OWNER" /mnt/oarlock
fi
if [ -n "$HIDDEN" ]; then  # the interpreter lies in a folder that other users may not enter
    mount --bind "$PREFIX" /media
    mount -t tmpfs -o mode=755 tmpfs "$HIDDEN"
    mkdir -p "$PREFIX"
    mount --move /media "$PREFIX"
fi
mount -o remount,ro,bind /
mount -t tmpfs -o mode=1777 tmpfs /tmp
exec $DROP "$@"
"""
# A container's lifecycle: the command starts, the health check succeeds, SIGTERM ends it.
LIVE = """
import json, os, signal, subprocess, sys, time
command, check, places = json.loads(sys.argv[1])
writable = [place for place in places if os.access(place, os.W_OK)]
server = subprocess.Popen(command, stdout=sys.stderr)
until = time.monotonic() + 120
while subprocess.run(check, stderr=subprocess.DEVNULL).returncode and server.poll() is None:
    assert time.monotonic() < until, "the health check never succeeded"
    time.sleep(1.0)
from oarlock.workers.kernels.cpu.build import cache_directory
kernels = str(cache_directory())
server.send_signal(signal.SIGTERM)
print(json.dumps({"user": os.getuid(), "writable": writable, "status": server.wait(60), "kernels": kernels}))
"""


def inside(*command, **environment):
    """Run `command` in new namespaces: started by root, as another user; else as the user that is root in them."""
    is_root = os.geteuid() == 0
    drop = f"setpriv --reuid={USER} --regid={USER} --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs"
    closed = [path for path in reversed(Path(sys.base_prefix).parents) if is_root and not path.stat().st_mode & 1]
    prepared = {
        "DROP": drop if is_root else "",
        "OWNER": str(USER if is_root else 0),
        "PREFIX": sys.base_prefix,
        "HIDDEN": str(closed[0]) if closed else "",
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    namespaces = ["unshare", "--mount", "--net", *([] if is_root else ["--user", "--map-root-user"])]
    return subprocess.run(
        [*namespaces, "sh", "-c", PREPARE, "sh", *command],
        cwd=ROOT,
        env={**environment, **prepared},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    missing = [tool for tool in ("unshare", "setpriv", "mount", "ip") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    tried = inside(sys.executable, "-c", "")
    if tried.returncode:
        pytest.skip(f"namespaces are not permitted here: {tried.stderr.strip()[-200:]}")


@pytest.mark.soak
@pytest.mark.parametrize("kernels", ["found", "compiled"])
def test_the_command_of_the_image_serves_and_writes_only_to_cache_and_tmp(kernels):
    image = recipes.stages()["cpu"]
    command = [json.loads(recipes.last(image, word)) for word in ("ENTRYPOINT", "CMD")]
    check = json.loads(recipes.last(image, "HEALTHCHECK").partition("CMD ")[2])
    found = recipes.environment(image)
    variables = {name: value.replace("/cache", "/mnt") for name, value in found.items() if name != "PATH"}
    assert variables["XDG_CACHE_HOME"] == "/mnt"  # where the kernels go
    asked = json.dumps([[*command[0], *command[1]], check, [str(ROOT), "/", "/tmp", "/mnt"]])
    result = inside(
        sys.executable,
        "-c",
        LIVE,
        asked,
        **variables,
        HOME="/nonexistent",
        PYTHONPATH=str(ROOT),
        OARLOCK_NUM_THREADS="1",
        KERNELS=str(cache_directory()) if kernels == "found" else "",
        CXX="g++" if kernels == "found" else str(QUICK_COMPILER),
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["user"] == (USER if os.geteuid() == 0 else 0)
    assert seen["writable"] == ["/tmp", "/mnt"]
    assert seen["status"] == 0
    assert seen["kernels"] == "/mnt/oarlock/kernels"
    assert "Traceback" not in result.stderr
