"""Translation of `vllm bench serve` flags to `oarlock bench serve`: renamed, combined, noted or refused."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from oarlock.server.cli.arguments import UsageError

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")
_PATHS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
_BACKENDS = {
    "vllm": "completions", "openai": "completions", "sglang": "completions", "openai-chat": "chat", "vllm-chat": "chat",
}  # fmt: skip
_DATASETS = {"random": "random", "prefix_repetition": "shared-prefix"}

_RENAMED = {
    "num-prompts": "--num-requests",
    "num-warmups": "--warmup",
    "input-len": "--input-tokens",
    "random-input-len": "--input-tokens",
    "prefix-repetition-suffix-len": "--input-tokens",
    "output-len": "--output-tokens",
    "random-output-len": "--output-tokens",
    "prefix-repetition-output-len": "--output-tokens",
    "random-range-ratio": "--length-spread",
    "prefix-repetition-prefix-len": "--prefix-tokens",
    "prefix-repetition-num-prefixes": "--num-prefixes",
}
_SWITCHES = ("save-result", "save-detailed", "trust-remote-code", "skip-tokenizer-init")
_SAMPLING = (
    "temperature", "top-p", "top-k", "min-p", "frequency-penalty", "presence-penalty", "repetition-penalty",
)  # fmt: skip
# Flags that are collected, and combined after the whole line is read.
_COMBINED = {
    *_SWITCHES,
    *_SAMPLING,
    "backend",
    "base-url",
    "burstiness",
    "dataset-name",
    "endpoint",
    "endpoint-type",
    "extra-body",
    "host",
    "label",
    "logprobs",
    "max-concurrency",
    "metric-percentiles",
    "model",
    "percentile-metrics",
    "port",
    "ramp-up-end-rps",
    "ramp-up-start-rps",
    "ramp-up-strategy",
    "random-prefix-len",
    "request-rate",
    "result-dir",
    "result-filename",
    "served-model-name",
    "tokenizer",
    "tokenizer-mode",
}
_NO_FILES = "prompts are made here: --workload random, shared-prefix or multi-turn, or --trace FILE.jsonl."
_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("dataset-path", "sharegpt-output-len", "sharegpt-context-len", "custom-output-len", "sonnet-input-len",
         "sonnet-output-len", "sonnet-prefix-len", "hf-subset", "hf-split", "hf-name", "hf-output-len", "no-oversample",
         "disable-shuffle", "skip-chat-template", "no-stream", "random-batch-size", "spec-bench-output-len"),
        _NO_FILES,
    ),
    "header": "the one header that is sent is the key of the environment's OPENAI_API_KEY.",
    "insecure": "certificates are always checked: SSL_CERT_FILE names another authority.",
    "profile": "nothing of a server is profiled: /metrics has the times of its steps.",
    "use-beam-search": "requests sample or are greedy; --extra-body adds any field that the server knows.",
    "logprobs-mode": "--extra-body adds any field that the server knows.",
    "append-result": "each run has a file of its own: --output FILE.json.",
    "metadata": "a result holds what was asked for by itself; the name of --output can hold the rest.",
    "request-id-prefix": "requests have the ids that the server gives them.",
    "ready-check-timeout-sec": "wait before: curl --retry 60 --retry-connrefused URL/health",
    "plot-timeline": "--html FILE.html draws the run.",
    "timeline-itl-thresholds": "--html FILE.html draws the run.",
    "plot-dataset-stats": "--html FILE.html draws the run.",
    "lora-modules": "a run asks for one model: --model NAME.",
    "lora-assignment": "a run asks for one model: --model NAME.",
    "self-timed": "a trace is sent at its own times unless --concurrency is given: --workload trace --trace FILE.",
    "probe-request-rate": "run a second `oarlock bench serve` beside this one.",
}  # fmt: skip


@dataclass(slots=True)
class _Line:
    """A command line while it is translated."""

    kept: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)  # flag of `_COMBINED` -> its last value
    notes: list[str] = field(default_factory=list)

    def add(self, flag: str, value: str) -> None:
        self.kept += [flag, value]


def take_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate vLLM's flags in the command line. Returns it, and notes on flags without effect. Raises
    `UsageError`."""
    line, words = _Line(), list(arguments)
    while words:
        word = words.pop(0)
        shown, equals, value = word.partition("=")
        name = shown[2:].replace("_", "-") if shown.startswith("--") else ""
        if name in _REFUSED:
            raise UsageError(f"{shown}, a flag of vllm bench, is not supported.", f"Leave it out: {_REFUSED[name]}")
        if name not in _RENAMED and name not in _COMBINED:
            line.kept.append(word)
        elif name in _SWITCHES:
            line.given[name] = ""
        else:
            if not equals and not words:
                raise UsageError(f"{shown} needs a value.", "Write it behind the flag.")
            value = value if equals else words.pop(0)
            if name in _RENAMED:
                line.add(_RENAMED[name], value)
            else:
                line.given[name] = value
    for combine in (_server, _form, _load, _prompts, _sampling, _results):
        combine(line)
    return line.kept, line.notes


def _server(line: _Line) -> None:
    given = line.given
    urls = [word for word in line.kept if word.startswith(("http://", "https://"))]
    if "host" in given or "port" in given:
        host = given.get("host", "127.0.0.1")
        urls.append(f"http://{f'[{host}]' if ':' in host else host}:{given.get('port', '8000')}")
    if "base-url" in given:
        urls.append(given["base-url"])
    if len(urls) > 1:
        raise UsageError(f"The server is named {len(urls)} times: {', '.join(urls)}.", "Keep one of them.")
    if not any(word in line.kept for word in urls):
        line.kept += urls
    model = given.get("served-model-name") or given.get("model")
    if model is not None:
        line.add("--model", model)


def _form(line: _Line) -> None:
    """Derive `--endpoint` from vLLM's backend and endpoint."""
    asked = []
    for name, known in (("endpoint-type", _BACKENDS), ("backend", _BACKENDS), ("endpoint", _PATHS)):
        value = line.given.get(name)
        if value is None:
            continue
        if name == "endpoint" and not value.startswith(("/", "v1")):
            asked.append(value)  # our own value, which the parser checks
        elif (found := known.get(value if name != "endpoint" else f"/{value.lstrip('/')}")) is not None:
            asked.append(found)
        else:
            raise UsageError(f"--{name} {value} is not measured here.", f"There are: {', '.join(known)}.")
    if len(set(asked)) > 1:
        raise UsageError(
            f"--backend {line.given.get('backend', line.given.get('endpoint-type'))} does not go with --endpoint "
            f"{line.given.get('endpoint')}.",
            "Give --endpoint alone.",
        )
    if asked:
        line.add("--endpoint", asked[0])


def _load(line: _Line) -> None:
    given, rate = line.given, line.given.get("request-rate")
    is_closed = rate is None or rate.lower() in ("inf", "infinity")
    if "ramp-up-strategy" in given:
        if given["ramp-up-strategy"] != "linear":
            raise UsageError(
                f"--ramp-up-strategy {given['ramp-up-strategy']} is not supported.", "Ramps are linear: --ramp R1:R2."
            )
        is_closed = False
        line.add("--ramp", f"{given.get('ramp-up-start-rps', '')}:{given.get('ramp-up-end-rps', '')}")
    if "max-concurrency" in given:
        if not is_closed:
            raise UsageError(
                "--max-concurrency does not go with a rate: an open loop sends at its times, whatever the server does.",
                "Leave out the rate to measure throughput, or --max-concurrency to measure latency at that rate.",
            )
        line.add("--concurrency", given["max-concurrency"])
    elif rate is not None:
        line.add("--request-rate", rate)
    if "burstiness" in given:
        if "max-concurrency" in given:
            line.notes.append("--burstiness: a closed loop has no arrivals of its own.")
        else:
            line.add("--burstiness", given["burstiness"])


def _prompts(line: _Line) -> None:
    name, prefix = line.given.get("dataset-name"), line.given.get("random-prefix-len", "0")
    if name is not None and name not in _DATASETS:
        raise UsageError(f"--dataset-name {name} is not supported.", f"Leave it out: {_NO_FILES}")
    workload = "shared-prefix" if prefix != "0" else _DATASETS[name or "random"]
    if prefix != "0":
        line.add("--prefix-tokens", prefix)
    if name is not None or prefix != "0":
        line.add("--workload", workload)
    for flag in ("tokenizer", "tokenizer-mode", "trust-remote-code", "skip-tokenizer-init"):
        if flag in line.given:
            line.notes.append(f"--{flag}: no tokenizer is loaded here; the server counts the tokens.")


def _sampling(line: _Line) -> None:
    fields: dict[str, Any] = {}
    for name in _SAMPLING:
        if name in line.given:
            fields[name.replace("-", "_")] = _number(name, line.given[name])
    if "logprobs" in line.given:
        number = _number("logprobs", line.given["logprobs"])
        is_chat = "--endpoint" in line.kept and line.kept[line.kept.index("--endpoint") + 1] == "chat"
        fields |= {"logprobs": True, "top_logprobs": number} if is_chat else {"logprobs": number}
    text = line.given.get("extra-body")
    if not fields:
        if text is not None:
            line.add("--extra-body", text)
        return
    try:
        own = json.loads(text or "{}")
    except ValueError:
        own = None
    if isinstance(own, dict):
        line.add("--extra-body", json.dumps(fields | own))
    else:
        line.add("--extra-body", str(text))  # the command reports the error in it


def _number(name: str, text: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise UsageError(f"--{name} is {text!r}, but it must be a number.", "Give a number.") from None


def _results(line: _Line) -> None:
    given = line.given
    for name in (name for name in given.get("percentile-metrics", "").split(",") if name):
        if name not in METRICS:
            raise UsageError(
                f"--percentile-metrics {name}: there is no such figure.", f"There are {', '.join(METRICS)}."
            )
    for text in (text for text in given.get("metric-percentiles", "").split(",") if text):
        if _number("metric-percentiles", text) not in PERCENTILES:
            raise UsageError(
                f"--metric-percentiles {text} is not printed.",
                f"Printed are {', '.join(map(str, PERCENTILES))}; every request is in the file of --output.",
            )
    for flag in ("percentile-metrics", "metric-percentiles"):
        if flag in given:
            line.notes.append(f"--{flag}: all of {', '.join(METRICS)} are printed, with p50, p90 and p99.")
    if "save-result" not in given:
        for flag in ("result-dir", "result-filename", "label", "save-detailed"):
            if flag in given:
                raise UsageError(f"--{flag} says how a result is saved, and none is.", "Add --save-result.")
        return
    if "save-detailed" in given:
        line.notes.append("--save-detailed: every request is always in the file.")
    line.notes.append("--save-result: the file is in the form that `oarlock bench compare` reads, not in vLLM's.")
    line.add("--output", str(_file(given)))


def _file(given: dict[str, str]) -> Path:
    """Return the path of the result by vLLM's rules: a descriptive name in a folder, which is created."""
    folder = Path(given.get("result-dir", "."))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--result-dir {folder} cannot be made: {error.strerror}.", "Name another folder.") from None
    if "result-filename" in given:
        return folder / given["result-filename"]
    label, rate = given.get("label") or given.get("backend", "openai"), given.get("request-rate", "inf")
    users = f"-concurrency{given['max-concurrency']}" if "max-concurrency" in given else ""
    model = (given.get("model") or "model").rstrip("/").rpartition("/")[2]
    return folder / f"{label}-{rate}qps{users}-{model}-{datetime.now():%Y%m%d-%H%M%S}.json"
