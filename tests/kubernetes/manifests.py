"""Reads the manifests in configs/kubernetes/ and their contents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "kubernetes"
SCHEMAS = Path(__file__).with_name("schemas.json")
VALUES = {"prometheus-adapter.yaml"}  # of a chart: no manifest
FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name not in VALUES)


def manifests(*files: str) -> list[dict[str, Any]]:
    """Read all documents of these files, or of all files."""
    return [document for name in files or FILES for document in yaml.safe_load_all((FOLDER / name).read_text())]


def pods(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, pod template) of every pod that a manifest makes."""
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Pod":
        yield name, manifest
    elif manifest["kind"] == "LeaderWorkerSet":
        for role in ("leaderTemplate", "workerTemplate"):
            yield f"{name} {role}", spec["leaderWorkerTemplate"][role]
    elif "template" in spec:
        yield name, spec["template"]
