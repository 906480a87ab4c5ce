"""Dashboard and alerts without a server: their form, and that every alert fires when it should and only then."""

import copy
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.e2e.monitoring.dashboard_schema import SCHEMA
from tests.e2e.running import ROOT

BOARD = json.loads((ROOT / "configs/grafana/oarlock.json").read_text())
ALERTS = ROOT / "configs/prometheus/alerts.yml"
CASES = Path(__file__).with_name("alert_cases.yml")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")


def test_the_dashboard_is_readable_by_grafana():
    jsonschema.validate(BOARD, SCHEMA)
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for first, second in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        assert apart or first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    source = yaml.safe_load((ROOT / "configs/grafana/datasource.yml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in panels if "datasource" in panel} == {source["uid"]}
    known = {f"${variable['name']}" for variable in BOARD["templating"]["list"]} | {"$__rate_interval"}
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert set(re.findall(r"\$\w+", " ".join(asked))) <= known


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("panels", 1, "type"), "statistic"),
        (("panels", 1, "gridPos", "w"), 25),
        (("panels", 1, "targets", 0, "expression"), "up"),
        (("panels", 1, "datasource", "uid"), "prometheus"),
        (("panels", 8, "fieldConfig", "defaults", "unit"), "seconds"),
        (("panels", 8, "options", "legend", "placement"), "below"),
        (("templating", "list", 0, "refresh"), "always"),
    ],
)
def test_a_mistake_in_the_dashboard_is_noticed(path, value):
    wrong = copy.deepcopy(BOARD)
    place = wrong
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def _test_rules(folder, change=lambda text: text):
    (folder / "alerts.yml").write_text(change(ALERTS.read_text()))
    shutil.copy(CASES, folder)
    command = ["promtool", "test", "rules", CASES.name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@needs_promtool
def test_every_alert_fires_when_it_should_and_only_then(tmp_path):
    done = _test_rules(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rules = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert [name for name in rules if f'alertname="{name}"' not in CASES.read_text()] == []


@needs_promtool
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("> 0.95", "> 0.90"), ('status=~"5.."', 'status=~"6.."'), ("== 0\n        for: 15m", "== 2\n        for: 15m")],
)
def test_a_rule_that_fires_at_the_wrong_time_is_noticed(tmp_path, right, wrong):
    assert right in ALERTS.read_text()
    assert _test_rules(tmp_path, lambda text: text.replace(right, wrong, 1)).returncode != 0


@needs_promtool
def test_prometheus_accepts_its_files():
    command = ["promtool", "check", "config", str(ROOT / "configs/prometheus/prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "rules found" in done.stdout, done.stdout + done.stderr
