"""Home directories, `~` in paths and the directories of caches, for users with a home and without one."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from oarlock.base import paths
from oarlock.base.errors import StartupError

CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRITON_HOME", "TRITON_CACHE_DIR")
ROOT_HOME = pwd.getpwuid(0).pw_dir


@pytest.fixture(autouse=True)
def private_temporary_directory(monkeypatch, tmp_path):
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def homeless(monkeypatch):
    """A user that the password database does not know, without HOME."""

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)


@pytest.fixture
def temporary(tmp_path):
    return tmp_path / "tmp" / f"oarlock-{os.getuid()}"


@pytest.mark.parametrize(
    ("home", "path", "expanded"),
    [
        ("/h", "~", "/h"),
        ("/h", "~/", "/h"),
        ("/h", "~/a/b", "/h/a/b"),
        ("/h/", "~/a", "/h/a"),
        ("/h", "~root/a", f"{ROOT_HOME}/a"),
        ("/h", "a/~/b", "a/~/b"),
        ("/h", "./~x", "~x"),
        ("/h", "/a", "/a"),
        ("/h", "Qwen/Qwen2.5", "Qwen/Qwen2.5"),
        ("", "~/a", f"{pwd.getpwuid(os.getuid()).pw_dir}/a"),
        (None, "~/a", f"{pwd.getpwuid(os.getuid()).pw_dir}/a"),
    ],
)
def test_a_tilde_is_replaced_by_a_home_directory(monkeypatch, home, path, expanded):
    monkeypatch.setenv("HOME", home) if home is not None else monkeypatch.delenv("HOME")
    assert paths.expand(path) == Path(expanded)


@pytest.mark.parametrize("home", [None, "", "relative", "."])
def test_a_user_may_have_no_home(homeless, monkeypatch, home, temporary):
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert paths.home() is None
    with pytest.raises(StartupError, match="has no home directory") as raised:
        paths.expand("~/model")
    assert "~/model" in raised.value.cause
    assert paths.expand("model") == Path("model")
    assert paths.cache_home() == temporary and temporary.stat().st_mode & 0o777 == 0o700
    assert paths.cache_home() == temporary  # it is there already
    assert paths.library_caches({}) == {"TRITON_HOME": str(temporary)}


@pytest.mark.parametrize("path", ["~nosuchuser", "~nosuchuser/x"])
def test_an_unknown_user_is_named(path):
    with pytest.raises(StartupError, match="no user nosuchuser"):
        paths.expand(path)


def test_a_place_where_this_user_may_not_look_is_named(monkeypatch, tmp_path):
    assert paths.exists(tmp_path) and not paths.exists(tmp_path / "x")

    def refused(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(StartupError, match=r"/x cannot be read: Permission denied"):
        paths.exists(Path("/x"))


def test_caches_are_below_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_home() == tmp_path / ".cache"
    assert paths.hub_cache() == tmp_path / ".cache/huggingface/hub"
    assert paths.library_caches({}) == {}
    monkeypatch.setenv("XDG_CACHE_HOME", "~/c")
    assert paths.cache_home() == tmp_path / "c" and paths.hub_cache() == tmp_path / "c/huggingface/hub"


@pytest.mark.parametrize("home", ["/proc", "/proc/nothing", "/dev/null"])
def test_a_home_that_cannot_be_written_holds_no_caches(monkeypatch, home, temporary):
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(("/proc", "/dev")))  # root may all
    assert paths.cache_home() == temporary
    assert paths.library_caches({}) == {"TRITON_HOME": str(temporary)}


@pytest.mark.parametrize("variable", ["TRITON_HOME", "TRITON_CACHE_DIR"])
def test_a_library_keeps_the_cache_that_it_was_given(homeless, variable):
    assert paths.library_caches({variable: "/c"}) == {}


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("open to others", "cannot hold caches"),
        ("a link", "cannot hold caches"),
        ("a file", "No cache directory can be used"),
    ],
)
def test_a_temporary_directory_that_others_can_change_holds_no_code(homeless, temporary, kind, cause, tmp_path):
    if kind == "a link":
        temporary.symlink_to(tmp_path)
    elif kind == "a file":
        temporary.touch()
    else:
        temporary.mkdir()
        temporary.chmod(0o770)
    with pytest.raises(StartupError, match=cause) as raised:
        paths.cache_home()
    assert "XDG_CACHE_HOME" in raised.value.fix
    assert paths.library_caches({}) == {}


def test_a_temporary_directory_of_another_user_holds_no_code(homeless, temporary, monkeypatch):
    temporary.mkdir(mode=0o700)
    number = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: number + 1)
    temporary.rename(temporary.with_name(f"oarlock-{number + 1}"))
    with pytest.raises(StartupError, match="other users can change it"):
        paths.cache_home()


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"HF_HOME": "$BASE/b", "BASE": "/base"}, "/base/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_cache_of_the_hub_is_the_one_of_its_library(homeless, monkeypatch, variables, found):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert paths.hub_cache() == Path(found)
    assert paths.hub_cache("/d") == Path("/d")


def test_without_a_home_there_is_no_cache_of_the_hub(homeless):
    with pytest.raises(StartupError, match="no home directory") as raised:
        paths.hub_cache()
    assert "HF_HOME" in raised.value.fix and "--download-dir" in raised.value.fix
