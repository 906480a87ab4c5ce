"""Make `schemas.json`: the parts of the published schemas that the manifests in configs/kubernetes/ use, and no others.

    python -m tests.kubernetes.prune

It needs packages that the tests themselves do without, for they are large: kubernetes-validate 1.37.0 (the schemas of
Kubernetes 1.37 itself, Apache-2.0), cloudcoil.models.keda 2.16.1.0 and cloudcoil.models.prometheus_operator 0.80.1.0
(made from these projects' definitions, Apache-2.0). LeaderWorkerSet publishes its schema in no package: its own fields
are written down here from the reference of leaderworkerset.x-k8s.io/v1, the pods in it are those of Kubernetes.

The whole schemas are applied first. What is left of them allows the fields that the manifests have now, each with its
type, its values and its required siblings, and no others: a manifest with a new field needs this program again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from tests.kubernetes.manifests import SCHEMAS, manifests

Schema = dict[str, Any] | bool
_KEPT = ("enum", "required", "minimum", "maximum", "pattern", "minItems")
_POD = {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
_INT_OR_STRING = {"type": ["integer", "string"]}


def _fields(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


LEADER_WORKER_SET = _fields(
    {
        "apiVersion": {"enum": ["leaderworkerset.x-k8s.io/v1"]},
        "kind": {"enum": ["LeaderWorkerSet"]},
        "metadata": {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"},
        "spec": _fields(
            {
                "replicas": {"type": "integer"},
                "leaderWorkerTemplate": _fields(
                    {
                        "leaderTemplate": _POD,
                        "workerTemplate": _POD,
                        "size": {"type": "integer"},
                        "restartPolicy": {
                            "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "subGroupPolicy": _fields(
                            {
                                "subGroupPolicyType": {"enum": ["LeaderWorker", "LeaderExcluded"]},
                                "subGroupSize": {"type": "integer"},
                            }
                        ),
                    },
                    "workerTemplate",
                ),
                "rolloutStrategy": _fields(
                    {
                        "type": {"enum": ["RollingUpdate"]},
                        "rollingUpdateConfiguration": _fields(
                            {
                                "partition": {"type": "integer"},
                                "maxUnavailable": _INT_OR_STRING,
                                "maxSurge": _INT_OR_STRING,
                            }
                        ),
                    },
                    "type",
                ),
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": _fields(
                    {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}, "subdomainPolicy"
                ),
            },
            "leaderWorkerTemplate",
        ),
    },
    "apiVersion",
    "kind",
    "spec",
)


def _of_kubernetes(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the schema of one kind, the definitions that it refers to)."""
    text = (folder / f"{name}.json").read_text().replace("/api/_definitions.json#", "#")
    definitions = (folder / "_definitions.json").read_text().replace("/api/_definitions.json#", "#")
    return json.loads(text), json.loads(definitions)["$defs"]


def _whole(kind: str, version: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The published schema of a kind, and its definitions."""
    import kubernetes_validate
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from cloudcoil.models.prometheus_operator.v1 import PodMonitor

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / "v1.37.0-local-strict"
    made = {"ScaledObject": ScaledObject, "PodMonitor": PodMonitor}
    if kind in made:
        schema = made[kind].model_json_schema(by_alias=True)
        return schema, schema.pop("$defs")
    if kind == "LeaderWorkerSet":
        return LEADER_WORKER_SET, _of_kubernetes(folder, "podtemplatespec-v1")[1]
    group, _, number = version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], number) if part)
    return _of_kubernetes(folder, name)


def _resolved(schema: Schema, definitions: dict[str, Any]) -> Schema:
    while isinstance(schema, dict) and "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    if isinstance(schema, dict) and (choices := schema.get("anyOf") or schema.get("oneOf")):
        # a value that may be left out; a number that may be text
        kinds = [_resolved(choice, definitions) for choice in choices]
        kinds = [kind for kind in kinds if isinstance(kind, dict) and kind.get("type") != "null"]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return schema


def _kept(schema: Schema, values: list[Any], definitions: dict[str, Any]) -> Schema:
    """The parts of `schema` that `values` use."""
    schema = _resolved(schema, definitions)
    assert isinstance(schema, dict)
    if "anyOf" in schema:
        return {"anyOf": [_kept(kind, [], definitions) for kind in schema["anyOf"]]}
    kept = {key: schema[key] for key in _KEPT if schema.get(key)}
    if kinds := schema.get("type"):
        kinds = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"]
        kept["type"] = kinds[0] if len(kinds) == 1 else kinds
    objects = [value for value in values if isinstance(value, dict)]
    items = [item for value in values if isinstance(value, list) for item in value]
    if properties := schema.get("properties"):
        used = {name for value in objects for name in value}
        assert used <= set(properties), f"{used - set(properties)} is in no published schema"
        kept["properties"] = {
            name: _kept(properties[name], [value[name] for value in objects if name in value], definitions)
            for name in sorted(used)
        }
        kept["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = _kept(
            schema["additionalProperties"], [part for value in objects for part in value.values()], definitions
        )
    if items and "items" in schema:
        kept["items"] = _kept(schema["items"], items, definitions)
    return kept


def main() -> None:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for manifest in manifests():
        by_kind.setdefault(f"{manifest['apiVersion']} {manifest['kind']}", []).append(manifest)
    pruned = {}
    for name, found in sorted(by_kind.items()):
        schema, definitions = _whole(found[0]["kind"], found[0]["apiVersion"])
        for manifest in found:
            jsonschema.validate(manifest, schema | {"$defs": definitions})
        pruned[name] = _kept(schema, found, definitions)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(pruned[name], sort_keys=True)}" for name in pruned)
    SCHEMAS.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
