"""Process that starts renderers of chat templates: `python -m oarlock.server.llm.template_process --fd N`.

A checkpoint's chat template is foreign code. A renderer is a fork of this process, which has imported Jinja and never
runs a template itself. It compiles and renders on one connection, one request after the other, with a limit on CPU time
for each request and a limit on memory. The server sends a connection over `--fd` to get a renderer for it, and closes
that connection to have the renderer killed. If a renderer ends by itself, this process sends the response for it.
"""

import argparse
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from oarlock.base.process_memory import limit_mapped_bytes, memory_use
from oarlock.base.python_child import die_with_parent
from oarlock.server.llm.template_messages import (
    CPU_LIMIT_S,
    LENGTH,
    MAX_ERROR,
    MEMORY_LIMIT_BYTES,
    MEMORY_PER_BYTE,
    ReplyKind,
    reply,
)

# Jinja's global helpers for web pages. Published chat templates use none of them.
_REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")


class TooLargeError(Exception):
    """Raised if the template writes more characters than allowed."""


class Renderer:
    """Templates of one checkpoint, each compiled on first use."""

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str]) -> None:
        """`names`: variables of every rendering, such as `bos_token`."""
        self._sources = sources
        self._names = names
        self._environment = _environment()
        self._templates: dict[str, Template] = {}

    def compile(self) -> None:
        """Compile all templates. Raises `jinja2.TemplateSyntaxError` and any other error of Jinja's compiler."""
        for name in self._sources:
            self._template(name)

    def render(self, name: str, variables: Mapping[str, Any], max_characters: int) -> str:
        """Return the text that a template writes. Raises `TooLargeError` and any error that the template raises."""
        pieces: list[str] = []
        size = 0
        for piece in self._template(name).generate({**self._names, **variables}):
            size += len(piece)
            if size > max_characters:
                raise TooLargeError
            pieces.append(piece)
        return "".join(pieces)

    def _template(self, name: str) -> Template:
        template = self._templates.get(name)
        if template is None:
            template = self._templates[name] = self._environment.from_string(self._sources[name])
        return template


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here only its body is used."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = environment.globals  # Jinja's type covers only its own globals
    for name in _REMOVED_GLOBALS:
        del names[name]
    names |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return the value as JSON. Unlike Jinja's own filter, do not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _raise(message: str) -> None:
    raise TemplateError(message)


def main(argv: Sequence[str]) -> int:
    """Start renderers until the socket `--fd` is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # may be sent to all processes at once; the parent decides
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="oarlock.server.llm.template_process")
    parser.add_argument("--fd", type=int, required=True)
    gc.freeze()  # imported objects live as long as the process, and are shared with the renderers
    _Renderers(socket.socket(fileno=parser.parse_args(argv).fd)).run()
    return 0


class _Renderers:
    """Forks, one per connection: starts, kills and reaps them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._connections: dict[int, socket.socket] = {}  # the renderer's pid -> its end of the connection
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def run(self) -> None:
        """Serve until the server has ended. The kernel then kills the renderers."""
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            # Kill before reaping: afterwards the descriptors of ended renderers may belong to new renderers.
            for fd in ready - {self._control.fileno(), self._wake}:
                self._kill(fd)
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._control.fileno() in ready:
                _, fds, *_ = socket.recv_fds(self._control, 1, 1)
                if not fds:
                    return
                self._start(socket.socket(fileno=fds[0]))

    def _start(self, connection: socket.socket) -> None:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (self._control, *self._connections.values()):
                    other.close()
                _serve(connection)
            finally:
                os._exit(0)
        self._connections[pid] = connection
        self._poll.register(connection, 0)  # only the hang-up event

    def _kill(self, fd: int) -> None:
        """Kill the renderer whose connection the server has closed. It is reaped when it has ended."""
        pid = next(pid for pid, connection in self._connections.items() if connection.fileno() == fd)
        os.kill(pid, signal.SIGKILL)
        self._poll.unregister(fd)

    def _reap(self) -> None:
        """Reap renderers that have ended, and report on their connections how they ended."""
        while self._connections:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._connections.pop(pid) as connection:
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                try:
                    self._poll.unregister(connection)
                    connection.send(reply(ReplyKind.KILLED, str(number)), socket.MSG_DONTWAIT)
                except (KeyError, OSError):  # the server has closed it, and needs no response
                    continue


def _serve(connection: socket.socket) -> None:
    """Process requests, in the fork, until the connection ends or the memory limit is reached."""
    base = memory_use().mapped
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that aborts writes to stderr
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    stream = connection.makefile("rb")
    renderer, cpu_limit_s = None, CPU_LIMIT_S
    while len(header := stream.read(LENGTH.size)) == LENGTH.size:
        (size,) = LENGTH.unpack(header)
        limit_mapped_bytes(base + MEMORY_LIMIT_BYTES + MEMORY_PER_BYTE * size)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # the signal ends this process
        request = json.loads(stream.read(size))
        if renderer is None:
            sources, names, cpu_limit_s, niceness = request
            os.nice(niceness)
            renderer = Renderer(sources, names)
            continue
        kind, data = _reply(renderer, request)
        del request
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(data)
        if kind is ReplyKind.OUT_OF_MEMORY:
            return


def _reply(renderer: Renderer, request: list) -> tuple[ReplyKind, bytes]:
    try:
        if not request:
            renderer.compile()
            return ReplyKind.TEXT, reply(ReplyKind.TEXT)
        return ReplyKind.TEXT, reply(ReplyKind.TEXT, renderer.render(*request))
    except TooLargeError:
        kind, text = ReplyKind.TOO_LARGE, ""
    except MemoryError:
        kind, text = ReplyKind.OUT_OF_MEMORY, ""
    except TemplateSyntaxError as error:
        kind, text = ReplyKind.REFUSED, f"line {error.lineno}: {error}"
    except TemplateError as error:
        kind, text = ReplyKind.REFUSED, str(error)
    except Exception as error:  # the template is foreign code: any error in it concerns this input
        kind, text = ReplyKind.FAILED, type(error).__name__
    return kind, reply(kind, text[:MAX_ERROR].encode("utf-8", "replace").decode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
