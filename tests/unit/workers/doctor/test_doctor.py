"""Each check of `oarlock doctor` names a fault and its fix, where there is one."""

import json
import os
import resource
import shutil
import socket
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from oarlock.base.host_memory import human_bytes
from oarlock.workers.attention import triton_latent
from oarlock.workers.config import NodesConfig, WorkerConfig
from oarlock.workers.distributed.all_reduce import SharedMemoryGroup
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.doctor import __main__ as doctor
from oarlock.workers.doctor import cuda, machine, model
from oarlock.workers.doctor.finding import ERROR, NOTE, OK, WARNING, Finding, as_json, as_text, is_fine
from oarlock.workers.kernels.cpu import build
from oarlock.workers.kernels.cpu.build import KernelsUnavailable
from oarlock.workers.platform.processor import Core, Processor
from oarlock.workers.transformers_backend.class_description import ClassDescription, ClassTensor
from tests.e2e.running import DEMO
from tests.golden.tiny_models import tiny_config

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_keeps_a_server_from_starting(taken_port):
    found = machine.port("127.0.0.1", taken_port)
    assert found.state == ERROR and "in use" in found.text and f"--port {taken_port + 1}" in found.fix
    assert machine.port("127.0.0.1", 0).state == OK
    assert machine.port("no.such.host.invalid", 8000).state == ERROR


def test_cores_that_a_quota_does_not_pay_for(monkeypatch):
    cores = [Core((0,), False), Core((1,), False, 1), Core((2,), True)]
    monkeypatch.setattr(machine, "physical_cores", lambda cpus: cores)
    monkeypatch.setattr(machine, "within_quota", lambda count: count)
    found = machine.cores()
    assert found.state == OK and found.facts["cores"] == 2
    assert "CPUs 0-1" in found.text and "1 efficiency cores" in found.text and "2 NUMA nodes" in found.text
    monkeypatch.setattr(machine, "within_quota", lambda count: 1)
    found = machine.cores()
    assert found.state == WARNING and "a CPU quota allows 1 of 2 cores" in found.text


def test_memory_that_is_swapped_out(monkeypatch):
    assert machine.memory().state == OK
    monkeypatch.setattr(machine.psutil, "swap_memory", lambda: Usage(8 << 30, 4 << 30, 4 << 30))
    assert machine.memory().state == WARNING


def test_huge_pages_that_are_switched_off(monkeypatch):
    monkeypatch.setattr(machine, "why_no_huge_pages", lambda: "the setting is set to never")
    found = machine.huge_pages()
    assert found.state == WARNING and "the setting is set to never" in found.text and "madvise" in found.fix


@pytest.mark.parametrize(
    ("size", "ranks", "device", "state"),
    [(64 << 20, 2, "cuda", WARNING), (64 << 20, 1, "cuda", OK), (64 << 20, 2, "cpu", OK), (4 << 30, 2, "cuda", OK)],
)
def test_shared_memory_matters_to_several_gpus(size, ranks, device, state, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(size, 0, size))
    assert machine.shared_memory(tmp_path, ranks=ranks, device=device).state == state


def test_limits_of_this_user(monkeypatch):
    limits = {resource.RLIMIT_MEMLOCK: (1 << 20, 1 << 20), resource.RLIMIT_NOFILE: (256, 8192)}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    assert machine.locked_memory(device="cpu").state == OK
    assert machine.locked_memory(device="cuda").state == WARNING
    found = machine.open_files()
    assert found.state == WARNING and found.fix == "ulimit -n 8192"


def test_a_cache_that_is_full_or_cannot_be_written(monkeypatch, tmp_path):
    assert machine.disk("cache", tmp_path / "not" / "there").state == OK
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1 << 40, 1 << 40, 1 << 20))
    assert machine.disk("cache", tmp_path).state == WARNING
    monkeypatch.setattr(os, "access", lambda *asked: False)
    assert "cannot be written" in machine.disk("cache", tmp_path).text


def test_a_level_that_is_named_though_there_is_a_better_one(monkeypatch):
    available = build.available()
    if len(available) < 2:
        pytest.skip("this processor has a single level")
    assert machine.level().facts["level"] == available[0].name
    monkeypatch.setenv(build.ENVIRONMENT, available[1].name)
    found = machine.level()
    assert found.state == WARNING and available[0].name in found.text
    monkeypatch.setenv(build.ENVIRONMENT, "nonsense")
    assert machine.level().state == ERROR


def test_a_processor_without_levels_or_16_bit_types(monkeypatch):
    monkeypatch.setattr(machine.build, "chosen", lambda: None)
    assert machine.level().state == WARNING and machine.compiler().state == NOTE
    monkeypatch.setattr(machine.processor, "here", lambda: Processor(False, False, "no AVX512-BF16 or AMX"))
    found = machine.number_types()
    assert found.state == NOTE and "widened" in found.text


def test_kernels_without_a_compiler(monkeypatch):
    if build.chosen() is None:
        pytest.skip("there are no kernels for this processor")
    monkeypatch.setattr(machine.build, "why_not_obtainable", lambda level: "there is no C++ compiler")
    found = machine.compiler()
    assert found.state == WARNING and "g++" in found.fix

    def refused():
        raise KernelsUnavailable("the cache cannot be written")

    monkeypatch.setattr(machine.build, "cache_directory", refused)
    assert machine.cache() is None


@pytest.mark.parametrize(
    ("driver", "built", "asked", "state"),
    [
        (None, None, "auto", NOTE),
        (None, "12.8", "cuda", ERROR),
        ("12.8", None, "auto", WARNING),
        ("12.8", None, "cuda", ERROR),
        ("12.8", None, "cpu", NOTE),
        ("11.4", "12.8", "auto", WARNING),
        ("11.4", "12.8", "cuda", ERROR),
    ],
)
def test_cuda_that_is_not_there_or_does_not_fit(driver, built, asked, state, monkeypatch):
    monkeypatch.setattr(cuda, "driver_version", lambda: driver)
    monkeypatch.setattr(cuda.torch.version, "cuda", built)
    monkeypatch.setattr(cuda.torch.cuda, "is_available", lambda: False)
    (found,) = cuda.findings(asked, 1)
    assert found.state == state
    if driver == "11.4":
        assert "CUDA 11.4" in found.text and "525.60.13" in found.fix


def test_torch_for_rocm_is_said_to_be_untried(monkeypatch):
    properties = namedtuple("Properties", "name major minor")("AMD Instinct MI300X", 9, 4)
    monkeypatch.setattr(cuda.torch.version, "hip", "7.2")
    fake = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda index: properties,
        "mem_get_info": lambda index: (190 << 30, 192 << 30),
    }
    for name, value in fake.items():
        monkeypatch.setattr(cuda.torch.cuda, name, value)
    first, device, _ = cuda.findings("auto", 1)
    assert first.state == WARNING and "nothing has been tried" in first.text and device.state == OK


def test_devices_of_two_ranks(monkeypatch):
    properties = namedtuple("Properties", "name major minor")
    of = {0: properties("NVIDIA H200", 9, 0), 1: properties("Tesla T4", 7, 5)}
    monkeypatch.setattr(cuda, "driver_version", lambda: "12.8")
    monkeypatch.setattr(cuda.torch.version, "cuda", "12.8")
    fake = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": of.__getitem__,
        "mem_get_info": lambda index: ((130, 10)[index] << 30, (139, 16)[index] << 30),
        "can_device_access_peer": lambda a, b: False,
    }
    for name, value in fake.items():
        monkeypatch.setattr(cuda.torch.cuda, name, value)
    monkeypatch.setattr(cuda, "nccl_version", lambda: "2.27.3")
    found = {finding.check: finding for finding in cuda.findings("auto", 2)}
    assert found["device 0"].state == OK and "130.0 GiB free of 139.0 GiB" in found["device 0"].text
    assert found["device 1"].state == WARNING and "7.5" in found["device 1"].text
    assert found["NCCL"].state == WARNING and "0-1" in found["NCCL"].text and "NCCL_P2P_DISABLE" in found["NCCL"].fix
    assert {finding.check: finding.state for finding in cuda.findings("cuda", 4)}["devices"] == ERROR
    monkeypatch.setattr(cuda, "nccl_version", lambda: None)
    assert {finding.check: finding.state for finding in cuda.findings("cuda", 2)}["NCCL"] == ERROR


def test_a_model_that_cannot_be_served_is_said_as_serve_says_it(tmp_path):
    (found,) = model.findings(WorkerConfig(str(DEMO), tensor_parallel_size=7))
    assert found.state == ERROR and found.fix
    good = {finding.check: finding for finding in model.findings(WorkerConfig(str(DEMO), device="cpu"))}
    assert all(finding.state in (OK, NOTE) for finding in good.values())
    assert good["attention"].facts["backend"] in ("cpp", "torch", "reference")
    named = {
        finding.check: finding
        for finding in model.findings(WorkerConfig(str(DEMO), attention_backend="cpp", block_size=20))
    }
    assert named["attention"].state == ERROR


def test_the_kernel_of_latent_attention_is_named(monkeypatch, tmp_path):
    """On CUDA devices it is not the kernel of other attention, which refuses such pages."""
    monkeypatch.setattr(triton_latent.availability, "why_not", lambda device: None)
    fields = tiny_config("deepseek_v3").to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    resolved = WorkerConfig(str(tmp_path), device="cuda", dtype="bfloat16", max_model_len=64)
    for name in ("auto", "triton"):
        assert model._attention(resolved.with_(attention_backend=name)).facts["backend"] == "triton"


def test_the_memory_of_adapters_and_those_that_do_not_fit() -> None:
    asked = WorkerConfig(str(DEMO), device="cpu", max_loras=2, lora_adapters=(("tone", f"{DEMO}-lora"),))
    (found,) = [finding for finding in model.findings(asked) if finding.check == "adapters"]
    assert found.state == OK and found.facts["slots"] == 2 and found.facts["adapters"] == ["tone"]
    assert f"2 slot(s) of {human_bytes(found.facts['slot_bytes'])} on each rank, for rank 16" in found.text
    (found,) = model.findings(asked.with_(max_lora_rank=4))
    assert found.state == ERROR and found.text.startswith("adapter 'tone' has rank 8") and "rank 8" in found.fix


def test_a_model_that_no_class_describes_keeps_a_server_from_starting():
    assert model.described("described as a class", "") == Finding("description", "described as a class")
    assert model.described("It is not supported.", "Use another.").state == ERROR


def test_one_of_several_hosts(taken_port):
    head = NodesConfig(0, 2, "127.0.0.1", taken_port, None)
    other = NodesConfig(1, 2, "127.0.0.1", taken_port, None)
    assert machine.reachable(head).state == ERROR and "--master-port" in machine.reachable(head).fix
    found = machine.reachable(other)
    assert (found.state, found.facts["interface"]) == (OK, "lo")
    assert f"which joins 127.0.0.1, port {taken_port}, through lo (127.0.0.1)" in found.text


def test_text_and_json():
    found = [Finding("one", "all right"), Finding("the other", "slow", WARNING, "do this")]
    assert as_text(found).splitlines() == [
        "ok       one        all right",
        "warning  the other  slow",
        "    fix             do this",
    ]
    assert as_json(found)["ok"] and json.dumps(as_json(found))
    assert not is_fine([*found, Finding("third", "bad", ERROR, "stop")])
    with pytest.raises(AssertionError, match="a fix is for what is wrong"):
        Finding("no fix", "bad", ERROR)


@pytest.mark.slow
def test_the_whole_of_it(capsys, taken_port):
    config = WorkerConfig(str(DEMO), device="cpu", tensor_parallel_size=2).to_json()
    words = [f"--config={config}", "--host=127.0.0.1", "--port=0", "--all-reduce", "--json"]
    words.append(f"--description={json.dumps({'text': 'described as a class', 'fix': ''})}")
    assert doctor.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    by_name = {finding["check"]: finding for finding in report["findings"]}
    assert report["ok"] and by_name["description"]["text"] == "described as a class"
    assert {"cores", "kernels", "model", "attention", "all-reduce"} <= set(by_name)
    if by_name["all-reduce"]["state"] == OK:
        assert min(by_name["all-reduce"]["facts"]["seconds_by_bytes"].values()) > 0
    nothing = WorkerConfig("", device="cpu").to_json()
    assert doctor.main([f"--config={nothing}", "--host=127.0.0.1", f"--port={taken_port}", "--missing=far away"]) == 1
    assert "far away" in capsys.readouterr().out


def test_without_devices_no_sums_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = doctor._all_reduce(WorkerConfig("", device="cuda", tensor_parallel_size=2))
    assert found.state == WARNING and found.text == "not measured: 1 CUDA device(s) for 2 ranks"
    assert found.fix == "Give --tensor-parallel-size 1, or --device cpu."


@pytest.mark.slow
def test_ranks_say_how_they_sum() -> None:
    found = cuda.all_reduce_choice(WorkerConfig("", device="cpu", tensor_parallel_size=2))
    assert (found.state, found.text) == (OK, "shared memory" if SharedMemoryGroup.supported() else "gloo")


def test_a_rank_that_cannot_join_is_named() -> None:
    ours, theirs = Control.pair()
    other, its = Control.pair()
    its.close()
    assert cuda._first_answer([ours, other])["cause"] == "rank 1 ended"
    for end in (ours, theirs, other):
        end.close()


def test_the_code_of_a_class_without_a_description_is_reported_with_its_costs() -> None:
    tensors = (
        ClassTensor("model.embed_tokens.weight", (512, 64), "embedding"),
        ClassTensor("model.layers.0.mlp.weight", (64, 64), "linear"),
    )
    found = ClassDescription(
        "NewForCausalLM", "new", ranks=2, layers=1, vocab_size=512, hidden_size=64, tensors=tensors
    )
    config = WorkerConfig(str(DEMO), served_class=found.encoded(), tensor_parallel_size=2)
    (finding,) = model._code(config)
    assert finding.state == NOTE and finding.text.startswith("computed by transformers' code (NewForCausalLM): slower")
    assert finding.facts == {"served_by": "transformers", "is_replicated": True}
    divided = replace(found, is_remote=True, tensors=(tensors[0], replace(tensors[1], style="colwise")))
    (finding,) = model._code(config.with_(served_class=divided.encoded()))
    assert finding.facts == {"served_by": "checkpoint", "is_replicated": False}
    assert model._code(WorkerConfig(str(DEMO))) == []
