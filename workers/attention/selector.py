"""Selection of the attention backend: the first in a list that supports the model, or the backend chosen by name."""

from collections.abc import Callable

from oarlock.base.errors import StartupError
from oarlock.workers.attention.backend import AttentionBackend, KVSpec
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.attention.torch_backend import TorchBackend
from oarlock.workers.attention.triton_backend import TritonBackend
from oarlock.workers.attention.triton_latent import LatentTritonBackend

# Fastest first. Triton's interpreter, which is for tests, must be chosen by name: on the CPU other backends precede it.
BACKENDS: tuple[type[AttentionBackend], ...] = (CppBackend, TorchBackend, TritonBackend, ReferenceBackend)
# The same if keys contain the values.
LATENT_BACKENDS: tuple[type[AttentionBackend], ...] = (CppBackend, TorchBackend, LatentTritonBackend, ReferenceBackend)


def candidates(spec: KVSpec, name: str = "auto") -> list[type[AttentionBackend]]:
    """Return the backends for the kind of pages of `spec`, fastest first, or only the backend called `name`. A backend
    may still refuse `spec`."""
    backends = LATENT_BACKENDS if spec.value_in_key else BACKENDS
    return [backend for backend in backends if name in ("auto", backend.name)]


def choose(spec: KVSpec, name: str, log: Callable[[str], None]) -> AttentionBackend:
    """Return the first backend that supports `spec`, or the backend called `name`. Logs each refusal and the choice.

    Raises `StartupError` if `name` is unknown or cannot serve: a backend chosen by name has no fallback.
    """
    named = candidates(spec, name)
    if not named:
        known = ", ".join(["auto", *(backend.name for backend in candidates(spec))])
        raise StartupError(f"There is no attention backend {name!r}.", f"Use one of: {known}.")
    for backend in named:
        reason = backend.why_not(spec)
        if reason is None:
            log(f"event=attention_backend name={backend.name}")
            return backend(spec)
        log(f"attention_backend_refused={backend.name} reason={reason!r}")
        if name != "auto":
            raise StartupError(f"Attention backend {name!r} cannot serve here: {reason}.", "Use 'auto'.")
    raise StartupError(
        f"No attention backend can serve {spec.dtype} on {spec.device}.", "Choose another --dtype or --device."
    )
