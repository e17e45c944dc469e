"""Mutual TLS between launchers: a folder's certificate, proven at the start, and what a refusal means."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

from lockstep.errors import LockstepError, SpecError

_CA, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"  # as Kubernetes names them in a secret
_ROUNDS = 8  # of messages; TLS 1.3 shakes hands in three
_ADVICE = "docs/jobs.md says how certificates are made"


class Certificates:
    """Both sides of TLS 1.3 with the files of a folder; each side shows the same certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in (_CA, _CERTIFICATE, _KEY):
            if not (folder / name).is_file():
                raise SpecError(f"--tls {folder}: there is no file {name} in it: {_ADVICE}")
        self.server = self._load(ssl.PROTOCOL_TLS_SERVER)
        self.client = self._load(ssl.PROTOCOL_TLS_CLIENT)
        self._try_with_itself()

    def explain(self, error: ssl.SSLError, rdzv: str) -> LockstepError:
        """Why the coordinator at `rdzv` and this launcher do not trust each other."""
        if isinstance(error, ssl.SSLCertVerificationError):
            why = f"its certificate is refused: {error.verify_message.rstrip('.')}"
        elif "ALERT" in (error.reason or ""):
            why = f"it refuses {self._folder / _CERTIFICATE}: {_said(error)}"
        else:
            why = (
                f"what listens there speaks no TLS ({_said(error)}): give --tls to all launchers, or to none"
            )
        return LockstepError(f"--rdzv {rdzv}: {why}")

    def _load(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        for name, into in ((_CA, context), (_CERTIFICATE, ssl.SSLContext(side))):  # the second only tries
            try:
                into.load_verify_locations(self._folder / name)
            except (OSError, ValueError) as error:
                raise self._bad(name, _said(error)) from None
        try:
            context.load_cert_chain(self._folder / _CERTIFICATE, self._folder / _KEY, password="")
        except (OSError, ValueError) as error:
            is_named = getattr(error, "reason", None) not in (None, "PEM_LIB")
            why = _said(error) if is_named else "no private key in PEM, or one with a password"
            raise self._bad(_KEY, why) from None
        return context

    def _try_with_itself(self) -> None:
        """Shake hands with oneself in memory, so that what others would refuse is found before the start."""
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client.check_hostname = False  # the name is the coordinator's alone
        sides = self.client.wrap_bio(down, up), self.server.wrap_bio(up, down, server_side=True)
        for _ in range(_ROUNDS):
            for side in sides:
                try:
                    with suppress(ssl.SSLWantReadError):
                        side.do_handshake()
                except ssl.SSLError as error:
                    raise self._bad(_CERTIFICATE, _said(error)) from None
        self.client.check_hostname = True

    def _bad(self, name: str, why: str) -> SpecError:
        return SpecError(f"--tls {self._folder}: {name} cannot be used: {why}: {_ADVICE}")


def _said(error: Exception) -> str:
    """What OpenSSL says, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return reason.replace("_", " ").lower()
