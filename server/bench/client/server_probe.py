"""Asks a server what has to be known before a run: its model, its vocabulary, and whether it takes token ids."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from oarlock.engine.errors import StartupError
from oarlock.server.bench.client.events import EventReader
from oarlock.server.bench.client.http_stream import BrokenError, ConnectError, HttpClient, StatusError
from oarlock.server.bench.client.request import Asking, RequestForm
from oarlock.server.bench.metrics import Cause, Sample
from oarlock.server.bench.workload.prompts import IdPrompts, Piece, Prompts, TextPrompts

FORMS = ("auto", "ids", "text")
_PROBE_WORDS = (24, 88)
_PROBE_SEED = 1_000_003  # another than the run's: no prompt of the run is cached


@dataclass(frozen=True, slots=True)
class Listed:
    """Entry of a model in the server's list: its name, and its vocabulary size where the list says it."""

    model: str
    vocab_size: int | None


async def listed(client: HttpClient, model: str | None) -> Listed:
    """The entry of `/v1/models` with this name, by default the first. Raises `StartupError`."""
    try:
        entries = (await client.get_json("/v1/models"))["data"]
        entry = next((each for each in entries if model in (None, each["id"])), None)
        names = [each["id"] for each in entries]
    except ConnectError as error:
        raise StartupError(f"No server answers: {error}.", "Start it, or correct URL.") from None
    except StatusError as error:
        raise _refused(f"/v1/models: {error}", error.status) from None
    except (BrokenError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"/v1/models is not the list of an OpenAI-compatible server: {error!r}.", "Correct URL."
        ) from None
    if entry is None:
        cause = f"The server has no model {model!r}." if model else "The server lists no model."
        raise StartupError(cause, f"It lists: {', '.join(names)}." if names else "Load one.")
    size = entry.get("vocab_size") or (entry.get("meta") or {}).get("n_vocab")  # ours; llama.cpp's
    return Listed(entry["id"], size if isinstance(size, int) else None)


async def choose_prompts(
    client: HttpClient, form: RequestForm, how: str, vocab_size: int | None, seed: int, *, needs_text: bool
) -> Prompts:
    """Token ids where server and vocabulary allow, else words, measured with the server. Raises `StartupError`.

    `how`: one of `FORMS`. `needs_text`: a chat, or conversations.
    """
    if how == "ids" and needs_text:
        raise StartupError(
            "--prompt-form ids does not go with --endpoint chat or --workload multi-turn.",
            "Leave it out: those send text.",
        )
    if how == "ids" and vocab_size is None:
        raise StartupError(
            "The server does not say how large its vocabulary is, and --prompt-form is ids.",
            "Name a number that every id has to be below: --vocab-size 32000.",
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
    """Prompts of words; two requests measure how many tokens a word takes, and how many the server adds."""
    plain = TextPrompts(_PROBE_SEED)
    counted = []
    for words in _PROBE_WORDS:
        text = plain.piece("probe", words)
        sample = await _ask(client, form, [{"role": "user", "content": text}] if form.is_chat else text)
        if sample.failure is not None:
            raise _failed(sample)
        counted.append(sample.input_tokens)
    if not all(counted):  # no usage: words are taken for tokens
        return TextPrompts(seed)
    each = (counted[1] - counted[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
    if each <= 0:  # the server counts only what it computed, or cuts prompts
        return TextPrompts(seed)
    return replace(plain, seed=seed, tokens_per_word=each, overhead=counted[0] - each * _PROBE_WORDS[0])


async def _ask(client: HttpClient, form: RequestForm, prompt: Piece | list[dict[str, str]]) -> Sample:
    """One short request."""
    asking = Asking(client, form, Sample(0.0, 1), EventReader(is_chat=form.is_chat), time.perf_counter())
    await asking.run(form.body(prompt, 1))
    return asking.sample


def _failed(sample: Sample) -> StartupError:
    cause = f"The first request failed ({sample.failure}): {sample.detail.rstrip('.')}."
    if sample.failure == Cause.TIMEOUT:
        return StartupError(cause, "Look at the server, or give it longer: --timeout.")
    status = sample.failure.removeprefix("HTTP ") if sample.failure else ""
    return _refused(cause, int(status) if status.isdecimal() else 0)


def _refused(cause: str, status: int) -> StartupError:
    if status in (401, 403):
        return StartupError(cause, "Put the server's key into the environment: OPENAI_API_KEY.")
    if status in (400, 422):
        return StartupError(
            cause, "Leave out the field that it does not know (--no-ignore-eos), or send text: --prompt-form text."
        )
    if status == 404:
        return StartupError(cause, "Correct URL or --model, or choose the other --endpoint.")
    return StartupError(cause, "Look at the server's log.")
