"""Two nodes prove to each other that they know the group's secret, and agree on fresh keys. Does no input or output.

The two messages of `noise`, unchanged, each after eight bytes in clear that name our protocol:

    node -> head    OARNODE1, psk, e        56 bytes
    head -> node    OARNODE1, e, ee         56 bytes
    node -> head    the first message of the link

* `psk` is 32 bytes derived from the secret (HKDF-SHA256). Each message ends in a tag that only who knows it can make.
* `e` is a fresh X25519 key of each side, `ee` what both make of them. The keys of a link follow from it, the secret and
  the hash of all that was said: one for each direction, of no use in any other connection. Who learns the secret later
  cannot read what was recorded.
* The node knows the head by its answer. The head knows the node only by the first message of the link: an opening that
  was recorded and is sent again gets an answer of which the sender can make nothing.
* A message sent back to its sender fails, since the two have different places in the hash; and so does one of which any
  bit was changed, the eight bytes among them.

A secret that can be guessed can be guessed from a recording, as fast as hashes are computed: it must be random.
"""

from workers.distributed.nodes.noise import KEY_BYTES, TAG_BYTES, Initiator, Keys, NoiseError, hkdf, respond

MAGIC = b"OARNODE1"  # the last byte changes with the protocol
MESSAGE_BYTES = len(MAGIC) + KEY_BYTES + TAG_BYTES
# What the head says in clear before it hangs up. It proves nothing, and only serves to show the user a cause.
WRONG_SECRET, WRONG_PROTOCOL = b"OARWRONG", b"OAROTHER"


class HandshakeError(Exception):
    """The other side does not know the secret, speaks another protocol, or somebody changed what it said."""


class Opening:
    """The node's side of one handshake: send `message`, then give the head's answer to `finish`."""

    def __init__(self, secret: str) -> None:
        self._initiator = Initiator(_psk(secret), MAGIC)
        self.message = MAGIC + self._initiator.write()

    def finish(self, answer: bytes) -> Keys:
        """The keys of the link. Raises `HandshakeError` unless the head knows the secret and answered this opening."""
        try:
            _, keys = self._initiator.read(_without_name(answer))
        except NoiseError as error:
            raise HandshakeError("it has another secret") from error
        return keys


def answer(secret: str, opening: bytes) -> tuple[bytes, Keys]:
    """The head's side: what it says to a node's opening, and the keys of the link.

    Raises `HandshakeError` unless the opening was made with the secret. That alone proves nothing: see above.
    """
    try:
        reply, _, keys = respond(_psk(secret), MAGIC, _without_name(opening))
    except NoiseError as error:
        raise HandshakeError("it has another secret") from error
    return MAGIC + reply, keys


def _psk(secret: str) -> bytes:
    """32 bytes that stand for a secret of any length."""
    return hkdf(b"oarlock nodes", secret.encode(), KEY_BYTES)


def _without_name(message: bytes) -> bytes:
    if len(message) != MESSAGE_BYTES or not message.startswith(MAGIC):
        raise HandshakeError("it does not speak the protocol of nodes")
    return message[len(MAGIC) :]
