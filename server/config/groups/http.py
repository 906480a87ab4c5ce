"""Options of HTTP: where the server listens, who may ask, and what a request may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.server.config.options import option

_GROUP = "HTTP"


@dataclass(frozen=True)
class HttpSettings:
    """Options of the group `HTTP`."""

    host: str = option(
        "127.0.0.1",
        group=_GROUP,
        example="0.0.0.0",
        help="address to listen on; beyond loopback, set an --api-key",
    )
    port: int = option(
        8000, group=_GROUP, example="8080", minimum=0, maximum=65535, help="port to listen on; 0: any free one"
    )
    uds: str | None = option(
        None,
        group=_GROUP,
        example="/run/oarlock/http.sock",
        help="Unix socket to listen on in place of --host and --port; its folder decides who may connect",
    )
    ssl_certfile: str | None = option(
        None,
        group=_GROUP,
        example="/etc/letsencrypt/live/llm.example.org/fullchain.pem",
        help="serve HTTPS with this certificate and its chain, in PEM; renewed files are taken over within seconds",
    )
    ssl_keyfile: str | None = option(
        None,
        group=_GROUP,
        example="/etc/letsencrypt/live/llm.example.org/privkey.pem",
        help="the certificate's private key, in PEM and without a passphrase",
    )
    root_path: str | None = option(
        None,
        group=_GROUP,
        example="/llm",
        help="path below which a proxy shows this server; requests are answered with it and without",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        group=_GROUP,
        example="https://chat.example.org",
        help="origins whose web pages may use this server from a browser (CORS); * for any",
    )
    api_key: tuple[str, ...] = option(
        (),
        group=_GROUP,
        example="KEY",
        secret=True,
        help="keys that clients must send as a bearer token; better in OARLOCK_API_KEY than on the command line",
    )
    api_key_file: str | None = option(
        None,
        group=_GROUP,
        example="keys.txt",
        help="file of more keys, one per line, with an optional label before each; the request log shows the label",
    )
    admin_api_key: str | None = option(
        None,
        group=_GROUP,
        example="KEY",
        secret=True,
        help="key of the /admin routes and of /v1/requests, and of nothing else; without one /admin is closed; better "
        "in OARLOCK_ADMIN_API_KEY",
    )
    open_metrics: bool = option(
        False,
        group=_GROUP,
        example="",
        help="answer /metrics and /v1/state without a key beyond loopback, too: for routers that have none; without "
        "any keys also /v1/requests",
    )
    web_page: bool = option(
        True, group=_GROUP, example="", help="serve a web page at /: chat, the live state, and the model's card"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        group=_GROUP,
        example="llm.example.org *.lan",
        help="more names that the Host header may have where no key is required; such as the public name of a proxy; "
        "*.example.org for all below it, * for any",
    )
    max_body_size: int = option(
        16 * 2**20,
        group=_GROUP,
        example="32MiB",
        is_bytes=True,
        minimum=1024,
        maximum=2**30,
        help="larger request bodies are refused (413)",
    )
    body_memory: int = option(
        128 * 2**20,
        group=_GROUP,
        example="512MiB",
        is_bytes=True,
        minimum=2**20,
        maximum=2**40,
        help="memory for all request bodies together that are being received or parsed; more are refused (503) with "
        "Retry-After, but one alone never is",
    )
    response_store: int = option(
        64 * 2**20,
        group=_GROUP,
        example="0",
        is_bytes=True,
        minimum=0,
        maximum=2**36,
        help="memory for the responses of /v1/responses that previous_response_id goes on from; all that they take "
        "counts, the oldest are dropped first; 0: none is kept",
    )
    batch_dir: str | None = option(
        None,
        group=_GROUP,
        example="/var/lib/oarlock/batches",
        help="directory for /v1/files and /v1/batches, served only with it; batches go on after a restart",
    )
    batch_dir_size: int = option(
        16 * 2**30,
        group=_GROUP,
        example="64GiB",
        is_bytes=True,
        minimum=2**20,
        maximum=2**50,
        help="what the files of --batch-dir may hold together; more is refused (413), and a batch ends as failed; of "
        "several API keys each may hold as much as it leaves free",
    )
    strict_parameters: bool = option(
        False,
        group=_GROUP,
        example="",
        help="refuse unknown request parameters (400) instead of reporting them in X-Ignored-Parameters",
    )
    strict_max_tokens: bool = option(
        False,
        group=_GROUP,
        example="",
        help="refuse a token limit that does not fit the context (400) instead of lowering it",
    )
    always_stream_usage: bool = option(
        False, group=_GROUP, example="", help="end every stream with a chunk of usage, even when not requested"
    )
    ignore_model_case: bool = option(
        False, group=_GROUP, example="", help="accept the served names in upper or lower case"
    )
    request_timeout: float | None = option(
        None,
        unset="none",
        group=_GROUP,
        example="600",
        minimum=0.001,
        maximum=86_400,
        help="seconds that any request may take, waiting included; requests may ask for less (default: no limit)",
    )
    drain_timeout: float = option(
        30.0,
        group=_GROUP,
        example="60",
        minimum=0,
        maximum=3600,
        help="seconds that running requests get to finish after SIGTERM or Ctrl-C",
    )
    metrics_prefix: str = option(
        "vllm:",
        group=_GROUP,
        example="llm:",
        help="what names of metrics begin with that routers and dashboards read; with another they do not find them",
    )
