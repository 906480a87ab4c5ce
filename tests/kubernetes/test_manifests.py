"""The manifests in configs/kubernetes/ fit the published schemas, each other, and this server."""

import copy
import json
import re

import jsonschema
import pytest
import yaml

from oarlock.engine.stats import EngineStats
from oarlock.server.cli.main import main
from oarlock.server.config.settings import OPTIONS
from oarlock.server.http.middleware import PROBES
from oarlock.server.observability.metrics import HttpCounters, exposition
from tests.kubernetes.manifests import FILES, FOLDER, ROOT, SCHEMAS, manifests, pods

END_S = 10  # what the server's own watchdog allows for the end after a drain
PODS = {name: pod for manifest in manifests() for name, pod in pods(manifest)}
CONTAINERS = {name: pod["spec"]["containers"][0] for name, pod in PODS.items()}
LEADERS = {name: container for name, container in CONTAINERS.items() if "worker" not in name}


def of_kind(kind, *files):
    return [manifest for manifest in manifests(*files) if manifest["kind"] == kind]


def check(manifest):
    schemas = json.loads(SCHEMAS.read_text())
    jsonschema.validate(manifest, schemas[f"{manifest['apiVersion']} {manifest['kind']}"])


@pytest.mark.parametrize("file", FILES)
def test_it_fits_the_published_schemas(file):
    for manifest in manifests(file):
        check(manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.replicas", "two"),
        ("spec.replica", 2),
        ("spec.template.spec.containers.0.readinessProbe.httpGet.prot", "http"),
        ("spec.template.spec.containers.0.args.1", 7),
        ("spec.template.spec.terminationGracePeriodSeconds", "150s"),
        ("spec.selector", None),
    ],
)
def test_a_mistake_is_found(path, value):
    (manifest,) = copy.deepcopy(of_kind("Deployment"))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = manifest
    for part in parents:
        place = place[part]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


def shown(monkeypatch, capsys, container, **environment):
    """The settings of a server that is started with this container's arguments."""
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(ROOT)  # as in the image, whose working directory holds configs/
    command, *arguments = container["args"]
    assert command == "serve"
    if not arguments[0].startswith("-"):
        arguments.insert(0, "--model")
    assert main(["config", "show", *arguments]) == 0
    return dict(re.findall(r"^(\w+) +(\S+)", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize("name", PODS)
def test_the_server_takes_its_command_and_ends_within_the_grace_period(name, monkeypatch, capsys):
    container, spec = CONTAINERS[name], PODS[name]["spec"]
    settings = shown(monkeypatch, capsys, container)
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert spec["terminationGracePeriodSeconds"] >= sleep + float(settings["drain_timeout"]) + END_S
    assert {port["name"]: str(port["containerPort"]) for port in container.get("ports", ())} in (
        {"http": settings["port"]},
        {},
    )
    for item in container["env"]:
        assert item["name"] in {described.env for described in OPTIONS.values()}
        assert item["valueFrom"]["secretKeyRef"]["name"] == "oarlock"
    assert {"/cache"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert spec["enableServiceLinks"] is False


@pytest.mark.parametrize("name", LEADERS)
def test_probes_ask_routes_that_need_no_key(name):
    container = LEADERS[name]
    for probe, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        asked = container[f"{probe}Probe"]["httpGet"]
        assert asked == {"path": f"/health/{path}", "port": "http"}
        assert asked["path"] in PROBES


@pytest.mark.parametrize("file", FILES)
def test_the_secrets_are_those_that_the_file_says_how_to_make(file):
    used = {
        item["valueFrom"]["secretKeyRef"]["key"]
        for manifest in manifests(file)
        for _, pod in pods(manifest)
        for item in pod["spec"]["containers"][0]["env"]
    }
    assert used == set(re.findall(r"--from-literal=(\w+)=", (FOLDER / file).read_text()))


def test_the_group_of_pods_runs_one_command(monkeypatch, capsys):
    """With the variables that LeaderWorkerSet sets in each of its pods."""
    (group,) = of_kind("LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert all(leader[name] == worker[name] for name in ("args", "env", "image", "resources", "volumeMounts"))
    for index in range(template["size"]):
        settings = shown(
            monkeypatch,
            capsys,
            leader,
            LWS_LEADER_ADDRESS="oarlock-0.oarlock",
            LWS_GROUP_SIZE=template["size"],
            LWS_WORKER_INDEX=index,
        )
        assert (settings["nnodes"], settings["node_rank"]) == (str(template["size"]), str(index))
        ranks = int(settings["tensor_parallel_size"]) * int(settings["pipeline_parallel_size"])
        assert ranks % template["size"] == 0
    # LeaderWorkerSet makes a headless Service with its own name, unless there is one, and then pods find no leader.
    assert group["metadata"]["name"] not in {
        service["metadata"]["name"] for service in of_kind("Service", "leaderworkerset.yaml")
    }


def test_nobody_but_the_pods_of_a_set_reaches_more_than_its_http_port():
    (group,), (policy,) = of_kind("LeaderWorkerSet"), of_kind("NetworkPolicy")
    of_set = {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"]}}
    template = group["spec"]["leaderWorkerTemplate"]
    for pod in (template["leaderTemplate"], template["workerTemplate"]):
        (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"] == of_set, "each pod of a group has a host of its own"
    assert policy["spec"]["podSelector"] == of_set and policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": of_set}]}, {"ports": [{"port": "http"}]}]


@pytest.mark.parametrize("name", CONTAINERS)
def test_pods_have_few_rights(name):
    pod, container = PODS[name]["spec"]["securityContext"], CONTAINERS[name]["securityContext"]
    assert pod["runAsNonRoot"] and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "PodMonitor"])
def test_selectors_match_pods_that_serve(kind):
    labels = [PODS[name].get("metadata", {}).get("labels", {}) for name in LEADERS]
    for manifest in of_kind(kind):
        wanted = manifest["spec"]["selector"]
        assert wanted.get("matchLabels", wanted) in labels
        for port in manifest["spec"].get("ports", manifest["spec"].get("podMetricsEndpoints", ())):
            assert port.get("targetPort", port.get("port")) == "http"


def test_autoscalers_ask_for_metrics_that_the_server_has():
    (deployment,) = of_kind("Deployment")
    (hpa,), (keda,) = of_kind("HorizontalPodAutoscaler"), of_kind("ScaledObject")
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert {each["spec"]["scaleTargetRef"]["name"] for each in (hpa, keda)} == {deployment["metadata"]["name"]}
    (metric,) = hpa["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    asked = re.match(r"[\w:]+", rule["seriesQuery"])[0]
    assert re.fullmatch(rule["name"]["matches"], asked)
    (trigger,) = keda["spec"]["triggers"]
    assert f"sum({asked}{{" in trigger["metadata"]["query"]
    metrics = exposition([EngineStats()], None, HttpCounters(), "model").decode()
    assert re.search(f"^# TYPE {asked} gauge$", metrics, re.MULTILINE)
