"""Translation of `vllm bench serve` flags to `oarlock bench serve`: a table, and flags that depend on others."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.migrate.rows import choose, fill, known_values, parse

# The format is described in `migrate/dialects.py`. Flags `into …` are combined after the whole line is read.
TABLE = """
--num-prompts {n} | --num-requests {n}
--num-warmups {n} | --warmup {n}
--input-len --random-input-len --prefix-repetition-suffix-len {n} | --input-tokens {n}
--output-len --random-output-len --prefix-repetition-output-len {n} | --output-tokens {n}
--random-range-ratio {x} | --length-spread {x}
--prefix-repetition-prefix-len {n} | --prefix-tokens {n}
--prefix-repetition-num-prefixes {n} | --num-prefixes {n}
--random-prefix-len 0 --dataset-name random | not needed
--random-prefix-len {n} | --workload shared-prefix --prefix-tokens {n}
--dataset-name prefix_repetition | --workload shared-prefix
--backend --endpoint-type vllm|openai|sglang --endpoint /v1/completions|v1/completions|completions | --endpoint
  completions
--backend --endpoint-type vllm-chat|openai-chat --endpoint /v1/chat/completions|v1/chat/completions|chat | --endpoint
  chat
--base-url {url} --host {host} --port {port} | into URL
--model --served-model-name {name} | into --model
--request-rate {rate} | --request-rate {rate}
--max-concurrency {n} | --concurrency {n}
--burstiness {x} | --burstiness {x}
--ramp-up-strategy linear --ramp-up-start-rps --ramp-up-end-rps {rate} | into --ramp
--temperature --top-p --top-k --min-p --frequency-penalty --presence-penalty --repetition-penalty {x} | into
  --extra-body
--logprobs {n} --extra-body {json} | into --extra-body
--result-dir {folder} --result-filename {file} --label {name} --save-result | into --output
--save-detailed | into --output | every request is always in the file.
--tokenizer --tokenizer-mode {x} --trust-remote-code --skip-tokenizer-init | not needed | the server counts the tokens.
--percentile-metrics ttft|tpot|itl|e2el,… --metric-percentiles {percentile},… | not needed | all of ttft, tpot, itl,
  e2el are printed, with p50, p90 and p99.
--metric-percentiles {x} | no equivalent | printed are 50, 90, 99; every request is in the file of --output.
--dataset-path --sharegpt-output-len --sharegpt-context-len --custom-output-len --sonnet-input-len --sonnet-output-len
  --sonnet-prefix-len --hf-subset --hf-split --hf-name --hf-output-len --random-batch-size --spec-bench-output-len
  --dataset-name {x} --no-oversample --disable-shuffle --skip-chat-template --no-stream | no equivalent | prompts are
  generated: --workload random, shared-prefix or multi-turn, or --trace FILE.jsonl.
--header {x} | no equivalent | the only header is the API key in OPENAI_API_KEY.
--insecure | no equivalent | certificates are always checked; SSL_CERT_FILE selects another authority.
--profile | no equivalent | /metrics has the step times of the server.
--logprobs-mode {x} --use-beam-search | no equivalent | --extra-body adds any field that the server supports.
--append-result | no equivalent | each run has its own file: --output FILE.json.
--metadata {x}… | no equivalent | results record the flags; use the name of the --output file for more.
--request-id-prefix {x} | no equivalent | the server assigns request ids.
--ready-check-timeout-sec {s} | no equivalent | run before: curl --retry 60 --retry-connrefused URL/health
--timeline-itl-thresholds {x} --plot-timeline --plot-dataset-stats | no equivalent | use --html FILE.html.
--self-timed | no equivalent | a trace has its own times: --workload trace --trace FILE.
--probe-request-rate {x} | no equivalent | run a second `oarlock bench serve` at the same time.
--ramp-up-strategy {x} | no equivalent | ramps are linear: --ramp R1:R2.
"""


def take_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate vLLM's flags in the command line. Returns it, and notes. Raises `UsageError`."""
    table, words = parse(TABLE), list(arguments)
    kept: list[str] = []
    notes: list[str] = []
    ours: dict[str, str] = {}  # our flag -> its value
    given: dict[str, str] = {}  # name of a flag -> its value
    fields: dict[str, str] = {}  # the same for those in --extra-body
    while words:
        word = words.pop(0)
        shown, equals, value = word.partition("=")
        name = shown.replace("_", "-")
        if name not in table:
            kept.append(word)
            continue
        rows = table[name]
        values = [value] if equals else words[:1]
        if not any(row.value for row in rows):  # a switch
            values = []
        elif not equals:
            del words[:1]
        written, chosen = " ".join([shown, *values]), choose(rows, values)
        if chosen is None and values:
            raise UsageError(f"{written} is not supported.", known_values(rows))
        if chosen is not None and chosen[0].ours == "no equivalent":
            flag = written if len(rows) > 1 else shown
            raise UsageError(f"{flag}, a flag of vllm bench, is not supported.", f"Leave it out: {chosen[0].note}")
        if chosen is None or (chosen[0].value and not values):
            raise UsageError(f"{shown} needs a value.", "Write it after the flag.")
        row, parts = chosen
        notes += [f"{name}: {row.note}"] if row.note else []
        (fields if row.ours == "into --extra-body" else given)[name[2:]] = " ".join(values)
        if not row.ours.startswith(("into ", "not needed")):
            for flag, value in fill(row.ours, parts):
                if flag == "--endpoint" and ours.get(flag, value) != value:
                    raise UsageError(f"{written} does not go with --endpoint {ours[flag]}.", "Give --endpoint alone.")
                ours[flag] = value
    _add_server(given, kept)
    _add_load(given, ours, notes)
    if "model" in given or "served-model-name" in given:
        ours["--model"] = given.get("served-model-name") or given["model"]
    if fields:
        ours["--extra-body"] = _extra_body(fields, is_chat=ours.get("--endpoint") == "chat")
    if "save-result" in given:
        ours["--output"] = str(_file(given))
        notes.append("--save-result: the file has the format of `oarlock bench compare`, not vLLM's.")
    for name in ("result-dir", "result-filename", "label", "save-detailed"):
        if name in given and "save-result" not in given:
            raise UsageError(f"--{name} needs a result that is saved.", "Add --save-result.")
    return kept + [word for item in ours.items() for word in item], notes


def _add_server(given: dict[str, str], kept: list[str]) -> None:
    urls = [word for word in kept if word.startswith(("http://", "https://"))]
    if "host" in given or "port" in given:
        host = given.get("host", "127.0.0.1")
        urls.append(f"http://{f'[{host}]' if ':' in host else host}:{given.get('port', '8000')}")
    if "base-url" in given:
        urls.append(given["base-url"])
    if len(urls) > 1:
        raise UsageError(f"The server is named {len(urls)} times: {', '.join(urls)}.", "Keep one of them.")
    kept += [url for url in urls if url not in kept]


def _add_load(given: dict[str, str], ours: dict[str, str], notes: list[str]) -> None:
    if "ramp-up-strategy" in given:
        ours["--ramp"] = f"{given.get('ramp-up-start-rps', '')}:{given.get('ramp-up-end-rps', '')}"
    if "--concurrency" not in ours:
        return
    if ours.pop("--burstiness", None):
        notes.append("--burstiness: a closed loop has no arrivals of its own.")
    if "--ramp" in ours or ours.pop("--request-rate", "inf").lower() not in ("inf", "infinity"):
        raise UsageError(
            "--max-concurrency does not go with a rate: an open loop sends at its times, whatever the server does.",
            "Leave out the rate to measure throughput, or --max-concurrency to measure latency at that rate.",
        )


def _extra_body(fields: dict[str, str], *, is_chat: bool) -> str:
    """Join the parameters of sampling with those in --extra-body, which have priority."""
    own = fields.pop("extra-body", "{}")
    numbers: dict[str, Any] = {name.replace("-", "_"): _number(name, text) for name, text in fields.items()}
    if is_chat and "logprobs" in numbers:
        numbers |= {"logprobs": True, "top_logprobs": numbers["logprobs"]}
    try:
        joined = numbers | json.loads(own)
    except (ValueError, TypeError):
        return own  # the command reports the error in it
    return json.dumps(joined) if numbers else own


def _number(name: str, text: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise UsageError(f"--{name} is {text!r}, but it must be a number.", "Give a number.") from None


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
