"""`torch.cuda` made up on the CPU, under the real code of a rank: it fails where a device would go wrong.

A tensor of a made-up device says `cuda:N` and keeps its numbers on the host. Each operation of torch, each launch of a
kernel of Triton (which its interpreter runs) and each collective is a launch here, which names its tensors. Numbers
are computed at once, but a copy to pinned memory arrives when the host has waited for it, and not before. A `Fault` is

* a replay that names memory which was freed, and a launch outside of a graph that names memory of the graph's pool;
* a host that waits, reads, or allocates pinned memory while it captures, or copies to or from the device, as
  `torch.where` does with a number;
* pinned memory that is written before its copy was over;
* a launch while another device is the thread's own, or with tensors of two; a wait on another device;
* memory that is used on two streams of which neither waits for the other;
* collectives in which the ranks do not meet: captured in another order, or of other shapes.

A graph keeps its launches and repeats them on the same memory, without the Python around them; it owns what was
allocated while it was captured, and knows all other memory by address.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.golden.paged_run import ThreadRank
from tests.parallel.made_up_memory import DeviceTensor, Event, Fault, MadeUpGraph, Memory, Stream, merge, of_thread

aten = torch.ops.aten
_READS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default,
    aten.masked_select.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
_BY_MASK = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_GARBAGE = 0xA5  # what pinned memory holds until a copy to it has arrived


class _Mode(TorchDispatchMode):
    def __init__(self, cuda: "MadeUpCuda") -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._cuda.call(func, args, kwargs or {})


class _Copy:
    """A copy between a device and pinned memory that may still be under way. `arriving`: to pinned memory, what."""

    def __init__(self, host: Tensor, stream: Stream, arriving: Tensor | None) -> None:
        self.host, self.stream, self.ticks, self.arriving = host, stream, stream.ticks, arriving
        if arriving is not None:
            host.view(-1).view(torch.uint8).fill_(_GARBAGE)
        self._was = host.clone()

    def finish(self) -> None:
        if not torch.equal(self.host.view(-1).view(torch.uint8), self._was.view(-1).view(torch.uint8)):
            raise Fault(f"pinned memory was written before its copy was over: {list(self.host.shape)}")
        if self.arriving is not None:
            self.host.copy_(self.arriving)


class MadeUpCuda:
    """Stands in for `torch.cuda` of `num_devices` devices with `total_bytes` each. As in CUDA, a pool serves no more
    captures once its graphs have been reset."""

    def __init__(self, num_devices: int = 1, total_bytes: int = 1 << 30) -> None:
        self.num_devices, self.total_bytes = num_devices, total_bytes
        self.has_peers = True  # devices read each other's memory
        self.said: list[str] = []  # what was asked for, in order
        self.graphs: list[MadeUpGraph] = []  # all that were made
        self.num_pools, self.dead_pools = 0, set[int | None]()
        self.launches = 0
        self.variants: set[tuple[Any, ...]] = set()  # of kernels: what Triton would have compiled
        self._host_seen: dict[Stream, int] = {}
        self._allocated: dict[int, list[Memory]] = {device: [] for device in range(num_devices)}
        self._peaks = [0] * num_devices
        self._pinned: dict[int, Memory] = {}
        self._copies: list[_Copy] = []
        self._main = [Stream(self, device) for device in range(num_devices)]
        self._met: dict[int, list[list[str]]] = {}
        self._lock = threading.RLock()
        self.modes = ExitStack()  # of the thread that made this

    # What product code calls.

    def set_device(self, device: torch.device | int) -> None:
        of_thread.device = device if isinstance(device, int) else device.index or 0
        if not of_thread.is_entered:
            of_thread.is_entered = True
            mode = _Mode(self)
            if threading.current_thread() is threading.main_thread():
                self.modes.enter_context(mode)
            else:
                mode.__enter__()  # the thread ends with the test

    def current_stream(self, device: Any = None) -> Stream:
        streams = of_thread.streams or {}
        return streams.get(of_thread.device, self._main[of_thread.device])

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before, of_thread.streams = of_thread.streams, {**(of_thread.streams or {}), stream.device: stream}
        try:
            yield
        finally:
            of_thread.streams = before

    def synchronize(self, device: Any = None) -> None:
        self.said.append("synchronize")
        index = of_thread.device if device is None else torch.device(device).index
        seen = {s: ticks for stream in (self._main[index], *self._host_seen) for s, ticks in stream.seen.items()}
        self.host_waits("synchronize", seen | {self._main[index]: self._main[index].ticks})

    def empty_cache(self) -> None:
        self._forbid("empty_cache")
        self.said.append("empty_cache")

    def graph_pool_handle(self) -> int:
        self.num_pools += 1
        return self.num_pools

    def CUDAGraph(self) -> MadeUpGraph:
        self.graphs.append(MadeUpGraph(self))
        return self.graphs[-1]

    @contextmanager
    def graph(
        self,
        graph: MadeUpGraph,
        pool: int | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Generator[None]:
        """Capture a graph; like torch, first give unused memory back to the driver."""
        assert pool not in self.dead_pools and capture_error_mode == "thread_local"
        stream, pool = stream or self.current_stream(), pool or self.graph_pool_handle()
        graph.pool, graph.device = pool, of_thread.device
        self.empty_cache()
        self.said.append(f"capture in pool {pool}")
        of_thread.graph = graph
        try:
            with self.stream(stream):
                yield
        finally:
            of_thread.graph = None
        self.said.append("captured")

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self._forbid("mem_get_info")
        return self.total_bytes - self._live(torch.device(device).index or 0), self.total_bytes

    def memory_reserved(self, device: Any = None) -> int:
        return self._live(torch.device(device).index or 0)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._peaks[torch.device(device).index or 0] = 0

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._peaks[torch.device(device).index or 0]

    def tensor(self, data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        """`torch.tensor`, which makes its memory below the level that a mode sees."""
        with _disable_current_modes():
            made = _torch_tensor(data, **options)
        if pin_memory:
            self._pin(made)
        return made if device is None else made.to(device)

    # The rules.

    def _forbid(self, what: str) -> None:
        if of_thread.graph is not None:
            raise Fault(f"{what} while a graph is captured")

    def host_waits(self, what: str, seen: dict[Stream, int]) -> None:
        """The host waits until all that was `seen` is over."""
        self._forbid(what)
        with self._lock:
            merge(self._host_seen, seen)
            over = [copy for copy in self._copies if copy.ticks <= self._host_seen.get(copy.stream, 0)]
            self._copies = [copy for copy in self._copies if copy not in over]
            with _disable_current_modes():
                for copy in over:
                    copy.finish()

    def begin(self, name: str, device: int, memory: set[Memory], by: MadeUpGraph | None = None) -> Stream:
        """A launch on the thread's stream that names `memory`. `by`: the graph that is replayed."""
        if device != of_thread.device:
            raise Fault(f"{name} on device {device}, while device {of_thread.device} is the thread's own")
        stream, capturing = self.current_stream(), by or of_thread.graph
        self.launches += 1
        with self._lock:
            stream.ticks += of_thread.graph is None
            for piece in memory:
                if piece.graph is not None and piece.graph is not capturing:
                    raise Fault(f"{name} names memory of a graph's pool from outside: others find room in it")
                if of_thread.graph is not None:
                    continue
                if piece.last is not None:
                    other, ticks = piece.last
                    if other is not stream and max(stream.seen.get(other, 0), self._host_seen.get(other, 0)) < ticks:
                        raise Fault(f"{name} uses memory of another stream without waiting for it")
                piece.last = stream, stream.ticks
        return stream

    def _live(self, device: int) -> int:
        alive = [memory for memory in self._allocated[device] if not memory.storage.expired()]
        self._allocated[device] = alive
        return sum(memory.num_bytes for memory in alive)

    def allocate(self, made: Tensor, device: int) -> Memory:
        storage = made.untyped_storage()
        memory = Memory(StorageWeakRef(storage), storage.nbytes(), device, of_thread.graph)
        if of_thread.graph is not None:
            of_thread.graph.own(storage)
        with self._lock:
            self._allocated[device].append(memory)
            live = self._live(device)
            self._peaks[device] = max(self._peaks[device], live)
        if live > self.total_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes.")
        return memory

    def _pin(self, made: Tensor) -> None:
        self._forbid("pinned memory is allocated")
        storage = made.untyped_storage()
        self._pinned[storage._cdata] = Memory(StorageWeakRef(storage), storage.nbytes())

    def _pinned_memory(self, host: Tensor) -> Memory | None:
        return self._pinned.get(host.untyped_storage()._cdata)

    # Operations of torch.

    @torch.inference_mode(False)
    @torch.no_grad()
    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = [leaf for leaf in tensors if isinstance(leaf, DeviceTensor)]
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked).type == "cuda"
        if not ours and not to_device:
            return self._on_host(func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with _Mode(self):
                return func.decompose(*args, **kwargs)
        if func in _READS or (func in _BY_MASK and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])):
            self._read(str(func), ours)
        if func is aten._to_copy.default:
            return self._moved(args[0], kwargs)
        if func is aten.copy_.default and len({isinstance(tensor, DeviceTensor) for tensor in args[:2]}) == 2:
            return self._copied(*args, **kwargs)
        if any(not isinstance(tensor, DeviceTensor) and tensor.dim() for tensor in tensors):
            raise Fault(f"{func} has tensors of a device and of the host")
        if func is aten.where.self and len(ours) < len(tensors):
            self._forbid("a number is copied from the host by `where`")
        device = ours[0].memory.device if ours else torch.device(asked).index or 0
        assert device is not None
        return self.launch(str(func), func, args, _on_cpu(kwargs), device)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        made = func(*args, **_on_cpu(kwargs))
        if kwargs.get("pin_memory"):
            self._pin(made)
        return made

    def _read(self, name: str, ours: list[DeviceTensor]) -> None:
        stream = self.begin(name, ours[0].device.index, {tensor.memory for tensor in ours})
        self.host_waits(f"the host reads by {name}", {**stream.seen, stream: stream.ticks})

    def launch(self, name: str, call: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Does `call` on the numbers of its tensors, all of which must be on `device`."""
        named = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor)]
        if {tensor.memory.device for tensor in named} - {device}:
            raise Fault(f"{name} has tensors of devices {sorted({tensor.device.index for tensor in named})}")
        is_view = getattr(call, "is_view", False)
        if not is_view:
            self.begin(name, device, {tensor.memory for tensor in named})
        elif any(tensor.memory.graph not in (None, of_thread.graph) for tensor in named):
            raise Fault(f"{name} names memory of a graph's pool from outside")
        with _disable_current_modes():
            made = call(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        result = self._wrapped(made, named, device)
        if of_thread.graph is not None and not is_view:
            of_thread.graph.add(name, call, args, kwargs, result)
        return result

    def _wrapped(self, made: Any, named: list[DeviceTensor], device: int) -> Any:
        known = {tensor.inner.untyped_storage()._cdata: tensor.memory for tensor in named}
        same = {id(tensor.inner): tensor for tensor in named}

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) in same:
                return same.get(id(leaf), leaf)
            place = leaf.untyped_storage()._cdata
            if place not in known:
                known[place] = self.allocate(leaf, device)
            return DeviceTensor(self, leaf, known[place])

        return tree_map(wrap, made)

    def _moved(self, x: Tensor, kwargs: dict[str, Any]) -> Any:
        """`x.to(...)`."""
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else x.device
        as_type = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {}
        if isinstance(x, DeviceTensor) and target == x.device and as_type.get("dtype", x.dtype) == x.dtype:
            return x
        if isinstance(x, DeviceTensor) and target.type == "cuda":
            return self.launch("_to_copy", aten._to_copy.default, (x,), as_type, target.index)
        if isinstance(x, DeviceTensor):
            self._read("a copy to memory that is not pinned", [x])
            return x.inner.to(**as_type).clone()
        self._forbid("a copy from the host")
        into = self.launch("_to_copy", lambda: x.to(**as_type).clone(), (), {}, target.index or 0)
        self._from_host(x, into)
        return into

    def _copied(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """`into.copy_(source)` between a device and the host."""
        if isinstance(into, DeviceTensor):
            if source.dim() == 0 and self._pinned_memory(source) is None:  # a number travels with the launch
                return self.launch("copy_", aten.copy_.default, (into, source.clone()), {}, into.device.index)
            self._forbid("a copy from the host")
            self._from_host(source, into)
            into.inner.copy_(source)
        elif not non_blocking or self._pinned_memory(into) is None:
            assert isinstance(source, DeviceTensor)
            self._read("a copy to the host", [source])
            into.copy_(source.inner)
        else:
            assert isinstance(source, DeviceTensor)
            self._forbid("a copy to the host")
            pinned = self._pinned_memory(into)
            assert pinned is not None
            stream = self.begin("a copy to the host", source.device.index, {source.memory, pinned})
            self._arrive(into, stream)
            self._copies.append(_Copy(into, stream, source.inner.to(into.dtype).clone()))
        return into

    def _from_host(self, source: Tensor, into: DeviceTensor) -> None:
        """A copy to `into` begins."""
        pinned = self._pinned_memory(source)
        stream = self.begin("a copy from the host", into.device.index, {into.memory} | ({pinned} if pinned else set()))
        if pinned is not None:
            self._arrive(source, stream)
            self._copies.append(_Copy(source, stream, None))

    def _arrive(self, host: Tensor, stream: Stream) -> None:
        """Copies to the same memory that come before on `stream` are over when the next one begins."""
        storage = host.untyped_storage()._cdata
        before = [c for c in self._copies if c.host.untyped_storage()._cdata == storage and c.stream is stream]
        for copy in before:
            if copy.arriving is not None and _overlap(copy.host, host):
                self._copies.remove(copy)
                copy.finish()

    # Ranks that are threads.

    def collective(
        self, ranks: object, rank: int, name: str, x: Any, exchange: Callable[[Tensor], list[Tensor]]
    ) -> Any:
        """A launch in which all `ranks` meet: `exchange` returns every rank's part. Each rank says what it came for."""
        kind = f"{name} of {x.dtype} {list(x.shape)}, {'captured' if of_thread.graph is not None else 'launched'}"

        def meet(inner: Tensor, kind: str = kind) -> list[Tensor]:
            with self._lock:
                met = self._met.setdefault(id(ranks), [])
                while len(met) <= rank:
                    met.append([])
                met[rank].append(kind)
                number = len(met[rank]) - 1
            parts = [part.clone() for part in exchange(inner)]
            came = [self._met[id(ranks)][other][number] for other in range(len(parts))]
            if len(set(came)) > 1:
                raise Fault(f"ranks do not meet in collective {number}: {'; '.join(came)}")
            return parts

        return self.launch(name, meet, (x,), {}, x.device.index)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return changed | ({"device": torch.device("cpu")} if changed.get("device") is not None else {})


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, DeviceTensor) else leaf


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


_torch_tensor = torch.tensor


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Generator[MadeUpCuda]:
    """Two made-up devices under everything that asks torch for one."""
    made = MadeUpCuda(num_devices=2)
    install(made, monkeypatch)
    made.set_device(0)
    with made.modes:
        yield made
    of_thread.is_entered = False
    with _disable_current_modes():
        for copy in made._copies:
            copy.finish()


def install(cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch, Triton's interpreter and thread ranks use `cuda` until undone."""
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    from oarlock.workers.kernels.triton import availability
    from oarlock.workers.platform import cuda_driver
    from tests.golden.interpreter_lock import one_kernel_at_a_time

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    properties = SimpleNamespace(multi_processor_count=2, major=9, minor=0, name="made up")
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: cuda.num_devices,
        "can_device_access_peer": lambda a, b: cuda.has_peers,
        "current_device": lambda: of_thread.device, "get_device_name": lambda *_: "made up",
        "get_device_properties": lambda *_: properties, "get_device_capability": lambda *_: (9, 0),
        "Stream": lambda *_, **__: Stream(cuda, of_thread.device), "Event": lambda **options: Event(cuda, **options),
    }  # fmt: skip
    names = "set_device current_stream stream synchronize empty_cache graph_pool_handle CUDAGraph graph mem_get_info "
    names += "memory_reserved reset_peak_memory_stats max_memory_reserved"
    for name, value in (replaced | {name: getattr(cuda, name) for name in names.split()}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "tensor", cuda.tensor)
    for name, value in (("device_count", lambda: 2), ("driver_version", lambda: "13.0")):
        monkeypatch.setattr(cuda_driver, name, value)
    monkeypatch.setattr(cuda_driver, "built_for", lambda platform="cuda": "13.0" if platform == "cuda" else None)
    monkeypatch.setattr(cuda_driver, "smallest_memory", lambda count: None)  # nothing is estimated
    monkeypatch.setattr(cuda_driver, "why_not_triton", lambda devices: None)
    monkeypatch.setattr(availability, "missing_to_launch", list)
    monkeypatch.setattr(availability, "can_serve", lambda device: device.type == "cuda")
    one_kernel_at_a_time(monkeypatch)
    launch, exchange, begin = GridExecutor.__call__, ThreadRank._exchange, InterpretedFunction.run

    def begun(function: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
        cuda.variants.add(_variant(function, args, kwargs))
        begin(function, *args, **kwargs)

    def launched(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        named = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(not isinstance(tensor, DeviceTensor) for tensor in named):
            raise Fault(f"the kernel {executor.fn.__name__} is given tensors of the host")
        device = named[0].device.index
        cuda.launch(executor.fn.__name__, lambda *a, **k: launch(executor, *a, **k), args, kwargs, device)

    def exchanged(rank: ThreadRank, x: Tensor) -> list[Tensor]:
        if not isinstance(x, DeviceTensor):
            return exchange(rank, x)
        return cuda.collective(rank._threads, rank.rank, "a sum or gather", x, lambda inner: exchange(rank, inner))

    monkeypatch.setattr(InterpretedFunction, "run", begun)
    monkeypatch.setattr(GridExecutor, "__call__", launched)
    monkeypatch.setattr(ThreadRank, "_exchange", exchanged)


_ALIGNED = 16  # bytes or units: Triton compiles a kernel again for arguments that are multiples of it, and for 1


def _variant(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Kernel, and what of its arguments Triton compiles into it."""
    given = dict(zip(function.arg_names, args, strict=False)) | kwargs
    plain = function.kwargs.get("do_not_specialize") or ()
    unaligned = {*plain, *(function.kwargs.get("do_not_specialize_on_alignment") or ())}
    found = []
    for name, value in sorted(given.items()):
        if name in ("grid", "warmup"):
            continue
        if isinstance(value, DeviceTensor):
            kind = str(value.dtype), name in unaligned or value.inner.storage_offset() * value.itemsize % _ALIGNED == 0
        elif name not in function.arg_names or "constexpr" in str(function.fn.__annotations__.get(name)):
            kind = repr(value)
        elif isinstance(value, int) and not isinstance(value, bool) and name not in plain:
            kind = "1" if value == 1 else "aligned" if name not in unaligned and value % _ALIGNED == 0 else "int"
        else:
            kind = type(value).__name__
        found.append((name, kind))
    return (function.fn.__name__, *found)
