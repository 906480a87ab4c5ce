"""`--record`, its limit and `--check-weights` reach the configuration of the engine, from every source."""

from pathlib import Path

import pytest

from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import OPTIONS, make_settings
from oarlock.server.config.sources import load_settings


def test_recording_is_off_and_checking_is_on_by_default() -> None:
    config = make_settings({}).engine_config("model")
    assert config.record_path is None and config.record_limit_bytes == 2**30
    assert config.worker.check_weights
    assert OPTIONS["record"].default_text == "none"


def test_the_environment_and_the_file_can_set_them(tmp_path: Path) -> None:
    file = tmp_path / "oarlock.toml"
    file.write_text('record = "steps.rec"\nrecord_limit = "2MiB"\n')
    settings = load_settings({}, {"OARLOCK_CHECK_WEIGHTS": "false"}, str(file)).settings
    config = settings.engine_config("model")
    assert (config.record_path, config.record_limit_bytes) == ("steps.rec", 2 << 20)
    assert not config.worker.check_weights
    unlimited = load_settings({}, {"OARLOCK_RECORD_LIMIT": "none"}).settings
    assert unlimited.engine_config("model").record_limit_bytes is None


def test_a_limit_too_small_for_one_step_is_refused() -> None:
    with pytest.raises(OptionError, match="--record-limit"):
        make_settings({"record_limit": 100})
