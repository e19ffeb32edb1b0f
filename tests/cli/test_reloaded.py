"""What a server reads from files, and again when they change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import reloaded
from penstock.cli.reloaded import Reloaded, ServerTLS, check_files, read_keys
from penstock.core.errors import ConfigError
from tests.helpers.certificates import NEEDS_OPENSSL, certificate

NOTHING: dict[str, Any] = {
    "api_key_file": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "ssl_ca_certs": None,
    "ssl_cert_reqs": "none",
}


def replace(path: Path, text: str | bytes) -> None:
    """In one step, as whoever distributes secrets does it."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(beside, path)


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# who has them\n one \n\ntwo\none\n")
    assert read_keys(str(file)) == ("one", "two")


@pytest.mark.parametrize(
    ("content", "says"), [(b"# none\n\n", "has no key"), (b"\xff\n", "not UTF-8"), (None, "No such file")]
)
def test_a_file_without_keys_is_refused(tmp_path, content, says):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        check_files({**NOTHING, "api_key_file": str(file)})
    assert (str(file) in str(caught.value), caught.value.field) == (True, "api-key-file")


def test_what_has_changed_is_read_and_what_cannot_be_read_stays(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "penstock.server")
    monkeypatch.setattr(reloaded, "LOOK", 0.01)
    file, keys, times = tmp_path / "keys", [()], []

    def read():
        times.append(file.read_text())
        keys[0] = read_keys(str(file))

    async def reading_of(content):
        replace(file, content)
        while times[-1] != content:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)

    async def go():
        following = Reloaded("API keys", [str(file)], read)
        assert keys[0] == ("one",)
        task = asyncio.create_task(following.run())
        await reading_of("two\n")
        assert keys[0] == ("two",)
        await reading_of("# nobody\n")
        assert keys[0] == ("two",)
        file.unlink()
        await reading_of("three\nfour\n")
        assert keys[0] == ("three", "four")
        read_so_far = len(times)
        await asyncio.sleep(0.05)  # what is as it was is not read
        assert len(times) == read_so_far
        following.read_again("at SIGHUP")
        assert len(times) == read_so_far + 1
        task.cancel()

    file.write_text("one\n")
    asyncio.run(asyncio.wait_for(go(), 20))
    assert "has no key" in caplog.text


@NEEDS_OPENSSL
class TestTLS:
    @pytest.fixture
    def options(self, tmp_path) -> dict[str, Any]:
        """Files of a server that may be replaced."""
        options = {**NOTHING, "ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
        self.use(options, "one")
        return options

    @staticmethod
    def use(options: dict[str, Any], ca: str) -> None:
        replace(Path(options["ssl_keyfile"]), Path(certificate(ca)["key"]).read_bytes())
        replace(Path(options["ssl_certfile"]), Path(certificate(ca)["certificate"]).read_bytes())

    @pytest.mark.parametrize(
        ("changes", "field", "says"),
        [
            ({"ssl_certfile": None}, "ssl-keyfile", "allowed only with ssl-certfile"),
            ({"ssl_certfile": "/no/such/file"}, "ssl-certfile", "No such file"),
            ({"ssl_keyfile": "another's"}, "ssl-certfile", "key values mismatch"),
            ({"ssl_ca_certs": "/no/such/file"}, "ssl-ca-certs", "No such file"),
            ({"ssl_cert_reqs": "required"}, "ssl-cert-reqs", "without ssl-ca-certs"),
        ],
    )
    def test_a_mistake_names_the_setting(self, options, changes, field, says):
        check_files(options)
        if changes.get("ssl_keyfile"):
            changes = {"ssl_keyfile": certificate("two")["key"]}
        with pytest.raises(ConfigError, match=says) as caught:
            check_files(options | changes)
        assert caught.value.field == field

    def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(self, options):
        path = options["ssl_keyfile"]
        words = ("openssl", "ec", "-in", certificate("one")["key"], "-out", path, "-aes256", "-passout", "pass:word")
        subprocess.run(words, check=True, capture_output=True)
        with pytest.raises(ConfigError, match="has a passphrase"):
            check_files(options)

    def test_each_handshake_gets_what_was_read_last(self, options):
        tls = ServerTLS(options)
        assert handshake(tls, "one")
        self.use(options, "two")
        assert handshake(tls, "one"), "nothing was read yet"
        tls.read()
        assert handshake(tls, "two")
        assert not handshake(tls, "one")
        Path(options["ssl_certfile"]).write_text("no certificate")
        with pytest.raises(ConfigError):
            tls.read()
        assert handshake(tls, "two")

    def test_clients_certificates_are_asked_for_and_their_ca_may_change(self, options, tmp_path):
        ca = tmp_path / "ca.pem"
        shutil.copy(certificate("clients")["ca"], ca)
        tls = ServerTLS(options | {"ssl_ca_certs": str(ca), "ssl_cert_reqs": "required"})
        assert handshake(tls, "one", client="clients")
        assert not handshake(tls, "one", client="strangers")
        assert not handshake(tls, "one")
        shutil.copy(certificate("strangers")["ca"], ca)
        tls.read()
        assert handshake(tls, "one", client="strangers")
        assert not handshake(tls, "one", client="clients")


def handshake(tls: ServerTLS, trusts: str, client: str | None = None) -> bool:
    """Whether a client that trusts this CA, with a certificate of another or none, gets a byte from the server."""
    theirs = ssl.create_default_context(cafile=certificate(trusts)["ca"])
    theirs.check_hostname = False
    if client is not None:
        theirs.load_cert_chain(certificate(client)["certificate"], certificate(client)["key"])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [tls.context.wrap_bio(to_server, to_client, server_side=True), theirs.wrap_bio(to_client, to_server)]
    server, client_end = ends
    try:
        for _ in range(10):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        server.write(b"x")  # with TLS 1.3 a client learns only now that its certificate is refused
        return client_end.read() == b"x"
    except ssl.SSLError:
        return False
