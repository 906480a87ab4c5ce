"""A real Prometheus asks a real server, and evaluates every query of the dashboard and of the alerts."""

import json
import re
import shutil
import subprocess

import httpx
import pytest
import yaml

from tests.e2e.running import ROOT, eventually, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (Debian: apt-get install prometheus)"),
]
BOARD = json.loads((ROOT / "configs/grafana/oarlock.json").read_text())
ALERTS = yaml.safe_load((ROOT / "configs/prometheus/alerts.yml").read_text())
# only if there are keys, a directory of batches, or adapters
EXPORTED_LATER = {"oarlock:key_generation_tokens_total", "oarlock:batch_requests_total", "oarlock:batches"}
EXPORTED_LATER |= {"oarlock:adapter_generation_tokens_total"}
NAME = re.compile(r"\b(?:vllm|oarlock):\w+")


class Prometheus:
    """Prometheus with the files of configs/ and the command of docker-compose.yml, but shorter intervals."""

    def __init__(self, folder, server_port):
        config = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"}
        (scraped,) = config["scrape_configs"][0]["static_configs"]
        scraped["targets"] = [target.replace(":8000", f":{server_port}") for target in scraped["targets"]]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(ROOT / "configs/prometheus/alerts.yml", folder)
        port = free_port()
        flags = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]["command"]
        here = {"/etc/prometheus": str(folder), "=/prometheus": f"={folder}/data", ":9090": f":{port}"}
        for written, own in here.items():
            assert sum(written in flag for flag in flags) == 1
            flags = [flag.replace(written, own) for flag in flags]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60, trust_env=False)
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            ["prometheus", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self.client.close()
            self._log.close()

    def get(self, path, **parameters):
        try:
            answer = self.client.get(path, params=parameters)
        except httpx.TransportError:
            self._log.seek(0)
            assert self._process.poll() is None, self._log.read()
            return None
        if answer.status_code == 503:  # it has not begun
            return None
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expr):
        """Evaluate an expression now: a list of (labels, value)."""
        data = self.get("/query", query=expr)
        if data is None:
            return []
        return [(found["metric"], float(found["value"][1])) for found in data["result"]]


@pytest.fixture(scope="module")
def prometheus(tp1, tmp_path_factory):
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), tp1.port)
    try:
        up = 'up{job="oarlock"}'
        eventually(lambda: [value for _, value in running.query(up)] == [1.0], 60, "Prometheus has asked the server")
        for number in range(3):
            tp1.text(f"import os  # {number}\n", max_tokens=8)
            assert tp1.client.post("/v1/completions", json={"prompt": "x", "n": 0}).status_code == 400
            wanted = tp1.metrics()["vllm:generation_tokens_total"]
            eventually(
                lambda wanted=wanted: [value for _, value in running.query("vllm:generation_tokens_total")] == [wanted],
                60,
                "Prometheus has the new number",
            )
        yield running
    finally:
        running.close()


def _names(prometheus):
    return set(prometheus.get("/label/__name__/values"))


@pytest.mark.soak
def test_every_query_of_the_dashboard_has_an_answer(prometheus):
    empty = []
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*").replace("$instance", ".*")
            assert "$" not in expr
            found = prometheus.query(expr)
            if not found:
                empty.append(panel["title"])
    # There are no keys, no directory of batches, and no adapters.
    assert empty == ["Completion tokens by key", "Batches", "Batches", "Generated tokens by adapter"]
    names = {
        name
        for panel in BOARD["panels"]
        for target in panel.get("targets", [])
        for name in NAME.findall(target["expr"])
    }
    assert len(names) > 25 and names - _names(prometheus) == EXPORTED_LATER


def test_the_dashboards_variables_find_the_model_and_the_server(prometheus, tp1):
    for variable, value in (("model_name", "demo"), ("instance", f"127.0.0.1:{tp1.port}")):
        assert prometheus.get(f"/label/{variable}/values", **{"match[]": "vllm:num_requests_running"}) == [value]
    for variable in BOARD["templating"]["list"]:
        assert re.fullmatch(r"label_values\(.*, (model_name|instance)\)", variable["query"]["query"])


def test_every_alert_is_evaluated_and_none_fires(prometheus):
    def evaluated():
        data = prometheus.get("/rules", type="alert")
        rules = [rule for group in data["groups"] for rule in group["rules"]]
        return rules if rules and all(rule["health"] != "unknown" for rule in rules) else None

    rules = eventually(evaluated, 60, "every rule is evaluated")
    written = [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == written
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert {rule["name"]: rule["state"] for rule in rules if rule["state"] == "firing"} == {}
    names = {name for group in ALERTS["groups"] for rule in group["rules"] for name in NAME.findall(rule["expr"])}
    assert len(names) > 10 and names - _names(prometheus) == {
        "oarlock:certificate_expiry_timestamp_seconds"
    }  # no HTTPS


def test_the_numbers_are_the_servers(prometheus, tp1):
    metrics = tp1.metrics()
    for name in ("vllm:prompt_tokens_total", "vllm:request_success_total", "oarlock:kv_blocks_total"):
        eventually(
            lambda name=name: sum(value for _, value in prometheus.query(name)) == metrics[name], 60, f"{name} is there"
        )
    answered = prometheus.query(
        "histogram_quantile(0.5, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[1m])))"
    )
    assert 0 < answered[0][1] < 60
