"""`Noise_NNpsk0_25519_AESGCM_SHA256` of the Noise Protocol Framework: two messages, then a key for each direction.

By Trevor Perrin's specification, revision 34 (https://noiseprotocol.org/noise.html), sections 5.2 and 9:

    initiator -> responder    psk, e        32 bytes of key, then the sealed payload with a tag of 16
    responder -> initiator    e, ee         the same

Does no input or output, and does not know who speaks.
"""

import hashlib
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
TAG_BYTES = 16
_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"  # as long as a hash, so the hash begins as this


class NoiseError(Exception):
    """A message was not made with the same psk and prologue, not for this handshake, or it was changed."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a handshake gives one side: a key for each direction, 32 bytes each, and the hash of what was said."""

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)
    transcript: bytes  # equal on both sides, different in each handshake


class Initiator:
    """The side that speaks first: `write`, then `read`."""

    def __init__(self, psk: bytes, prologue: bytes, key: X25519PrivateKey | None = None) -> None:
        """`key` is fresh for each handshake; only tests of published examples give theirs."""
        self._state = _Symmetric(prologue)
        self._state.mix_key_and_hash(psk)
        self._key = key or X25519PrivateKey.generate()

    def write(self, payload: bytes = b"") -> bytes:
        return self._state.write_key(self._key) + self._state.seal(payload)

    def read(self, message: bytes) -> tuple[bytes, Keys]:
        """The responder's payload, and the keys. Raises `NoiseError`."""
        self._state.read_key(message[:KEY_BYTES])
        self._state.mix_shared(self._key, message[:KEY_BYTES])
        payload = self._state.open(message[KEY_BYTES:])
        of_initiator, of_responder = self._state.split()
        return payload, Keys(of_initiator, of_responder, self._state.hash)


def respond(
    psk: bytes, prologue: bytes, message: bytes, payload: bytes = b"", key: X25519PrivateKey | None = None
) -> tuple[bytes, bytes, Keys]:
    """The other side: what it says to `message` with its own `payload`, the initiator's payload, and the keys.

    Raises `NoiseError`. The message may be a repeated one: only who made it can use the keys.
    """
    state = _Symmetric(prologue)
    state.mix_key_and_hash(psk)
    state.read_key(message[:KEY_BYTES])
    received = state.open(message[KEY_BYTES:])
    key = key or X25519PrivateKey.generate()
    own = state.write_key(key)
    state.mix_shared(key, message[:KEY_BYTES])
    reply = own + state.seal(payload)
    of_initiator, of_responder = state.split()
    return reply, received, Keys(of_responder, of_initiator, state.hash)


def nonce(counter: int) -> bytes:
    """The nonce of AES-GCM for message `counter` under a key."""
    return bytes(4) + counter.to_bytes(8, "big")


def hkdf(salt: bytes, material: bytes, length: int) -> bytes:
    """HKDF-SHA256; Noise's outputs of 32 bytes each are the parts of one longer output."""
    return HKDF(hashes.SHA256(), length, salt, b"").derive(material)


class _Symmetric:
    """The specification's SymmetricState, with the tokens of our pattern."""

    def __init__(self, prologue: bytes) -> None:
        self.hash = self._chaining = _NAME
        self._key = b""
        self._counter = 0
        self._mix_hash(prologue)

    def mix_key_and_hash(self, material: bytes) -> None:
        """Token psk."""
        derived = hkdf(self._chaining, material, 3 * KEY_BYTES)
        self._chaining = derived[:KEY_BYTES]
        self._mix_hash(derived[KEY_BYTES : 2 * KEY_BYTES])
        self._set_key(derived[2 * KEY_BYTES :])

    def write_key(self, key: X25519PrivateKey) -> bytes:
        """Token e where it is sent."""
        public = key.public_key().public_bytes_raw()
        self.read_key(public)
        return public

    def read_key(self, public: bytes) -> None:
        """Token e; in a pattern with psk it is mixed into the key as well."""
        self._mix_hash(public)
        self._mix_key(public)

    def mix_shared(self, own: X25519PrivateKey, public: bytes) -> None:
        """Token ee."""
        try:
            self._mix_key(own.exchange(X25519PublicKey.from_public_bytes(public)))
        except ValueError as error:  # of small order: what both make of it is known to all
            raise NoiseError("its key is none") from error

    def seal(self, data: bytes) -> bytes:
        sealed = AESGCM(self._key).encrypt(nonce(self._counter), data, self.hash)
        self._counter += 1
        self._mix_hash(sealed)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        try:
            data = AESGCM(self._key).decrypt(nonce(self._counter), sealed, self.hash)
        except InvalidTag as error:
            raise NoiseError("its tag is wrong") from error
        self._counter += 1
        self._mix_hash(sealed)
        return data

    def split(self) -> tuple[bytes, bytes]:
        """The initiator's key, and the responder's."""
        derived = hkdf(self._chaining, b"", 2 * KEY_BYTES)
        return derived[:KEY_BYTES], derived[KEY_BYTES:]

    def _mix_key(self, material: bytes) -> None:
        derived = hkdf(self._chaining, material, 2 * KEY_BYTES)
        self._chaining = derived[:KEY_BYTES]
        self._set_key(derived[KEY_BYTES:])

    def _set_key(self, key: bytes) -> None:
        self._key, self._counter = key, 0

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()
