"""Fetching a model: which files are requested and in which order, what is kept, and the errors."""

import fcntl
import json
import threading

import pytest
from huggingface_hub import constants

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.server.hub import files as hub_files
from oarlock.server.hub.fetch import fetch
from oarlock.server.hub.model_path import HubModel
from oarlock.server.hub.transfer import TransferRate, in_words
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.workers.config import WorkerConfig
from tests.house.rules import ROOT
from tests.unit.server.hub.fake_hub import COMMIT, FakeHub, etag

DEMO = ROOT / "models" / "oarlock-demo"
NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SMALL = {name: (DEMO / name).read_bytes() for name in NAMES}
WEIGHTS = bytes(range(256)) * 1000  # nothing here reads them
BLOB = etag(WEIGHTS, is_large=True)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with FakeHub({**SMALL, "model.safetensors": WEIGHTS}) as found:
        _point_to(monkeypatch, found.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_files, "_RETRY_S", 0.01)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield found


def _point_to(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def model(
    hub,
    *,
    revision="main",
    download_dir=None,
    offline=False,
    tokenizer_only=False,
    adapter_only=False,
    check_digests=False,
    **worker,
):
    engine = EngineConfig(WorkerConfig("", **worker))
    options = {"tokenizer_only": tokenizer_only, "adapter_only": adapter_only, "check_digests": check_digests}
    return HubModel(hub.model, revision, download_dir, offline, engine, **options)


def run(hub, **asked):
    """The directory, as a path, of a model fetched without watching."""
    return hub_files.Path(fetch(model(hub, **asked), lambda phase, fraction, detail: None, check_tokenizer))


def check_tokenizer(directory):
    Tokenizer.load(directory).close()


def refused(hub, **asked):
    with pytest.raises(StartupError) as error:
        run(hub, **asked)
    return error.value


def partial(hub, tmp_path, content):
    path = tmp_path / "cache" / "models--owner--model" / "blobs" / f"{BLOB}.incomplete"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_files_are_kept_in_the_cache_layout_of_huggingface_hub(hub, tmp_path):
    directory = run(hub)
    assert directory == tmp_path / "cache" / "models--owner--model" / "snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == hub.files
    from huggingface_hub import snapshot_download

    assert snapshot_download(hub.model, cache_dir=tmp_path / "cache", local_files_only=True) == str(directory)
    asked = len(hub.asked)
    assert run(hub) == directory
    assert len(hub.asked) == asked  # nothing is fetched twice


@pytest.mark.parametrize(
    ("change", "worker", "cause"),
    [
        ({"architectures": ["MambaForCausalLM"]}, {}, "MambaForCausalLM"),
        ({"quantization_config": {"quant_method": "aqlm"}}, {}, "aqlm"),
        ({}, {"tensor_parallel_size": 3}, "tensor_parallel_size 3"),
        ({}, {"max_model_len": 10**6}, "max_model_len"),
        ({}, {"kv_cache_bytes": 2**16}, "Not enough KV memory for one sequence"),
        ({"torch_dtype": None, "dtype": None}, {"kv_cache_bytes": 2**16}, "Not enough KV memory for one sequence"),
    ],
)
def test_a_model_refused_for_its_config_json_costs_no_other_file(hub, change, worker, cause):
    hub.files["config.json"] = json.dumps(json.loads(SMALL["config.json"]) | change).encode()
    assert cause in refused(hub, **worker).cause
    assert hub.names_asked == {"config.json"}


@pytest.mark.parametrize("is_trusted", [False, True])
def test_code_of_a_checkpoint_is_fetched_only_if_it_is_trusted(hub, is_trusted):
    hub.files |= {"modeling_own.py": b"raise SystemExit", "tools/own.py": b"raise SystemExit"}
    directory = run(hub, trust_remote_code=is_trusted)
    assert [path.name for path in directory.glob("**/*.py")] == ["modeling_own.py"] * is_trusted


def test_an_old_quantised_model_costs_no_other_file_than_those_that_show_it(hub):
    hub.files["quantize_config.json"] = b'{"bits": 3}'
    assert "quantize_config.json.bits = 3" in refused(hub).cause
    assert hub.names_asked == {"config.json", "quantize_config.json"}


def test_a_tokenizer_that_cannot_be_read_costs_no_weights(hub):
    hub.files["tokenizer.json"] = b"{}"
    assert "tokenizer" in refused(hub).cause
    assert "model.safetensors" not in hub.names_asked


def test_a_tokenizer_alone_costs_no_weights_and_need_be_of_no_model(hub):
    del hub.files["config.json"]
    directory = run(hub, tokenizer_only=True)
    assert hub.names_asked == hub.files.keys() - {"model.safetensors"}
    assert run(hub, tokenizer_only=True, offline=True) == directory
    assert "only partly in the cache" in refused(hub, offline=True).cause
    hub.files["tokenizer.json"] = b"{}"
    other = str(directory.parents[2] / "other cache")
    assert "tokenizer.json cannot be read" in refused(hub, tokenizer_only=True, download_dir=other).cause


def test_an_adapter_is_its_settings_and_its_weights(hub):
    settings = (ROOT / "models" / "oarlock-demo-lora" / "adapter_config.json").read_bytes()
    assert "has no adapter_config.json" in refused(hub, adapter_only=True).cause
    hub.files |= {"adapter_config.json": settings, "adapter_model.safetensors": WEIGHTS, "adapter_model.bin": b"x"}
    assert "rank 8, above --max-lora-rank 4" in refused(hub, adapter_only=True, max_lora_rank=4).cause
    assert hub.names_asked == {"adapter_config.json"}  # no byte of the weights
    directory = run(hub, adapter_only=True)
    assert hub.names_asked == {"adapter_config.json", "adapter_model.safetensors"}
    assert (directory / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert run(hub, adapter_only=True, offline=True) == directory
    (directory / "adapter_model.safetensors").unlink()
    assert "only partly in the cache" in refused(hub, adapter_only=True, offline=True).cause


def test_one_of_several_copies_of_the_weights_is_fetched(hub):
    others = [
        "consolidated.safetensors",
        "pytorch_model.bin",
        "model.gguf",
        "model.fp16.safetensors",
        "flax_model.msgpack",
    ]
    others += ["original/model.safetensors", "onnx/model.onnx", "modeling_x.py", "pytorch_model.bin.index.json"]
    hub.files |= dict.fromkeys(others, b"other")
    shards = {"model-1.safetensors": WEIGHTS, "model-2.safetensors": WEIGHTS[::-1]}
    run(hub)
    assert hub.names_asked.isdisjoint(others)
    hub.asked.clear()
    del hub.files["model.safetensors"]
    index = {"weight_map": {f"tensor.{name}": name for name in shards}}
    hub.files |= shards | {"model.safetensors.index.json": json.dumps(index).encode()}
    hub.revisions["sharded"] = COMMIT
    directory = run(hub, revision="sharded")
    assert (directory / "model-2.safetensors").read_bytes() == shards["model-2.safetensors"]
    assert hub.names_asked.isdisjoint(others)


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"pytorch_model.bin": b"x"}, "pickled"),
        ({"model-q4.gguf": b"x"}, "GGUF"),
        ({}, "holds no weights"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'},
            "lacks model-1.safetensors",
        ),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'}, "../x.safetensors"),
    ],
)
def test_a_model_without_its_safetensors_is_refused_by_name(hub, files, cause):
    del hub.files["model.safetensors"]
    hub.files |= files
    assert cause in refused(hub).cause


def test_dummy_weights_need_none(hub):
    assert (run(hub, load_format="dummy") / "config.json").is_file()
    assert "model.safetensors" not in hub.names_asked


def test_an_interrupted_file_is_resumed(hub, tmp_path):
    partial(hub, tmp_path, WEIGHTS[:100_000])
    directory = run(hub)
    assert [begin for name, begin in hub.asked if name == "model.safetensors"] == [100_000]
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


def test_a_broken_connection_is_resumed(hub):
    hub.break_off_after = 50_000
    assert (run(hub) / "tokenizer.json").read_bytes() == SMALL["tokenizer.json"]
    begins = [begin for name, begin in hub.asked if name == "tokenizer.json"]
    assert len(begins) == 2 and 0 < begins[1] <= 50_000


def test_a_server_without_ranges_sends_the_whole_again(hub, tmp_path):
    partial(hub, tmp_path, WEIGHTS[:100_000])
    hub.knows_ranges = False
    assert (run(hub) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_damaged_rest_is_noticed_and_removed(hub, tmp_path):
    path = partial(hub, tmp_path, b"\0" * 100_000)
    error = refused(hub)
    assert "model.safetensors" in error.cause and "damaged" in error.cause
    assert path.stat().st_size == 0
    assert (run(hub) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_two_servers_fetch_a_file_once(hub, tmp_path):
    path = partial(hub, tmp_path, b"")
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        found, details, waits = [], [], threading.Event()

        def report(phase, fraction, detail):
            details.append(detail)
            if "another process is fetching 1 of the files" in detail:
                waits.set()

        second = threading.Thread(
            target=lambda: found.append(hub_files.Path(fetch(model(hub), report, check_tokenizer)))
        )
        second.start()
        assert waits.wait(60), details
        assert second.is_alive() and "model.safetensors" not in hub.names_asked
        other.write(WEIGHTS)
        path.rename(path.with_suffix(""))
    second.join(60)
    assert (found[0] / "model.safetensors").read_bytes() == WEIGHTS
    assert "model.safetensors" not in hub.names_asked


def test_the_disk_is_checked_first(hub, tmp_path, monkeypatch):
    partial(hub, tmp_path, WEIGHTS[:106_000])
    usage = hub_files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(hub_files.shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    error = refused(hub)
    assert "model.safetensors" not in hub.names_asked
    assert "250.0 KiB in 1 file(s), minus 103.5 KiB that is already here, needs 146.5 KiB" in error.cause
    assert "48.8 KiB free" in error.cause
    assert "97.7 KiB" in error.fix and "--download-dir" in error.fix


def test_a_disk_that_fills_up_meanwhile(hub, tmp_path):
    path = tmp_path / "cache" / "models--owner--model" / "blobs" / f"{BLOB}.incomplete"
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    error = refused(hub)
    assert "is full" in error.cause and "--download-dir" in error.fix


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "file").write_text("")
    error = refused(hub, download_dir=str(tmp_path / "file"))
    assert "cannot be stored" in error.cause and "--download-dir" in error.fix


def test_the_download_dir_takes_the_place_of_the_cache(hub, tmp_path):
    assert tmp_path / "mine" in run(hub, download_dir=str(tmp_path / "mine")).parents
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("by_variable", [True, False])
def test_offline_serves_the_cache_without_requests(hub, monkeypatch, by_variable):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by_variable)
    error = refused(hub, offline=not by_variable)
    assert "in the cache" in error.cause and "--offline" in error.fix
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    directory = run(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by_variable)
    hub.refuse = (500, {})
    assert run(hub, offline=not by_variable) == directory
    assert run(hub, offline=not by_variable, revision=COMMIT) == directory
    (directory / "model.safetensors").unlink()
    error = refused(hub, offline=not by_variable)
    assert "only partly in the cache" in error.cause and "owner/model holds no weights" in error.cause


def test_a_revision_is_fetched_and_remembered(hub):
    hub.revisions["v1.0"] = COMMIT
    directory = run(hub, revision="v1.0")
    assert run(hub, revision="v1.0", offline=True) == directory
    assert "'main'" in refused(hub, offline=True).cause
    error = refused(hub, revision="v2.0")
    assert "no revision 'v2.0'" in error.cause and "--revision" in error.fix


@pytest.mark.parametrize(
    ("status", "headers", "cause", "fix"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "is gated", "HF_TOKEN"),
        (401, {"X-Error-Code": "GatedRepo"}, "is gated", "HF_TOKEN"),
        (401, {}, "neither a directory on this machine nor a model on the hub", "HF_TOKEN"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "(401)", "HF_TOKEN"),
        (404, {"X-Error-Code": "RepoNotFound"}, "nor a model on the hub", "spelling"),
        (403, {}, "(403)", "HF_TOKEN"),
        (403, {"X-Error-Message": "Access to this resource is disabled."}, "disabled", "another"),
        (429, {}, "429", "Wait"),
        (503, {}, "503", "later"),
    ],
)
def test_each_refusal_is_a_cause_and_a_fix(hub, status, headers, cause, fix):
    hub.refuse = (status, headers)
    error = refused(hub)
    assert cause in error.cause and hub.model in error.cause and fix in error.fix
    assert "\n" not in error.cause + error.fix


def test_a_gated_file_of_a_public_page(hub):
    hub.refuse_files = (403, {"X-Error-Code": "GatedRepo"})
    assert "is gated" in refused(hub).cause


def test_a_hub_that_cannot_be_reached(hub, monkeypatch):
    _point_to(monkeypatch, "http://127.0.0.1:9")
    error = refused(hub)
    assert "http://127.0.0.1:9" in error.cause and "cannot be reached" in error.cause and "network" in error.fix


def test_a_proxy_on_the_way_is_named_without_its_password(hub, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    _point_to(monkeypatch, "http://hub.example")
    monkeypatch.setattr("huggingface_hub.utils._http._GLOBAL_CLIENT", None)
    error = refused(hub)
    assert "through the proxy 127.0.0.1:9" in error.cause and "secret" not in error.cause
    assert "HTTP_PROXY" in error.fix


def test_hub_downloads_must_match_their_digest(hub, monkeypatch):
    described = hub.description()
    hub.files["tokenizer_config.json"] = SMALL["tokenizer_config.json"].replace(b"{", b"[", 1)
    monkeypatch.setattr(hub, "description", lambda: described)
    assert "tokenizer_config.json of owner/model is damaged" in refused(hub).cause
    hub.files["tokenizer_config.json"] = SMALL["tokenizer_config.json"]
    hub.files["model.safetensors"] = WEIGHTS[::-1]
    assert "model.safetensors of owner/model is damaged" in refused(hub).cause
    hub.files["model.safetensors"] = WEIGHTS
    assert (run(hub) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.slow
def test_files_damaged_on_disk_are_found_and_downloaded_again(hub):
    directory = run(hub, check_digests=True)
    hub.asked.clear()
    reports = []
    fetch(model(hub, check_digests=True), lambda *report: reports.append(report), check_tokenizer)
    assert not hub.asked, "what is whole is not fetched again"
    assert ("checking digests", 1.0) in [report[:2] for report in reports]
    for name in ("model.safetensors", "config.json"):
        (directory / name).write_bytes(hub.files[name] + b" ")
    assert run(hub) == directory, "a start does not read everything twice"
    assert "config.json of owner/model is damaged" in refused(hub, check_digests=True, offline=True).cause
    run(hub, check_digests=True)
    assert hub.names_asked == {"model.safetensors", "config.json"}
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == hub.files
    assert run(hub, check_digests=True, offline=True) == directory
    hub.refuse = (503, {})
    assert "responds 503" in refused(hub, check_digests=True).cause, "to pull means to ask the hub"


def test_an_outage_of_the_hub_does_not_stop_a_complete_cache(hub, capsys):
    directory = run(hub)
    hub.refuse = (503, {})
    assert run(hub) == directory
    assert "warning: " in capsys.readouterr().err
    (directory / "model.safetensors").unlink()
    assert "responds 503" in refused(hub).cause
    hub.refuse = (404, {"X-Error-Code": "RepoNotFound"})
    assert "nor a model on the hub" in refused(hub).cause


def test_progress_has_bytes_speed_and_time_left():
    now = [0.0]
    rate = TransferRate(1000 * 2**20, lambda: now[0])
    rate.add(200 * 2**20, is_new=False)  # of an earlier attempt
    assert rate.describe() == "200.0 MiB of 1000.0 MiB"
    for _ in range(20):
        now[0] += 1
        rate.add(8 * 2**20)
        words = rate.describe()
    assert words == "360.0 MiB of 1000.0 MiB, 8.0 MiB/s, 1 min 20 s left"
    assert rate.fraction == 0.36
    for _ in range(20):
        now[0] += 1
        words = rate.describe()
    assert words == "360.0 MiB of 1000.0 MiB, 0 B/s"
    assert [in_words(seconds) for seconds in (7.6, 65, 3900)] == ["8 s", "1 min 05 s", "1 h 05 min"]


def test_folders_of_modules_are_fetched_and_no_other_ones(hub):
    hub.files |= {
        "modules.json": b"[]",
        "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}',
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "additional_chat_templates/tool_use.py": b"print()",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": WEIGHTS[::-1],
        "2_Dense/pytorch_model.bin": b"a pickle",
        "onnx/config.json": b"{}",
        "onnx/model.safetensors": b"the same once more",
    }
    directory = run(hub)
    assert (directory / "1_Pooling" / "config.json").read_bytes() == hub.files["1_Pooling/config.json"]
    assert (directory / "2_Dense" / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    fetched = {name for name in hub.files if (directory / name).exists()}
    left = {"2_Dense/pytorch_model.bin", "onnx/config.json", "onnx/model.safetensors"}
    assert hub.files.keys() - fetched == left | {"additional_chat_templates/tool_use.py"}
    assert run(hub, offline=True) == directory


def test_a_multimodal_model_comes_with_the_template_of_its_processor(hub):
    """Its config.json is accepted before the rest is fetched, as the text part is checked."""
    text = json.loads(hub.files["config.json"])
    wrapper = {"architectures": ["LlavaOnevisionForConditionalGeneration"], "text_config": text}
    hub.files |= {
        "config.json": json.dumps(wrapper).encode(),
        "chat_template.json": b'{"chat_template": "{{ messages }}"}',
        "processor_config.json": b"{}",
    }
    directory = run(hub)
    assert (directory / "chat_template.json").read_bytes() == hub.files["chat_template.json"]
    assert (directory / "processor_config.json").exists() and (directory / "model.safetensors").exists()


def test_a_multimodal_model_that_is_no_text_model_is_refused_before_its_weights(hub):
    hub.files["config.json"] = json.dumps({"architectures": ["PaliGemmaForConditionalGeneration"]}).encode()
    with pytest.raises(StartupError, match="its prompt is attended to in both directions"):
        run(hub)
