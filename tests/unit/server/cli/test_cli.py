"""The command line: quick help, one-line mistakes, documented exit codes."""

from __future__ import annotations

import argparse
import gc
import io
import re
import shlex
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from oarlock.server.cli.arguments import Parser, UsageError, parse
from oarlock.server.cli.main import COMMANDS, _parsers, main
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import OPTIONS
from oarlock.server.config.vllm_flags import FLAGS
from oarlock.server.schemas.strict_model import MAX_LOGPROBS

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("OARLOCK_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["serve", "--help"],
        ["--version"],
        ["config", "show"],
        ["models", "--supported"],
        # Mistakes that are found before anything is started.
        ["serve", "/nope"],
        ["serve", "nope-Q4_K_M.gguf"],
        ["serve", "nope:3b"],
        ["serve", "tests"],
        ["serve", "--tokenizer", "/nope"],
        ["serve", "--chat-template", "/nope"],
        ["serve", "--api-key-file", "/nope"],
        ["serve", "--ssl-certfile", "/nope", "--ssl-keyfile", "/nope"],
        ["serve", "--host", "256.0.0.1"],
        ["verify", "/nope"],
        ["plan", "/nope"],
        ["batch", "in.jsonl", "out.jsonl", "--model", "/nope"],
        ["bench", "latency", "/nope"],
    ],
    ids=" ".join,
)
def test_quick_commands_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom oarlock.server.cli.main import main\n"
        f"try:\n    code = main({arguments!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "assert code in (0, 2, 3, None)\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'pydantic', 'uvicorn', 'numpy', 'tokenizers', 'asyncio'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.endswith("heavy: []\n"), answer.stdout[-500:]


@pytest.mark.parametrize(
    ("arguments", "code", "cause", "fix"),
    [
        (["serv"], 2, "Unknown command: serv", "oarlock serve"),
        (["serve", "--max-model-length", "5"], 2, "--max-model-length", "--max-model-len"),
        (["serve", "--prot=5"], 2, "--prot", "--port"),
        (["serve", "--port", "99999"], 2, "at most 65535", "--port"),
        (["serve", "--port"], 2, "--port", "--help"),
        (["serve", "a", "b"], 2, "Unexpected argument: b", "only one MODEL"),
        (["migrate", "llama-server", "-m", "m.gguf"], 2, "Unknown flag or argument: -m", "Quote the whole line"),
        (
            ["models", "--supported", "--download-dir", "x"],
            2,
            "--download-dir has no effect on --supported",
            "of the two",
        ),
        (["models", "--supported", "--config", "x"], 2, "--config has no effect on --supported", "of the two"),
        (["models", "--suported"], 2, "--suported", "--supported"),
        (["models", "rm"], 2, "Unexpected argument: rm", "`oarlock models --help`"),
        (["serve", "--api-key", "secret", "Qwen/Qwen2.5-7B-Instruct"], 2, "MODEL is missing", "MODEL --api-key"),
        (["serve", "--api-key", str(ROOT)], 2, "MODEL is missing", "MODEL --api-key"),
        (["serve", "--api-key", "one", "--api-key", "two", str(ROOT)], 2, "took 2 value(s)", "MODEL --api-key"),
        (["serve", "--served-model-name", "a", "b", "--port", "1"], 2, "MODEL is missing", "MODEL --served-model-name"),
        (["serve", "--api-key", " "], 2, "--api-key", "key"),
        (["serve", "--admin-api-key", ""], 2, "--admin-api-key", "key"),
        (["serve", "m", "--quantization", "awq"], 2, "--quantization", "int8"),
        (["serve", "--swap_space"], 2, "--swap_space of vLLM needs a value", "preempted"),
        (["serve", "--tool-call-parser", "xlam"], 2, "--tool-call-parser is 'xlam'", "qwen3_coder"),
        (["serve", "--no-enable-chunked-prefill"], 2, "--no-enable-chunked-prefill", "always"),
        (["serve", "--enable-chunked-prefill=false"], 2, "--enable-chunked-prefill false", "always"),
        (["serve", "-dp", "0"], 2, "--data-parallel-size is 0, but it must be at least 1", "--data-parallel-size 2"),
        (["serve", "-dp", "many"], 2, "--data-parallel-size is 'many'", "--data-parallel-size 2"),
        (["serve", "--data-parallel-rank", "1"], 2, "--data-parallel-rank 1", "--data-parallel-size starts all"),
        (["serve", "-pp", "0"], 2, "at least 1", "--pipeline-parallel-size"),
        (["serve", "--model", "Qwen/Qwen3-0.6B"], 2, "--model", "oarlock serve MODEL"),
        (["serve", "--device", "gpu"], 2, "did you mean cpu", "--device"),
        (["serve", "--config", "/nowhere.toml"], 3, "/nowhere.toml", "--config"),
        (
            ["serve", "./no/such/dir/model"],
            3,
            "neither a directory, nor a GGUF file, nor a hub id",
            "no/such/dir does not exist",
        ),
        (["serve", str(ROOT / "models" / "oarlok-demo")], 3, "oarlok-demo is neither", "models/oarlock-demo?"),
        (["serve", str(ROOT / "models")], 3, "no config.json", "Did you mean"),
        (["serve", "model-Q4_K_M.gguf"], 3, "The GGUF file model-Q4_K_M.gguf", "`oarlock models`"),
        (["serve", "https://huggingface.co/Qwen/Qwen3-0.6B"], 3, "is an address", "Give the hub id: Qwen/Qwen3-0.6B"),
        (["serve", "--chat-template", "/nope.jinja"], 3, "--chat-template /nope.jinja cannot be read", "a file"),
        (["serve", "--ssl-certfile", "/nope", "--ssl-keyfile", "/nope"], 3, "--ssl-certfile /nope", "a file"),
        (["verify", "model-Q4_K_M.gguf"], 3, "The GGUF file", "`oarlock models`"),
        (["plan", "model-Q4_K_M.gguf"], 2, "The GGUF file", "`oarlock models`"),
        (["pull", "model-Q4_K_M.gguf"], 3, "The GGUF file", "`oarlock models`"),
        (["chat", "localhost:8000"], 2, "needs a scheme", "Write http://localhost:8000"),
        (["chat", "localhost"], 2, "needs a scheme", "Write http://localhost"),
        (["top", "127.0.0.1:8000/v1"], 2, "is not the address of a server", "Write http://127.0.0.1:8000"),
        (["snippets", "http://a:8000/v1/chat/completions"], 2, "address of a route", "Write http://a:8000"),
        (["explain", "http://127.0.0.1:8000"], 2, "REQUEST_ID comes first", "For example"),
        (["serve", str(ROOT / "pyproject.toml")], 3, "is a file", "directory"),
        (["serve", str(ROOT / "server")], 3, "no config.json", "Hugging Face layout"),
        (["serve", "--host", "256.0.0.1"], 3, "256.0.0.1", "127.0.0.1"),
        # Two keys, each with a flag of its own: the demo model would be served.
        (["serve", "--api-key", "a", "--api-key", "b", "--host", "256.0.0.1"], 3, "256.0.0.1", "127.0.0.1"),
    ],
)
def test_a_mistake_is_one_line_of_cause_and_one_of_fix(capsys, monkeypatch, arguments, code, cause, fix):
    arguments = [*arguments, "--port", "0"] if code == 3 and arguments[0] == "serve" else arguments
    monkeypatch.setattr("sys.stdin", io.StringIO("a question"))
    assert main(arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("error: ")
    assert cause in lines[0]
    assert lines[1].startswith("fix: ")
    assert fix in lines[1]
    assert gc.isenabled(), "whoever calls `main` in a process of their own keeps their garbage collector"


@pytest.mark.parametrize(
    ("name", "text"),
    [*(("OARLOCK_API_KEY", text) for text in (",", " , ", "", "  ")), ("OARLOCK_ADMIN_API_KEY", " ")],
)
def test_a_variable_that_holds_no_key_does_not_open_the_server(capsys, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    assert main(["serve", "--port", "0"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert name in lines[0] and "no key" in lines[0]
    assert lines[1].startswith("fix: ") and "unset" in lines[1]


def test_harmless_flags_of_vllm_are_accepted_with_a_note(capsys):
    flags = ["--enable-auto-tool-choice", "--enable-reasoning", "--swap-space=4", "--disable-log-stats"]
    flags += ["--enable_chunked_prefill", "true", "--pipeline-parallel-size", "1", "--tensor-parallel-size", "2"]
    assert main(["config", "show", *flags]) == 0
    printed = capsys.readouterr()
    assert "tensor_parallel_size" in printed.out
    notes = printed.err.splitlines()
    assert len(notes) == 5 and all(line.startswith("note: --") for line in notes)
    assert "--enable-reasoning: " in notes[1] and "template" in notes[1]


def test_the_value_of_a_vllm_flag_is_not_the_model(capsys):
    assert main(["serve", "--swap-space", "4", "./no/such/dir/model", "--port", "0"]) == 3
    assert "./no/such/dir/model" in capsys.readouterr().err


def test_no_option_is_also_a_flag_of_vllm():
    ours = {described.name.replace("_", "-") for described in OPTIONS.values()}
    assert ours.isdisjoint(FLAGS)
    assert FLAGS["max-logprobs"].harmless == (str(MAX_LOGPROBS),)
    assert all(flag.holds.endswith(".") and "\n" not in flag.holds for flag in FLAGS.values())


def test_a_port_in_use_is_named_with_the_process_that_uses_it(capsys):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert f"Port {port} on 127.0.0.1 is in use by process" in lines[0]
    assert "--port" in lines[1]


@pytest.mark.slow
def test_a_model_that_cannot_be_fetched_is_explained(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["serve", "nobody/has-this-model", "--port", "0"]) == 3
    error = capsys.readouterr().err
    assert "nobody/has-this-model is neither a directory on this machine nor in the cache" in error
    assert "Traceback" not in error


def test_config_show_names_the_source_of_each_value(capsys, monkeypatch):
    monkeypatch.setenv("OARLOCK_PORT", "9")
    assert main(["config", "show", "-tp", "2", "--api-key", "k1", "k2"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["port"] == ["9", "environment"]
    assert rows["tensor_parallel_size"] == ["2", "flag"]
    assert rows["api_key"] == ["(2", "hidden)", "flag"]


def test_a_repeated_flag_adds_to_a_list_and_replaces_a_single_value(capsys):
    words = ["--served-model-name", "a", "b", "--served-model-name", "c", "--api-key", "k1", "--api-key=k2"]
    assert main(["config", "show", "--port", "1", *words, "--port", "2"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["served_model_name"] == ["a,", "b,", "c", "flag"]
    assert rows["api_key"] == ["(2", "hidden)", "flag"]
    assert rows["port"] == ["2", "flag"]


def test_the_table_of_the_documentation(capsys):
    assert main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| flag |")


def test_no_command_says_what_to_type_first(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert re.findall("^  oarlock (\\w+)", shown, re.M) == ["serve", "chat", "serve", "doctor"]
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "usage"), [([], "usage: oarlock ["), (["bench", "compare"], "usage: oarlock bench compare")]
)
def test_help_is_a_command_too(capsys, words, usage):
    with pytest.raises(SystemExit):
        main(["help", *words])
    assert usage in capsys.readouterr().out


def every_command() -> dict[str, Parser]:
    parsers = _parsers()[1]
    return parsers | {f"bench {name}": child for name, child in parsers["bench"].children.items()}


@pytest.mark.slow
def test_every_help_begins_with_a_sentence_and_an_example_that_is_taken():
    parsers = every_command()
    assert len(parsers) == len(COMMANDS) + 4
    for name, parser in parsers.items():
        text = parser.format_help()
        found = re.match(r"([A-Z].*?\.)( .*?)?\n\n  (oarlock .*)\n\nusage: oarlock", text, re.S)
        assert found, text[:400]
        assert max(map(len, text.splitlines()[:3])) <= 100
        words = shlex.split(found[3].partition(" > ")[0])[1:]
        assert " ".join(words).startswith(name)
        parse(_parsers()[0], parsers[words[0]], words)


def test_an_example_that_is_not_taken_would_be_found():
    with pytest.raises(UsageError):
        parse(_parsers()[0], _parsers()[1]["top"], ["top", "--onec"])


def test_each_command_is_listed_parsed_and_run(monkeypatch, capsys):
    seen = []

    def run(arguments):
        seen.append(arguments.number)
        raise OptionError("It is wrong.", "Correct it.") if arguments.number == 7 else SystemExit(0)

    command = types.SimpleNamespace(
        HELP="count things",
        EXAMPLE="oarlock count --number 3",
        add_arguments=lambda parser: parser.add_argument("--number", type=int, required=True),
        run=run,
    )
    monkeypatch.setattr("oarlock.server.cli.main.COMMANDS", ("count",))
    monkeypatch.setattr("oarlock.server.cli.main._load", lambda name: command)
    assert main(["count", "--number", "7"]) == 2
    assert capsys.readouterr().err == "error: It is wrong.\nfix: Correct it.\n"
    assert main(["count", "--nummber", "7"]) == 2
    assert "--number" in capsys.readouterr().err
    assert main(["cuont"]) == 2
    assert "oarlock count" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "count things" in capsys.readouterr().out
    assert seen == [7]


def shown_help(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["serve", *words])
    assert not end.value.code
    return capsys.readouterr().out


def test_help_of_serve_is_a_line_for_each_option_by_groups(capsys):
    lines = shown_help(capsys, "--help").splitlines()
    assert lines[4] == "usage: oarlock serve [MODEL] [OPTIONS]"
    assert max(map(len, lines)) <= 120
    headings = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["options", *dict.fromkeys(option.group for option in OPTIONS.values()), "exit codes"]
    for option in OPTIONS.values():
        (line,) = [line for line in lines if line.startswith(f"  {option.flag} ")]
        assert option.help.startswith(line.removeprefix(f"  {option.flag} ").partition(" [default")[0].strip())


def test_help_has_the_default_and_the_range_of_each_option(capsys):
    lines = shown_help(capsys, "--help").splitlines()
    notes = {}
    for number, line in enumerate(lines):
        if line.startswith(("  --", "  MODEL")):
            both = line if "[default" in line else line + lines[number + 1]
            notes[line.split()[0]] = both.partition("[default: ")[2]
    for option in OPTIONS.values():
        note = notes[option.flag]
        assert note.endswith("]"), option.flag
        assert option.limits is None or " to " in note, note
    assert notes["--port"] == "8000; 0 to 65535]"
    assert notes["--max-body-size"] == "16 MiB; 1 KiB to 1 GiB]"
    assert notes["--dtype"] == "auto; auto, bfloat16, float16, float32]"
    assert notes["--check-weights"] == "on; --no-check-weights turns it off]"
    assert notes["--offline"] == "off]"
    assert notes["--revision"] == "main]"
    assert notes["--max-num-seqs"] == "64; 1 to 4096]"
    assert notes["MODEL"] == "the demo model]"
    assert notes["--tool-call-parser"] == "auto; --help=tool-call-parser lists the others]"
    assert "qwen3_coder, qwen3_xml" in " ".join(shown_help(capsys, "--help=tool-call-parser").split())


def test_help_names_the_kinds_of_models_wherever_one_is_taken():
    parsers = every_command()
    for name, parser in parsers.items():
        models = [action for action in parser._actions if "MODEL" in str(action.metavar) and not action.option_strings]
        for action in models:
            for kind in ("directory", "GGUF file", "hub id", "`oarlock models`"):
                assert kind in action.help, (name, action.help)
        assert models or name not in ("serve", "verify", "plan", "doctor", "chat", "pull", "bench latency")


def test_help_has_the_default_of_each_flag_that_has_one():
    for name, parser in every_command().items():
        for action in parser._actions:
            if action.default not in (None, False, "", argparse.SUPPRESS):
                assert "default" in (action.help or "") or action.choices, (name, action.option_strings)


def test_help_says_all_of_everything_of_a_group_of_an_option_or_of_a_word(capsys):
    whole, http = shown_help(capsys, "--help=all"), shown_help(capsys, "--help=http")
    assert all(option.flag in whole and option.env in whole for option in OPTIONS.values())
    assert all((option.env in http) == (option.group == "HTTP") for option in OPTIONS.values())
    (line, *_) = [line for line in shown_help(capsys, "--help=--max_num_seqs").splitlines() if line.startswith("  -")]
    assert line.startswith("  --max-num-seqs INTEGER")
    assert "OARLOCK_KV_CACHE_MEMORY" in shown_help(capsys, "--help=kv-cache")
    assert "--max-body-size SIZE" in shown_help(capsys, "--help=413")
    assert "--node-rank" in shown_help(capsys, "--port", "1", "--help=several-hosts")
    assert main(["serve", "--help=max-num-sekw"]) == 2
    assert "fix: Did you mean --help=max-num-seqs?" in capsys.readouterr().err
    assert main(["serve", "--help=qqqq"]) == 2
    assert "The groups are: options, Model, HTTP" in capsys.readouterr().err
