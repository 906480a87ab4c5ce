"""Traces of a simulation: every form that is read, the line that is wrong, and the sizes that are simulated."""

import json
from pathlib import Path
from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.fleet import FleetReport, Quantiles, TracedRequest
from oarlock.engine.simulated_ranks import StepLoad
from oarlock.server.bench.metrics import Result, Sample, write
from oarlock.server.cli.main import main
from oarlock.server.cli.plan.simulate import calibrated, parse_slo, read_trace, run_sizes

OURS = {"arrival_s": 2.5, "prompt_tokens": 300, "output_tokens": 7}


def written(folder: Path, *lines: Any) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def result(file: Path, samples: list[Sample], duration_s: float) -> Path:
    summary = {"completed": len(samples), "duration_s": duration_s}
    write(Result("serve", {}, summary, samples, {}, {}, False, "today"), file)
    return file


def test_every_form_is_read(tmp_path: Path) -> None:
    ours = written(
        tmp_path,
        OURS,
        "",
        OURS | {"arrival_s": 3, "prefix_id": 4, "prefix_tokens": 64},
        {"arrival_s": 4.0, "prompt_token_ids": [7, 8, 9], "output_tokens": 1},
    )
    assert read_trace(ours) == [
        TracedRequest(0.0, 300, 7),
        TracedRequest(0.5, 300, 7, (4,), 64),
        TracedRequest(1.5, 3, 1, (7, 8, 9), 1),
    ]
    mooncake = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [3, 9]}
    assert read_trace(written(tmp_path, mooncake, mooncake | {"timestamp": 1750})) == [
        TracedRequest(0.0, 600, 5, (3, 9), 512),
        TracedRequest(0.25, 600, 5, (3, 9), 512),
    ]
    bailian = mooncake | {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "type": "text", "turn": 1}
    assert read_trace(written(tmp_path, bailian, bailian | {"timestamp": 62.0}))[1] == TracedRequest(
        0.5, 600, 5, (3, 9), 16
    )


def test_a_result_of_bench_is_a_trace(tmp_path: Path) -> None:
    samples = [
        Sample(3.0, 8, scheduled_s=2.0, input_tokens=50, output_tokens=8, ttft_s=0.1, e2el_s=0.5),
        Sample(1.5, 8, scheduled_s=1.0, input_tokens=40, output_tokens=4, ttft_s=0.1, e2el_s=0.5),
        Sample(4.0, 8, input_tokens=40, failure="HTTP 429"),
    ]
    file = result(tmp_path / "r.json", samples, 5.0)
    assert read_trace(file) == [TracedRequest(0.0, 40, 4), TracedRequest(1.0, 50, 8)]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], "has no request"),
        ([OURS, "[1]"], ":2 is not a JSON object"),
        ([OURS, "{"], ":2 is not JSON"),
        ([OURS | {"arrival_s": "now"}], ":1: arrival_s is 'now'"),
        ([{"prompt_tokens": 5}], ":1 says neither arrival_s nor timestamp"),
        ([OURS | {"prompt_tokens": 0}], ":1: prompt_tokens is 0"),
        ([OURS | {"output_tokens": True}], ":1: output_tokens is True"),
        ([OURS | {"prefix_id": -1}], ":1: prefix_id is -1"),
        ([OURS | {"prefix_id": 1}], ":1: prefix_tokens is None"),
        ([{"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": "x"}], ":1: hash_ids is not a list"),
        ([OURS, OURS | {"arrival_s": 1}], ":2: the request came at 1 s, before the one above, at 2.5 s"),
    ],
)
def test_the_line_that_is_wrong_is_named(tmp_path: Path, lines: list[Any], cause: str) -> None:
    with pytest.raises(StartupError) as wrong:
        read_trace(written(tmp_path, *lines))
    assert cause in wrong.value.cause and wrong.value.exit_code == 2 and wrong.value.fix


def report(replicas: int, ttft_p99: float, refused: int = 0) -> FleetReport:
    quantiles = Quantiles(0.0, 0.0, ttft_p99)
    return FleetReport(replicas, 1, refused, 0, 1.0, 1.0, 1.0, quantiles, None, None, 0.5, 0.0, 0.0, 0)


def test_a_long_range_is_halved_and_a_short_one_is_not() -> None:
    asked: list[int] = []

    def of(size: int) -> FleetReport:
        asked.append(size)
        return report(size, 40 / size, refused=size < 11)

    limits = parse_slo("ttft_p99=2s")
    assert run_sizes(range(1, 65), True, limits, of) == 20
    assert set(asked) == {1, 2, 4, 8, 16, 32, 64, 24, 20, 18, 19}
    assert run_sizes([4, 24, 30], False, limits, of) == 24
    asked.clear()
    assert run_sizes([3, 5], False, [], of) is None and asked == [3, 5], "without limits all are simulated"
    assert run_sizes(range(1, 5), True, limits, of) is None
    assert run_sizes(range(11, 15), True, parse_slo("ttft_p99=100s"), of) == 11, "a refused request is no held limit"


class Slow:
    """Step time that grows in proportion to the users."""

    def seconds(self, load: StepLoad) -> float:
        return load.rows


def run_of(users: int, gap_s: float, ttft_s: float) -> list[Sample]:
    one = Sample(0.0, 3, input_tokens=100, output_tokens=3, ttft_s=ttft_s, e2el_s=1.0, itl_s=[gap_s] * 2)
    return [one] * users


def test_steps_are_calibrated_by_runs_of_bench(tmp_path: Path) -> None:
    few = result(tmp_path / "few.json", run_of(1, 0.020, 0.120), 1.0)
    many = result(tmp_path / "many.json", run_of(5, 0.028, 0.5), 1.0)
    both = calibrated([many, few], Slow())
    assert (both.step_s, both.row_s, both.token_s) == pytest.approx((0.018, 0.002, 0.00102))
    alone = calibrated([few], Slow())
    assert (alone.step_s, alone.row_s) == pytest.approx((0.0, 0.020)), "the estimate says what a user adds"
    with pytest.raises(StartupError, match=r"--calibrate: .* cannot be read"):
        calibrated([tmp_path / "none.json"], Slow())
    with pytest.raises(StartupError, match="what a prompt takes cannot be told"):
        calibrated([result(tmp_path / "flat.json", run_of(1, 0.02, 0.01), 1.0)], Slow())


@pytest.mark.slow
def test_the_command_prints_the_fewest_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [OURS | {"arrival_s": 0.02 * number} for number in range(60)]
    file = written(tmp_path, *lines)
    words = ["plan", "--cpu", "--memory", "8GB", "--bandwidth", "20GB", "--tflops", "0.1", "--simulate", str(file)]
    assert main([*words, "--replicas", "1..4", "--slo", "e2e_p99=60s"]) == 0
    text = capsys.readouterr().out
    assert "The fewest replicas that hold e2e_p99 within 60 s: 1." in text and "prefix hits" in text
    assert main([*words, "--replicas", "1,2", "--slo", "ttft_p50=1ms", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["simulation"]
    assert found["fewest_replicas"] is None and [one["replicas"] for one in found["fleets"]] == [1, 2]
    assert found["fleets"][0]["finished"] == 60 and found["fleets"][0]["ttft_s"]["p99"] > 0
