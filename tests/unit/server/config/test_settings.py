"""Every option: one description, four sources in order, errors with cause and fix."""

from __future__ import annotations

import dataclasses

import pytest

from oarlock.server.config.option_checks import check_step_size
from oarlock.server.config.options import OptionError, format_size, parse_size
from oarlock.server.config.settings import OPTIONS, Settings, as_markdown, make_settings
from oarlock.server.config.sources import as_table, load_settings


def _file(tmp_path, text):
    path = tmp_path / "oarlock.toml"
    path.write_text(text)
    return str(path)


def test_flag_over_environment_over_file_over_default(tmp_path):
    path = _file(tmp_path, 'port = 1\nhost = "h1"\nblock-size = 8\n')
    loaded = load_settings({"port": 3}, {"OARLOCK_PORT": "2", "OARLOCK_HOST": "h2"}, path)
    settings = loaded.settings
    assert (settings.port, settings.host, settings.block_size, settings.seed) == (3, "h2", 8, 0)
    assert [loaded.origins[name] for name in ("port", "host", "block_size", "seed")] == [
        "flag",
        "environment",
        path,
        "default",
    ]


def test_an_empty_variable_counts_as_unset():
    loaded = load_settings({}, {"OARLOCK_MODEL": "", "OARLOCK_PORT": ""})
    assert loaded.settings == Settings()
    assert set(loaded.origins.values()) == {"default"}


def test_the_file_may_be_named_by_the_environment(tmp_path):
    path = _file(tmp_path, "port = 1")
    assert load_settings({}, {"OARLOCK_CONFIG": path}).settings.port == 1


def test_the_level_of_the_kernels_is_no_option_and_no_mistake():
    assert load_settings({}, {"OARLOCK_CPU_LEVEL": "avx2"}).settings == Settings()


@pytest.mark.parametrize(
    ("environment", "toml", "cause", "fix"),
    [
        ({"OARLOCK_PROT": "1"}, "", "OARLOCK_PROT", "OARLOCK_PORT"),
        ({}, "prot = 1", "prot", "port"),
        ({}, "[database]\nport = 1", "table [database]", "remove [database]"),
        ({"OARLOCK_PORT": "many"}, "", "--port is 'many'", "--port 8080"),
        ({"OARLOCK_PORT": "70000"}, "", "at most 65535", "--port"),
        ({"OARLOCK_MAX_MODEL_LEN": "99999999"}, "", "at most 16,777,216", "--max-model-len"),
        ({}, 'port = "8000"', "of type integer", "--port"),
        ({}, "port = true", "of type integer", "--port"),
        ({}, 'device = "gpu"', "did you mean cpu", "--device"),
        ({}, "kv_cache_memory = 'lots'", "of type size", "2GiB"),
        ({"OARLOCK_ENABLE_PREFIX_CACHING": "maybe"}, "", "of type boolean", "--no-enable-prefix-caching"),
        ({"OARLOCK_GPU_MEMORY_UTILIZATION": "nan"}, "", "finite", "0.8"),
        ({}, "port = ", "not valid TOML", "line"),
        ({}, "kv_offload_disk = '1GiB'", "--kv-offload-path does not name one", "--kv-offload-path"),
        ({}, "kv_offload_memory = '1GiB'\nenable_prefix_caching = false", "turns off", "Leave one"),
        ({}, "kv_offload_path = '/tmp/kv'\nrecord = 'file'", "--record cannot replay", "Leave one"),
        ({}, "kv_offload_path = ''", "not empty", "--kv-offload-path"),
        ({"OARLOCK_MAX_NUM_SEQS": "64", "OARLOCK_MAX_NUM_BATCHED_TOKENS": "32"}, "", "below --max-num-seqs", "64"),
    ],
)
def test_mistakes_have_a_cause_and_a_fix(tmp_path, environment, toml, cause, fix):
    with pytest.raises(OptionError) as caught:
        load_settings({}, environment, _file(tmp_path, toml))
    assert cause in caught.value.cause
    assert fix in caught.value.fix
    assert "\n" not in caught.value.cause + caught.value.fix


PATHS = [name for name, described in OPTIONS.items() if described.is_path]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("source", ["flag", "environment", "file", "python"])
def test_a_path_may_begin_with_a_tilde(tmp_path, monkeypatch, name, source):
    """Wherever it is given: no shell expands the values of a file or of a variable, nor `--flag=~/x`."""
    monkeypatch.setenv("HOME", "/h")
    needed = {"ssl_certfile": {"ssl_keyfile": "/k"}, "ssl_keyfile": {"ssl_certfile": "/c"}}
    others = (needed | {"lora_dir": {"enable_lora": True}}).get(name, {})

    def given(path):
        if source == "python":
            return getattr(make_settings({name: path, **others}), name)
        file = _file(tmp_path, f'{name} = "{path}"' if source == "file" else "")
        variables = {OPTIONS[name].env: path} if source == "environment" else {}
        flags = {name: OPTIONS[name].from_text(path)} if source == "flag" else {}
        return getattr(load_settings(flags | others, variables, file).settings, name)

    assert given("~/a/b") == "/h/a/b"
    assert given("./~x") == "./~x"
    with pytest.raises(OptionError, match="there is no user nosuchuser"):
        given("~nosuchuser/x")


def test_every_option_that_names_a_file_or_a_directory_is_a_path():
    words = ("_dir", "_path", "file", "template")
    named = {name for name, described in OPTIONS.items() if name.endswith(words) and described.kind is str}
    assert named - {"root_path"} <= set(PATHS)  # root_path is a path of HTTP


def test_the_file_of_options_may_be_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    _file(tmp_path, "port = 1")
    assert load_settings({}, {}, "~/oarlock.toml").settings.port == 1
    with pytest.raises(OptionError, match="there is no user nosuchuser"):
        load_settings({}, {}, "~nosuchuser/oarlock.toml")


def test_a_missing_file_is_named():
    with pytest.raises(OptionError, match=r"/nowhere\.toml cannot be read"):
        load_settings({}, {}, "/nowhere.toml")


def test_a_secret_is_never_shown(tmp_path):
    loaded = load_settings({}, {"OARLOCK_API_KEY": "hunter2,hunter3", "OARLOCK_ADMIN_API_KEY": "hunter4"})
    assert loaded.settings.api_key == ("hunter2", "hunter3")
    assert loaded.settings.admin_api_key == "hunter4"
    assert "hunter" not in str(as_table(loaded))
    assert ("admin_api_key", "(1 hidden)", "environment") in as_table(loaded)
    with pytest.raises(OptionError) as caught:
        load_settings({}, {}, _file(tmp_path, 'api_key = ["hunter2", 5]'))
    assert "hunter" not in caught.value.cause


def test_help_and_the_shown_settings_have_one_word_for_what_is_not_given():
    shown = {name: value for name, value, _ in as_table(load_settings({}, {}))}
    assert shown == {name: described.default_text for name, described in OPTIONS.items()}
    assert (shown["chat_template"], shown["request_timeout"], shown["max_model_len"]) == ("none", "none", "automatic")


def test_lists_and_sizes_from_every_source(tmp_path):
    path = _file(tmp_path, 'served_model_name = ["a", "b"]\nkv_cache_memory = "512MiB"\nmax_body_size = 4096\n')
    settings = load_settings({}, {"OARLOCK_KV_CACHE_MEMORY": "2GiB"}, path).settings
    assert settings.served_model_name == ("a", "b")
    assert (settings.kv_cache_memory, settings.max_body_size) == (2 * 2**30, 4096)


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2**31), ("1.5GB", 1_500_000_000), ("512 mib", 2**29), ("4096", 4096), ("2G", 2**31)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2XB", "-1", "1e3", "2 GiB please"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("1m", 10**6), ("8M", 2**23), ("4096", 4096), ("auto", -1),
     ("-1", -1), ("AUTO", -1)],
)  # fmt: skip
def test_lengths_are_written_as_vllm_writes_them(tmp_path, text, tokens):
    assert OPTIONS["max_model_len"].from_text(text) == tokens
    found = load_settings({}, {}, _file(tmp_path, f'max_model_len = "{text}"')).settings
    assert found.max_model_len == tokens
    worker = found.engine_config("/m").worker
    assert (worker.max_model_len, worker.fit_model_len) == ((None, True) if tokens == -1 else (tokens, False))


@pytest.mark.parametrize("text", ["16.5K", "1e3", "k", "16 k", "-2", "1", "none of it", "16kk", "16,000", "17000000"])
def test_invalid_lengths_are_refused(text):
    with pytest.raises(OptionError, match="--max-model-len is"):
        OPTIONS["max_model_len"].from_text(text)


def test_types_have_the_names_that_vllm_gives_them_too(tmp_path):
    assert load_settings({}, {}, _file(tmp_path, 'dtype = "half"')).settings.dtype == "float16"
    assert load_settings({}, {"OARLOCK_DTYPE": "float"}, None).settings.dtype == "float32"
    assert make_settings({"dtype": "half", "max_model_len": -1}).dtype == "float16"
    assert OPTIONS["max_num_batched_tokens"].from_text("8k") == 8000
    with pytest.raises(OptionError):
        OPTIONS["max_num_batched_tokens"].from_text("-1")


def test_sizes_are_printed_for_people():
    assert [format_size(n) for n in (512, 2**31, 1_600_000)] == ["512 B", "2.0 GiB", "1.5 MiB"]


def test_every_option_is_described_and_its_example_is_valid():
    for described in OPTIONS.values():
        assert described.help
        if described.kind is not bool:
            texts = described.example.split() if described.many else [described.example]
            parsed = described.from_texts(texts) if described.many else described.from_text(described.example)
            assert parsed != described.default
        if described.default is not None:
            described.check(described.default)


def test_every_option_reaches_the_engine_or_is_one_of_the_servers_own():
    """Nothing is accepted and ignored: a changed value changes the engine's configuration, or the server reads it."""
    for name, described in OPTIONS.items():
        base = Settings(enable_lora=name == "max_loras")
        if described.kind is bool:
            value = not described.default
        elif described.many:
            value = described.from_texts(described.example.split())
        else:
            value = described.from_text(described.example)
        changed = dataclasses.replace(base, **{name: value}).engine_config("/m")
        assert (changed != base.engine_config("/m")) == (name not in SERVER_OPTIONS), name


SERVER_OPTIONS = {
    "web_page",
    "body_memory",
    "response_store",
    "lora_modules",
    "lora_dir",
    "runner",
    "classifier_from_token",
    "batch_dir",
    "batch_dir_size",
    "access_log",
    "otlp_traces_endpoint",
    "tokenizer",
    "chat_template",
    "chat_template_content_format",
    "tool_call_parser",
    "reasoning_parser",
    "uds",
    "ssl_certfile",
    "ssl_keyfile",
    "root_path",
    "allowed_origins",
    "distributed_executor_backend",
    "node_rank",
    "master_addr",
    "master_port",
    "node_interface",
    "node_timeout",
    "revision",
    "download_dir",
    "offline",
    "model",
    "generation_config",
    "served_model_name",
    "host",
    "port",
    "allowed_hosts",
    "open_metrics",
    "api_key",
    "api_key_file",
    "admin_api_key",
    "strict_parameters",
    "strict_max_tokens",
    "always_stream_usage",
    "metrics_prefix",
    "ignore_model_case",
    "request_timeout",
    "max_body_size",
    "drain_timeout",
    "enable_log_requests",
}


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        ("[server]\nport = 1", "table [server]", "remove [server]"),
        ("port = 1\n[model]\nname = 'x'", "table [model]", "remove [model]"),
        ("[seed]\nx = 1", "table [seed]", "remove [seed]"),
        ("enable_reasoning = true", "enable_reasoning", "Leave it out"),
        ("api_key = []", "no key", "unset"),
        ("api_key = ['', 'k']", "no key", "unset"),
    ],
)
def test_an_unknown_key_of_a_file_is_explained(tmp_path, text, cause, fix):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(OptionError) as error:
        load_settings({}, {}, str(path))
    assert cause in error.value.cause and fix in error.value.fix


def test_the_documentation_table_has_every_option_whose_other_names_follow_from_its_flag():
    table = as_markdown()
    for described in OPTIONS.values():
        assert f"`{described.flag}`" in table
        assert described.name == described.flag.lower().removeprefix("--").replace("-", "_")
        assert described.env == f"OARLOCK_{described.name.upper()}"


@pytest.mark.parametrize("name", ["http://a.example", "a.example:8000", "a*.example", "*.*", "a b", "", "ex/ample"])
def test_an_allowed_host_is_a_name_and_nothing_more(name):
    with pytest.raises(OptionError, match="--allowed-hosts"):
        make_settings({"allowed_hosts": ("good.example", name)})


def test_allowed_hosts_come_from_everywhere(tmp_path):
    file = tmp_path / "o.toml"
    file.write_text('allowed_hosts = ["a.example", "*.b.example", "::1", "[::1]", "*"]')
    assert len(load_settings({}, {}, str(file)).settings.allowed_hosts) == 5
    environment = {"OARLOCK_ALLOWED_HOSTS": "a.example, *.b.example"}
    assert load_settings({}, environment).settings.allowed_hosts == ("a.example", "*.b.example")


def test_python_callers_get_the_same_checks():
    with pytest.raises(OptionError, match="tensor_paralel_size"):
        make_settings({"tensor_paralel_size": 2})
    with pytest.raises(OptionError, match="at least 1"):
        make_settings({"tensor_parallel_size": 0})


def test_a_step_has_a_token_for_each_running_sequence():
    check_step_size(4, max_num_seqs=4)
    with pytest.raises(OptionError, match="below --max-num-seqs"):
        check_step_size(3, max_num_seqs=4)
