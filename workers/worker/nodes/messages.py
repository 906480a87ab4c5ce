"""What the head and the other nodes say to each other on a link once all have joined, and how a link is kept alive.

head -> node    START        where rank 0's store is: the node starts its ranks
node -> head    RANK         what a rank has sent on its control channel
head -> node    TELL         what every rank of the node gets on its control channel
head -> node    STEP         the bytes of a step, as they lie in the ring
head -> node    FIRST_PART   the same of a step whose masks follow, without their bytes
head -> node    MASKS        the masks of the step before
node -> head    ANSWER       the bytes of an answer, from the node of the answering rank
head -> node    PING         answered by PONG when the ranks have finished every step before
head -> node    PLACES       answered by PLACES with how far each rank has come; its ranks write their stacks
both            BEAT         once a second
node -> head    LEAVE        the node's operator wants it to stop: the head ends all
head -> node    END          the group has ended, in order or because of a failure
"""

import json
import time
from collections.abc import Callable
from typing import Any, Final

from workers.distributed.nodes.link import Link

START: Final = 1
RANK: Final = 2
TELL: Final = 3
STEP: Final = 4
FIRST_PART: Final = 5
MASKS: Final = 6
ANSWER: Final = 7
PING: Final = 8
PONG: Final = 9
PLACES: Final = 10
BEAT: Final = 11
LEAVE: Final = 12
END: Final = 13

BEAT_S = 1.0
SILENCE_S = 5.0  # without a message, the other side is lost


def packed(**fields: Any) -> bytes:
    """The payload of a message that is no step and no answer."""
    return json.dumps(fields).encode()


def unpacked(payload: bytes) -> dict[str, Any]:
    return json.loads(payload)


class Pulse:
    """Beats on a link, and says when the other side has not. Its owner calls `heard` for each message that came, and
    `beat` at least every `BEAT_S`, after it has read what there was."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._heard_s = clock()
        self._next_s = clock()

    def heard(self) -> None:
        self._heard_s = self._clock()

    @property
    def seconds_left(self) -> float:
        """Until the next beat."""
        return max(0.0, self._next_s - self._clock())

    def beat(self) -> None:
        """Send a beat if one is due. Raises `LinkLostError` when the other side has been silent for too long."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + BEAT_S
        if now - self._heard_s > SILENCE_S:
            self._link.close(f"has said nothing for {SILENCE_S:g} s")
        self._link.send(BEAT)
