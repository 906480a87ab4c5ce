"""A real chat in a terminal as an animated picture, docs/terminal-chat.svg: `make screenshots` records it.

Every row is shown for as long as it stood on the terminal; keys are typed as fast as a person types.
"""

from __future__ import annotations

import tempfile
import time
from html import escape
from pathlib import Path

from tests.e2e.running import DEMO, ROOT, RunningServer, command, environment
from tests.e2e.shown_rows import ShownRows
from tests.e2e.terminal import Terminal

FILE = ROOT / "docs" / "terminal-chat.svg"
TYPED = ("What does os.path.join do?", "/stats")
COLUMNS, ROW, LETTER = 88, 20, 8.4  # and pixels
KEY_S, PAUSE_S, HOLD_S = 0.06, 0.8, 5.0
STYLE = """.page { fill: #0d1117 } text { fill: #e6edf3; font: 14px ui-monospace, monospace; white-space: pre }
.typed { fill: #7ee787 } .gone { opacity: 0 }
@media (prefers-reduced-motion: reduce) { text { animation: none !important } }"""
Moment = tuple[float, list[str]]  # seconds since the begin, and the rows then


def record(url: str) -> list[Moment]:
    """The rows of the terminal at each change."""
    moments: list[Moment] = []
    with tempfile.TemporaryDirectory() as state:
        words = command("chat", url, "--temperature", "0")
        with Terminal(words, environment(XDG_STATE_HOME=state), columns=COLUMNS) as terminal:
            terminal.expect("\n> ")
            began = time.monotonic()
            for line in TYPED:
                _watch(terminal, moments, began, PAUSE_S)
                for key in line:
                    terminal.type(key)
                    _watch(terminal, moments, began, KEY_S)
                terminal.type("\n")
                _watch(terminal, moments, began, 3.0)
    return moments


def _watch(terminal: Terminal, moments: list[Moment], began: float, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        terminal.look(min(0.05, until - time.monotonic()))
        rows = ShownRows(COLUMNS)
        rows.feed(terminal.raw)
        shown = ["$ oarlock chat", *rows.text.rstrip("\n").split("\n")]
        if not moments or moments[-1][1] != shown:
            moments.append((round(time.monotonic() - began, 2), shown))


def drawn(moments: list[Moment]) -> str:
    """The picture: a row's text fades in and out with its times, again and again."""
    whole_s = moments[-1][0] + HOLD_S
    last = moments[-1][1]
    spans: list[tuple[int, str, float, float]] = []  # row, text, from, until
    for number in range(max(len(rows) for _, rows in moments)):
        since, text = 0.0, ""
        for at, rows in [*moments, (whole_s, [])]:
            now = rows[number] if number < len(rows) else ""
            if now != text or at == whole_s:
                spans += [(number, text, since, at)] if text.strip() else []
                since, text = at, now
    styles, parts = [STYLE], []
    for at, (number, text, since, until) in enumerate(spans):
        is_last = until == whole_s
        ends = "" if is_last else f"{100 * until / whole_s:.2f}%{{opacity:0}}"
        begins = "0%{opacity:1}" if since == 0 else f"0%{{opacity:0}}{100 * since / whole_s:.2f}%{{opacity:1}}"
        styles.append(f"@keyframes k{at}{{{begins}{ends}}}#t{at}{{animation:k{at} {whole_s:.1f}s step-end infinite}}")
        kind = " ".join([*(["typed"] if text.startswith((">", "$")) else []), *([] if is_last else ["gone"])])
        parts.append(f'<text id="t{at}" class="{kind}" x="12" y="{24 + ROW * number}">{escape(text)}</text>')
    width, height = round(COLUMNS * LETTER) + 24, ROW * len(last) + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title">\n<title id="title">A question to the demo model in a terminal</title>'
    )
    page = f'<rect class="page" width="{width}" height="{height}" rx="8"/>'
    return "\n".join([head, f"<style>{chr(10).join(styles)}</style>", page, *parts, "</svg>"]) + "\n"


def main(url: str | None = None, file: Path = FILE) -> None:
    """Record and draw; without `url`, a server is started for it."""
    if url is not None:
        file.write_text(drawn(record(url)))
        return
    with RunningServer(DEMO) as server:
        main(server.url, file)


if __name__ == "__main__":
    main()
