"""Client of a run: asks a server for its model, sends requests, and makes a sample of each response, even a failed
one."""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.server.bench.http_stream import (
    BrokenError,
    ConnectError,
    EventReader,
    HttpClient,
    NotHttpError,
    StatusError,
)
from oarlock.server.bench.metrics import Cause, Sample
from oarlock.server.bench.workload import IdPrompts, Piece, Prompts, TextPrompts

_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class AssignedAdapters:
    """Names of LoRA adapters that the conversations of a run use: in turn, or at random."""

    names: Sequence[str]
    is_random: bool = True
    seed: int = 0

    def name(self, number: int) -> str:
        """Return the adapter of conversation `number`, the same in each run with this seed."""
        if self.is_random:
            return random.Random(f"{self.seed}-{number}").choice(self.names)
        return self.names[number % len(self.names)]

    @property
    def text(self) -> str:
        """The adapters in one line."""
        return f"{', '.join(self.names)}, {'at random' if self.is_random else 'in turn'}"


@dataclass(frozen=True, slots=True)
class RequestForm:
    """Fields that all requests of a run share."""

    model: str
    is_chat: bool = False
    ignore_eos: bool = True
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    adapters: AssignedAdapters | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: Piece | list[dict[str, str]], output_tokens: int, number: int | None = None) -> bytes:
        """Return the JSON of one request. `prompt`: ids or text; for a chat, its messages.

        `number`: the conversation, which may have an adapter; None: a request without one, before the run.
        """
        has_adapter = self.adapters is not None and number is not None
        fields: dict[str, Any] = {
            "model": self.adapters.name(number) if has_adapter else self.model,
            "messages" if self.is_chat else "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields | dict(self.extra), separators=(",", ":")).encode()


@dataclass(slots=True)
class OpenRequest:
    """A request in flight. `sample` is filled when it ends, in any way."""

    client: HttpClient
    form: RequestForm
    sample: Sample
    reader: EventReader
    run_began: float  # time.perf_counter()

    async def run(self, body: bytes) -> None:
        """Send the request and read its stream. If cancelled, it counts as interrupted."""
        sample = self.sample
        began = time.perf_counter()
        sample.sent_s = began - self.run_began
        try:
            async with asyncio.timeout(self.form.timeout_s):
                await self.client.post(self.form.path, body, self.reader.feed)
        except TimeoutError:
            self._fail(Cause.TIMEOUT, f"no complete response within {self.form.timeout_s:g} s")
        except ConnectError as error:
            self._fail(Cause.CONNECT, str(error))
        except StatusError as error:
            self._fail(f"HTTP {error.status}", error.text)
        except NotHttpError as error:
            self._fail(Cause.MALFORMED, str(error))
        except BrokenError as error:
            self._fail(Cause.ENDED_EARLY, f"after {len(self.reader.times)} chunks: {error}")
        except asyncio.CancelledError:
            self._fail(Cause.INTERRUPTED, "interrupted before the response was complete")
            raise
        finally:
            self._fill(began, time.perf_counter())

    def _fill(self, began: float, ended: float) -> None:
        sample, reader = self.sample, self.reader
        if reader.error is not None:
            self._fail(Cause.ERROR_EVENT, reader.error)
        elif reader.malformed is not None:
            self._fail(Cause.MALFORMED, reader.malformed)
        elif sample.failure is None and not reader.times:
            self._fail(Cause.NO_CHUNK, "the response is complete but contains no completion chunk")
        elif sample.failure is None and not reader.is_complete:
            self._fail(Cause.ENDED_EARLY, f"after {len(reader.times)} chunks, without finish_reason or [DONE]")
        if reader.prompt_tokens is not None:
            sample.input_tokens = reader.prompt_tokens
        if reader.completion_tokens is not None:
            sample.output_tokens = reader.completion_tokens
        else:
            sample.output_tokens, sample.counted_by = len(reader.times), "chunks"
        if reader.times:
            sample.ttft_s = reader.times[0] - began
            sample.itl_s = [later - earlier for earlier, later in pairwise(reader.times)]
        sample.e2el_s = (reader.times[-1] if sample.failure is None else ended) - began

    def _fail(self, cause: str, detail: str) -> None:
        # An error event is more specific than the broken connection after it.
        self.sample.failure = str(cause)
        self.sample.detail = " ".join(detail.split())[:_MAX_DETAIL]


FORMS = ("auto", "ids", "text")
_PROBE_WORDS = (24, 88)
_PROBE_SEED = 1_000_003  # differs from the run's seed, so that no prompt of the run is cached


@dataclass(frozen=True, slots=True)
class ListedModel:
    """Entry of a model in the server's list: its name, and its vocabulary size if the list has it."""

    model: str
    vocab_size: int | None


async def listed_model(client: HttpClient, model: str | None, adapters: Sequence[str] = ()) -> ListedModel:
    """Return the entry of `/v1/models` with this name, by default the first. Raises `StartupError`.

    `adapters`: other names that the list must have.
    """
    try:
        entries = (await client.get_json("/v1/models"))["data"]
        entry = next((each for each in entries if model in (None, each["id"])), None)
        names = [each["id"] for each in entries]
    except ConnectError as error:
        raise StartupError(f"No server responds: {error}.", "Start the server, or correct URL.") from None
    except StatusError as error:
        raise _refused(f"/v1/models: {error}", error.status) from None
    except (BrokenError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"/v1/models is not the list of an OpenAI-compatible server: {error!r}.", "Correct URL."
        ) from None
    missing = next((name for name in adapters if name not in names), model)
    if entry is None or missing != model:
        cause = f"The server has no model {missing!r}." if missing else "The server lists no model."
        raise StartupError(cause, f"It lists: {', '.join(names)}." if names else "Load a model.")
    size = entry.get("vocab_size") or (entry.get("meta") or {}).get("n_vocab")  # ours; llama.cpp's
    return ListedModel(entry["id"], size if isinstance(size, int) else None)


async def choose_prompts(
    client: HttpClient, form: RequestForm, how: str, vocab_size: int | None, seed: int, *, needs_text: bool
) -> Prompts:
    """Return prompts of token ids if server and vocabulary allow, else of words, measured with the server. Raises
    `StartupError`.

    `how`: a name in `FORMS`. `needs_text`: a chat, or conversations.
    """
    if how == "ids" and needs_text:
        raise StartupError(
            "--prompt-form ids cannot be combined with --endpoint chat or --workload multi-turn.",
            "Remove --prompt-form ids: both send text.",
        )
    if how == "ids" and vocab_size is None:
        raise StartupError(
            "The server does not report its vocabulary size, which --prompt-form ids needs.",
            "Give the vocabulary size: --vocab-size 32000.",
        )
    if how != "text" and not needs_text and vocab_size is not None:
        ids = IdPrompts(vocab_size, seed)
        sample = await _ask(client, form, IdPrompts(vocab_size, _PROBE_SEED).piece("probe", 16))
        if sample.failure is None:
            return ids
        if how == "ids" or sample.failure not in ("HTTP 400", "HTTP 422"):
            raise _failed(sample)
    return await _measured(client, form, seed)


async def _measured(client: HttpClient, form: RequestForm, seed: int) -> TextPrompts:
    """Return prompts of words. Two requests measure how many tokens a word takes, and how many the server adds."""
    plain = TextPrompts(_PROBE_SEED)
    counted = []
    for words in _PROBE_WORDS:
        text = plain.piece("probe", words)
        sample = await _ask(client, form, [{"role": "user", "content": text}] if form.is_chat else text)
        if sample.failure is not None:
            raise _failed(sample)
        counted.append(sample.input_tokens)
    if not all(counted):  # no usage: a word counts as a token
        return TextPrompts(seed)
    each = (counted[1] - counted[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
    if each <= 0:  # the server only counts computed tokens, or cuts prompts
        return TextPrompts(seed)
    return replace(plain, seed=seed, tokens_per_word=each, overhead=counted[0] - each * _PROBE_WORDS[0])


async def _ask(client: HttpClient, form: RequestForm, prompt: Piece | list[dict[str, str]]) -> Sample:
    """Send one short request."""
    asking = OpenRequest(client, form, Sample(0.0, 1), EventReader(is_chat=form.is_chat), time.perf_counter())
    await asking.run(form.body(prompt, 1))
    return asking.sample


def _failed(sample: Sample) -> StartupError:
    cause = f"The first request failed ({sample.failure}): {sample.detail.rstrip('.')}."
    if sample.failure == Cause.TIMEOUT:
        return StartupError(cause, "Check the server, or raise --timeout.")
    status = sample.failure.removeprefix("HTTP ") if sample.failure else ""
    return _refused(cause, int(status) if status.isdecimal() else 0)


def _refused(cause: str, status: int) -> StartupError:
    if status in (401, 403):
        return StartupError(cause, "Set the environment variable OPENAI_API_KEY to the server's API key.")
    if status in (400, 422):
        return StartupError(
            cause,
            "Remove the field that the server does not support (--no-ignore-eos), or send text: --prompt-form text.",
        )
    if status == 404:
        return StartupError(cause, "Correct URL or --model, or choose the other --endpoint.")
    return StartupError(cause, "See the server's log.")
