"""Peer links under TLS, where both sides show a certificate that the deployment's CA has signed.

Whoever has one belongs to the deployment: names in it are not compared with anything, as one may be for all hosts.
Who speaks, which incarnation it is and what it may exchange is in the greetings, as without TLS.
"""

from __future__ import annotations

import selectors
import socket
import ssl
from collections.abc import Sequence

from penstock.core.errors import ConfigError
from penstock.transfer.frames import Stranger

RECORDS = 64 << 10  # bytes given to the library at once; it wants the same ones again when the kernel had no room


class TLS:
    """
    Args:
        certificate, key: PEM files of this side's; the key without a passphrase.
        ca: PEM file of the CA that has signed everybody's.

    Raises:
        ConfigError: one of the files cannot be used.
    """

    def __init__(self, certificate: str, key: str, ca: str) -> None:
        self._contexts = {}
        for dialled, protocol in ((True, ssl.PROTOCOL_TLS_CLIENT), (False, ssl.PROTOCOL_TLS_SERVER)):
            context = self._contexts[dialled] = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(ca)
            except OSError as error:
                raise ConfigError(f"transport.tls.ca: {ca!r}, {_unusable(error)}", "ca") from error
            try:
                context.load_cert_chain(certificate, key, password="")  # else it would ask the terminal
            except OSError as error:
                files = f"{certificate!r} and key {key!r}"
                raise ConfigError(f"transport.tls.certificate: {files}, {_unusable(error)}", "certificate") from error
        self._contexts[False].num_tickets = 0  # nobody resumes, and one that is not read makes a reset of a close

    def over(self, sock: socket.socket, dialled: bool) -> TLSSocket:
        """TLS over a connected, non-blocking socket, which belongs to it from now on."""
        return TLSSocket(self._contexts[dialled].wrap_socket(sock, not dialled, do_handshake_on_connect=False))

    def over_waiting(self, sock: socket.socket, dialled: bool) -> ssl.SSLSocket:
        """The same over one that is waited for, when both have shaken hands. Raises Stranger, EOFError and OSError."""
        try:
            return self._contexts[dialled].wrap_socket(sock, not dialled)
        except ssl.SSLError as error:
            raise _told(error) from error


class TLSSocket:
    """What a `PeerConnection` uses of a socket. Stranger when the other side is none of the deployment's, or stops to
    speak TLS."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def shake_hands(self) -> int:
        """Go on with the handshake. The selector event that it waits for; 0 when it is over."""
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except ssl.SSLError as error:
            raise _told(error) from error
        return 0

    @property
    def pending(self) -> bool:
        """Whether there is something to read of which no selector tells."""
        return self._sock.pending() > 0

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        count = 0
        try:
            for view in views:
                filled = 0
                while filled < len(view):
                    if not (read := self._sock.recv_into(view[filled:])):
                        return (count,)
                    filled += read
                    count += read
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not count:
                raise BlockingIOError from None
        except ssl.SSLError as error:
            raise _told(error) from error
        return (count,)

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        count = 0
        try:
            for view in views:
                for begin in range(0, len(view), RECORDS):
                    count += self._sock.send(view[begin : begin + RECORDS])  # all of that, or it raises
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except ssl.SSLError as error:
            raise _told(error) from error
        return count


def _told(error: ssl.SSLError) -> Exception:
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return EOFError("it hung up in the middle of TLS; does it speak that?")
    return Stranger(_why(error))


def _unusable(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return f"cannot be read: {error.strerror}"
    return f"cannot be used: {(error.reason or 'it is no PEM').lower().replace('_', ' ')}"


def _why(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not one of this deployment: {error.verify_message}"
    reason = error.reason or "unknown"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate"
    said = reason.lower().replace("_", " ")
    return f"it does not accept this side's certificate: {said}" if "ALERT" in reason else f"no TLS as expected: {said}"
