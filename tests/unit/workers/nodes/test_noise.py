"""The handshake between nodes: a published example, and everything an attacker can do to two messages."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from workers.distributed.nodes.handshake import MAGIC, MESSAGE_BYTES, HandshakeError, Opening, answer
from workers.distributed.nodes.noise import Initiator, NoiseError, nonce, respond

SECRET = "a secret of more than 32 characters, for tests only"

# Noise_NNpsk0_25519_AESGCM_SHA256 of the published test vectors of cacophony (vectors/cacophony.txt).
PROLOGUE = b"John Galt"
PSK = b"This is my Austrian perspective!"
INITIATOR = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
RESPONDER = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
MESSAGES = [
    (
        b"Ludwig von Mises",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1",
    ),
    (
        b"Murray Rothbard",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "2f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461",
    ),
    (b"F. A. Hayek", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"),
    (b"Carl Menger", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"),
    (b"Jean-Baptiste Say", "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd"),
    (b"Eugen B\xf6hm von Bawerk", "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9"),
]


def private_key(digits: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(digits))


def test_it_is_the_published_protocol():
    (first, first_bytes), (second, second_bytes), *rest = MESSAGES
    initiator = Initiator(PSK, PROLOGUE, private_key(INITIATOR))
    message = initiator.write(first)
    assert message.hex() == first_bytes
    reply, received, theirs = respond(PSK, PROLOGUE, message, second, private_key(RESPONDER))
    assert received == first and reply.hex() == second_bytes
    received, ours = initiator.read(reply)
    assert received == second
    assert (ours.sending, ours.receiving) == (theirs.receiving, theirs.sending)
    assert ours.transcript == theirs.transcript
    for number, (payload, sealed) in enumerate(rest):  # in turn, the initiator first
        key = (ours, theirs)[number % 2].sending
        assert AESGCM(key).encrypt(nonce(number // 2), payload, b"").hex() == sealed


def test_both_sides_of_a_connection_get_keys_of_its_own():
    found = []
    for _ in range(2):
        opening = Opening(SECRET)
        reply, head = answer(SECRET, opening.message)
        node = opening.finish(reply)
        assert (node.sending, node.receiving) == (head.receiving, head.sending)
        found += [node.sending, node.receiving, node.transcript]
    assert len(set(found)) == len(found)
    assert SECRET not in repr(found) and "sending" not in repr(node)


def test_each_side_refuses_another_secret():
    opening = Opening(SECRET)
    with pytest.raises(HandshakeError, match="another secret"):
        answer(SECRET + " ", opening.message)
    reply, _ = answer(SECRET, Opening(SECRET).message)
    with pytest.raises(HandshakeError, match="another secret"):
        Opening(SECRET + " ").finish(reply)


@pytest.mark.parametrize("position", range(MESSAGE_BYTES))
def test_a_changed_byte_at_any_position_is_refused_by_either_side(position):
    opening = Opening(SECRET)

    def changed(message: bytes, bit: int) -> bytes:
        return message[:position] + bytes([message[position] ^ bit]) + message[position + 1 :]

    for bit in (1, 0x80):
        with pytest.raises(HandshakeError):
            answer(SECRET, changed(opening.message, bit))
    reply, _ = answer(SECRET, opening.message)
    with pytest.raises(HandshakeError):
        opening.finish(changed(reply, 1))


def test_a_message_sent_back_to_who_made_it_is_refused():
    opening = Opening(SECRET)
    with pytest.raises(HandshakeError):
        opening.finish(opening.message)
    reply, _ = answer(SECRET, opening.message)
    with pytest.raises(HandshakeError):
        answer(SECRET, reply)


def test_a_repeated_message_gives_nothing_to_who_repeats_it():
    opening = Opening(SECRET)
    first, of_first = answer(SECRET, opening.message)
    second, of_second = answer(SECRET, opening.message)
    assert first != second and of_first.receiving != of_second.receiving
    with pytest.raises(HandshakeError):  # a recorded answer to a new opening
        Opening(SECRET).finish(first)


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)])
def test_a_key_of_small_order_is_refused_although_the_secret_is_right(point):
    class Bad:
        """A key whose public half is chosen by who knows the secret."""

        def public_key(self):
            return self

        def public_bytes_raw(self) -> bytes:
            return point

    message = Initiator(PSK, PROLOGUE, Bad()).write()  # type: ignore[arg-type]
    with pytest.raises(NoiseError, match="its key is none"):
        respond(PSK, PROLOGUE, message)


@pytest.mark.parametrize("message", [b"", MAGIC, b"GET / HTTP/1.1\r\n\r\n", bytes(MESSAGE_BYTES), bytes(1000)])
def test_what_is_no_handshake_is_refused(message):
    with pytest.raises(HandshakeError, match="protocol of nodes"):
        answer(SECRET, message)
    with pytest.raises(HandshakeError, match="protocol of nodes"):
        Opening(SECRET).finish(message)
