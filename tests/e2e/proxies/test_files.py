"""nginx and Envoy themselves accept the files of configs/, and refuse what is wrong in them."""

import pytest

from tests.e2e.proxies.proxy import checked, why_missing

# What a user changes, done wrongly, and a word of what the program says.
MISTAKES = [
    ("nginx", "max_fails=1", "max_fail=1", "invalid parameter"),
    ("nginx", "proxy_read_timeout 600s", "proxy_read_timeout tenminutes", "invalid value"),
    ("nginx", r"\$oarlock_session consistent", "$oarlock_sesion consistent", "unknown"),
    ("envoy", "num_retries", "num_retry", "num_retry"),
    ("envoy", "stream_idle_timeout: 600s", "stream_idle_timeout: tenminutes", "duration"),
    ("envoy", "cluster: oarlock", "cluster: oarlok", "oarlok"),
]


@pytest.mark.parametrize("name", ["nginx", "envoy"])
def test_the_program_accepts_the_file(name, tmp_path):
    if reason := why_missing(name):
        pytest.skip(reason)
    done = checked(name, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "right", "wrong", "said"), MISTAKES)
def test_the_program_names_a_mistake(name, right, wrong, said, tmp_path):
    if reason := why_missing(name):
        pytest.skip(reason)
    done = checked(name, tmp_path, {right: wrong})
    assert done.returncode != 0 and said in (done.stderr + done.stdout).lower()
