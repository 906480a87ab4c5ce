"""The tables of results, from figures that are given: medians, ranges, ratios by round, shares of the ceilings."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks import charts, environments, machine, page, tables
from benchmarks.tables import Spread


def figures(decode, output, ttft, **more):
    times = {"p50": ttft}
    return {"decode_tokens_per_s": decode, "output_tokens_per_s": output, "ttft_ms": times, "tpot_ms": times, **more}


def ceilings(read, gemm):
    return {"other_cores": 0.0, "read_gb_s": read, "gemm_gflops": {"torch float32": gemm, "torch bfloat16": gemm / 2}}


@pytest.fixture
def result():
    """Three rounds of ours and one peer; one million parameters, half of them in the embedding."""
    rounds = []
    for ours, theirs in ((10.0, 5.0), (12.0, 4.0), (9.0, 6.0)):
        rounds.append(
            {
                "ceilings": [ceilings(0.02, 1.0), ceilings(0.04, 2.0)],
                "measures": {
                    "c=1": {
                        "oarlock": figures(ours, ours / 2, 100, duration_s=1.1, step_seconds=1.0),
                        "peer": figures(theirs, theirs / 2, 200),
                    },
                    "first token, 100": {"oarlock": figures(None, 1.0, 500), "peer": figures(None, 1.0, 1000)},
                },
            }
        )
    about = {"dtype": "bfloat16", "interface": "HTTP", "start_s": 2.0, "idle_cores": 0.0}
    return {
        "format": 1,
        "what": "peers",
        "measured": "2026-01-01",
        "command": "python -m benchmarks.peers",
        "machine": {"kind": "avx2", "processor": "P", "cores": 2, "memory_gib": 4, "torch": "2"},
        "model": {"shape": "0.5b", "dtype": "bfloat16", "parameters": 1_000_000, "inner_parameters": 500_000},
        "load": {"threads": 2, "input_tokens": 8, "output_tokens": 8},
        "systems": {"oarlock": {"title": "Oarlock", "version": "abc", **about}, "peer": {"title": "Peer", **about}},
        "rounds": rounds,
    }


def test_the_spread_of_a_figure():
    assert tables.spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert str(Spread(2.0, 1.5, 12.34)) == "2.00 (1.50 to 12.3)"
    assert str(Spread(2.0, 2.0, 2.0)) == "2.00"
    assert tables.spread([1.0, None]) is None and tables.spread([]) is None
    assert [tables.number(value) for value in (0.5, 9.999, 99.99, 1234.5)] == ["0.50", "10.0", "100", "1,234"]


def test_a_ratio_is_taken_round_by_round(result):
    assert tables.ratio(result, "c=1", "oarlock", "peer", tables.decode) == Spread(2.0, 1.5, 3.0)
    assert tables.ratio(result, "first token, 100", "oarlock", "peer", tables.first_token) == Spread(0.5, 0.5, 0.5)
    assert tables.ratio(result, "first token, 100", "oarlock", "peer", tables.decode) is None


def test_the_shares_of_the_ceilings(result):
    # 10 tokens/s x 2 MB = 0.02 GB/s, of the mean of 0.02 and 0.04
    share = tables.share_of_read(result, "oarlock")
    assert (share.median, share.low, share.high) == pytest.approx((20 / 30, 18 / 30, 24 / 30))
    # 2 x 0.5 million x 100 = 0.1 GFLOP in half a second, of 2 GFLOP/s
    assert tables.share_of_gemm(result, "oarlock", "first token, 100").median == pytest.approx(0.1)


def test_float32_reads_twice_as_much(result):
    half = tables.share_of_read(result, "oarlock")
    result["model"]["dtype"] = "float32"
    assert tables.share_of_read(result, "oarlock").median == pytest.approx(2 * half.median)


def test_every_table_of_a_comparison(result):
    text = tables.peers(result)
    assert "| c=1 decode | more | 2.00 (1.50 to 3.00) |" in text
    assert "| first token, 100 tokens of prompt | less | 0.50 |" in text
    assert "as a share: 0.10." in text
    assert "| Peer | - | bfloat16 | HTTP | 2.00 | 0.00 |" in text
    assert "streaming read of memory, GB/s | 0.03 (0.02 to 0.04)" in text


def test_two_checkouts_have_a_table_each(result):
    result["systems"]["oarlock@new"] = result["systems"]["oarlock"]
    for turn in result["rounds"]:
        for measured in turn["measures"].values():
            measured["oarlock@new"] = measured["oarlock"]
    text = tables.peers(result)
    assert "| Oarlock divided by | better | Peer | Oarlock new |" in text
    assert "| Oarlock new divided by | better | Oarlock | Peer |" in text


def test_the_tables_of_growth():
    def point(speed, wait):
        return figures(None, speed, wait)

    rounds = [
        {
            "points": {
                "batch 8": {"1": point(10.0, 50), "2": point(20.0, 40)},
                "length 1000": {"1": point(1.0, 500), "2": point(1.0, 250)},
            }
        }
    ]
    text = tables.scaling({"models": [{"shape": "1.5b", "dtype": "float32", "rounds": rounds}]})
    assert "| 8 | 50.0 | 10.0 | 2.00 |" in text
    assert "| 1,000 | 500 | 2,000 | 500 | 2.00 |" in text


def test_a_section_and_a_chart_per_kind_of_processor(result, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    assert page.sections("peers") == "Not measured yet." and page.pictures() == {}
    for kind in ("neon", "avx2"):
        result["machine"]["kind"] = kind
        (tmp_path / "one.json").write_text(json.dumps(result))
        assert page.take_in(tmp_path / "one.json") == f"peers-{kind}"
    text = page.sections("peers")
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        "### x86-64 with AVX2 and without AVX512",
        "### ARM without BF16",
    ]
    assert "](performance-peers-avx2.svg)" in text and "c=1 decode, tokens/s" not in text
    assert list(page.pictures()) == ["performance-peers-avx2.svg", "performance-peers-neon.svg"]


def test_other_shapes_and_forms_are_kept_together_with_ratios_to_each_peer(result, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    result["machine"]["kind"] = "avx2"
    for shape, quantization in (("granite-1b-a400m", "int4"), ("0.5b", "int4"), ("granite-1b-a400m", "none")):
        result["model"] |= {"shape": shape, "quantization": quantization}
        (tmp_path / "one.json").write_text(json.dumps(result))
        assert page.take_in(tmp_path / "one.json") == "forms-avx2"
    lines = page.forms().splitlines()
    assert "| Granite 3.1 1B-A400M | bfloat16 | Oarlock | 10.0 (9.00 to 12.0) | 5.00 (4.50 to 6.00) | 500 |" in lines
    ratios = (
        "| Granite 3.1 1B-A400M | bfloat16 | divided by Peer's | 2.00 (1.50 to 3.00) | 2.00 (1.50 to 3.00) | 0.50 |"
    )
    assert ratios in lines
    assert [line.split(" | ")[:2] for line in lines if "| Oarlock |" in line] == [
        ["| Granite 3.1 1B-A400M", "int4"],
        ["| Qwen2.5-0.5B", "int4"],
        ["| Granite 3.1 1B-A400M", "bfloat16"],
    ]


def test_a_chart_has_a_bar_for_each_system_and_every_figure_in_its_description(result):
    drawn = ElementTree.fromstring(charts.peers(result))
    name = "{http://www.w3.org/2000/svg}"
    bars = [one for one in drawn.iter(f"{name}rect") if one.get("class") in ("strong", "weak")]
    assert [one.get("class") for one in bars] == ["strong", "weak"] * 2
    assert float(bars[0].get("width")) == pytest.approx(2 * float(bars[1].get("width")), abs=0.1)
    (description,) = drawn.iter(f"{name}desc")
    assert "Oarlock 10.0 (9.00 to 12.0), Peer 5.00 (4.00 to 6.00)" in description.text
    assert "Oarlock 500, Peer 1,000" in description.text


def test_a_result_is_stored_without_what_no_page_shows():
    run = {
        "output_tokens_per_s": 1.23456,
        "requests": 3,
        "itl_ms": {"p50": 1.0},
        "ttft_ms": {"p50": 123456.0, "p90": 2.0},
    }
    assert page.shown([run, 7]) == [{"output_tokens_per_s": 1.235, "ttft_ms": {"p50": 123500.0}}, 7]
    long = {"a": [list(range(60)), {"b": "x" * page.LONGEST_LINE}], "c": [{"d": 1}]}
    assert json.loads(page.compact(long)) == long and '\n "c": [{"d": 1}]' in page.compact(long)


@pytest.mark.parametrize(
    ("features", "kind"),
    [
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl", "avx512"),
        ("avx2 avx512f avx512_bf16", "avx512-bf16"),
        ("avx512_bf16 amx_bf16 amx_tile", "amx"),
        ("asimd bf16", "neon-bf16"),
        ("asimd", "neon"),
        ("sse2", "other"),
    ],
)
def test_the_kind_of_a_processor(features, kind):
    assert machine.kind(frozenset(features.split())) == kind and kind in machine.TITLES


def test_an_installation_that_broke_off_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "PEERS", tmp_path)
    (tmp_path / "openvino").mkdir()
    assert not environments.installed("openvino")
    environments.write_stamp("openvino")
    assert environments.installed("openvino")
    (tmp_path / "openvino" / "made-from").write_text("older pins")
    assert not environments.installed("openvino")


def test_more_bytes_than_the_largest_cache_holds(tmp_path):
    assert machine.beyond_caches(tmp_path) == 192 << 20
    for level, size in enumerate(("48K", "2048K", "266240K")):
        (tmp_path / f"index{level}").mkdir()
        (tmp_path / f"index{level}" / "size").write_text(f"{size}\n")
    assert machine.beyond_caches(tmp_path) == 3 * 266_240 * 1024
