"""The messages of workers, launchers and coordinator: JSON lines of limited size; a token's proof by HMAC."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

LIMIT_BYTES = 1 << 20  # of a line; the longest hold an identity, or the addresses of hundreds of workers
HELLO_BYTES = 1 << 10  # of a line from a connection that has not proven the token yet
Message = dict[str, Any]


def pack(op: str, **fields: Any) -> bytes:
    """A message as a line."""
    line = json.dumps({"op": op, **fields}).encode() + b"\n"
    assert len(line) <= LIMIT_BYTES, f"a message '{op}' of {len(line)} bytes"
    return line


def unpack(line: bytes) -> Message:
    """The message of a line; ValueError for anything else."""
    if len(line) > LIMIT_BYTES or not line.endswith(b"\n"):
        raise ValueError("a message is one whole line")
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ValueError("a message is an object with an 'op'")
    return message


def prove(token: str, nonce: str, side: str) -> str:
    """The answer to a nonce, which only a holder of the token knows; it differs between the two sides."""
    return hmac.new(token.encode(), f"lockstep {side} {nonce}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, token: str, nonce: str, side: str) -> bool:
    """Whether an answer is right, compared in constant time."""
    expected = prove(token, nonce, side)
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, expected)
