"""Files and URLs that are made to break who takes them: each is refused by name, and nothing private is asked."""

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("PIL")
pytest.importorskip("av")

from penstock.core.errors import InvalidRequest, Overloaded
from penstock.media import sources
from penstock.media.limits import MediaLimits
from penstock.media.loader import MediaLoader
from penstock.media.processor import Processor, Refused
from tests.helpers.hostile import PRIVATE, data_url, encoded, files, urls, video

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"
PROCESSOR = Processor(
    image_token=1,
    video_token=2,
    factor=28,
    frames=2,
    least=56 * 56,
    most=1 << 20,
    least_video=56 * 56,
    most_video=1 << 20,
    fps=2.0,
    least_frames=4,
    most_frames=16,
    per_second=2.0,
    settings="",
)
HOSTS = tuple(host.strip("[]") for host in PRIVATE)
LIMITS = MediaLimits(bytes=1 << 20, pixels=1 << 22, domains=(*HOSTS, "allowed.example"), fetch_seconds=2.0)


@pytest.fixture
async def loader(frontend):
    frontend.media = MediaLoader(PROCESSOR, LIMITS)
    yield frontend.media
    frontend.media.close()


@pytest.fixture
def listener():
    """A server on loopback, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            answer = ANSWERS[self.path]
            for part in answer:
                self.wfile.write(part)
            self.close_connection = True

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_address[1], asked
        server.shutdown()
        thread.join()


def answered(body: bytes, *more: str, status: str = "200 OK") -> list[bytes]:
    return ["\r\n".join([f"HTTP/1.1 {status}", *more, "", ""]).encode(), body]


ANSWERS = {
    "/good": answered(b"x" * 100, "Content-Length: 100"),
    "/unsized": answered(b"x" * 100),
    "/long": answered(b"", "Content-Length: 99999999"),
    "/longer than said": answered(b"x" * (2 << 20)),
    "/short": answered(b"x" * 10, "Content-Length: 100"),
    "/redirect": answered(b"", "Location: /good", "Content-Length: 0", status="302 Found"),
    "/missing": answered(b"", "Content-Length: 0", status="404 Not Found"),
    "/nonsense": [b"\0\1\2\3\r\n\r\n"],
    "/headers": [b"HTTP/1.1 200 OK\r\n", *[b"A: b\r\n"] * 1000, b"\r\n"],
}


def body(kind: str, url: object) -> dict:
    part = {"type": kind, kind: {"url": url}}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]}


async def refused(client, kind: str, url: object) -> str:
    answer = await client.post(URL, json=body(kind, url))
    assert answer.status_code == 400, (url if not isinstance(url, str) else url[:80], answer.text)
    error = answer.json()["error"]
    assert error["param"] == f"messages[0].content[1].{kind}"
    assert error["message"].startswith(error["param"])
    assert len(error["message"]) < 500
    return error["message"]


async def test_files(client, loader):
    cases = list(files())
    assert len(cases) > 50
    for name, kind, url, said in cases:
        assert said in await refused(client, kind, url), name
    peak = [worker_peak(worker) for worker in loader._all if worker._process is not None]
    assert peak
    assert max(peak) < 600 << 20, "what decodes has taken much memory"
    made = loader._all[0].make("image", encoded("PNG"), PROCESSOR, LIMITS)
    assert made.shape == (1, 56, 56)


def worker_peak(worker) -> int:
    with open(f"/proc/{worker._process.pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


async def test_urls(client, loader, listener):
    port, asked = listener
    for url, said in urls(port):
        assert said in await refused(client, "image_url", url), url
    for other in (7, None, "", [], {"url": 3}):
        await refused(client, "image_url", other)
    assert asked == []


async def test_what_may_be_asked_for(client, loader):
    parts = [{"type": "image_url", "image_url": {"url": data_url(encoded("PNG"))}}] * 17
    answer = await client.post(URL, json={"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[16].image_url"
    for part in ({"image_url": {"url": "x", "detail": "huge"}}, {"image_url": {}}, {"file_id": "f"}, {}):
        ask = {"messages": [{"role": "user", "content": [{"type": "image_url", **part}]}]}
        assert (await client.post(URL, json=ask)).status_code == 400, part


async def test_nothing_is_fetched_without_being_allowed(client, frontend, listener):
    port, asked = listener
    frontend.media = MediaLoader(PROCESSOR, MediaLimits())
    said = await refused(client, "image_url", f"http://127.0.0.1:{port}/good")
    assert "--allowed-media-domains" in said
    assert asked == []


def test_what_is_fetched(listener, monkeypatch):
    port, asked = listener
    monkeypatch.setattr(sources, "is_public", lambda address: True)
    for path, said in (
        ("/good", None),
        ("/unsized", None),
        ("/long", "bytes that are allowed"),
        ("/longer%20than%20said", "bytes that are allowed"),
        ("/short", "ends before its end"),
        ("/redirect", "with a redirect (302), which is not followed"),
        ("/missing", "is answered with 404"),
        ("/nonsense", "cannot be fetched"),
        ("/headers", "cannot be fetched"),
    ):
        ANSWERS.setdefault(path, ANSWERS["/longer than said"])
        url = f"http://localhost:{port}{path}"
        if said is None:
            assert sources.fetch(url, LIMITS) == b"x" * 100
        else:
            with pytest.raises(Refused) as why:
                sources.fetch(url, LIMITS)
            assert said in str(why.value), path
    assert asked.count("/good") == 1, "the redirect was not followed"


def test_a_name_that_changes_what_it_resolves_to(listener, monkeypatch):
    """DNS rebinding: what was checked is what is connected to, whatever the name says a moment later."""
    port, asked = listener
    answers = [["93.184.216.34"], ["127.0.0.1"], ["127.0.0.1"]]
    looked_up, connected = [], []

    def resolved(host, port, *_, **__):
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers.pop(0)]

    def connect(address, **_):
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(socket, "create_connection", connect)
    url = f"http://allowed.example:{port}/good"
    with pytest.raises(Refused, match="cannot be fetched"):
        sources.fetch(url, LIMITS)
    assert (looked_up, connected) == (["allowed.example"], [("93.184.216.34", port)])
    with pytest.raises(Refused, match="whose address is private"):
        sources.fetch(url, LIMITS)
    answers[0] = ["93.184.216.34", "10.0.0.1"]
    with pytest.raises(Refused, match="whose address is private"):
        sources.fetch(url, LIMITS)
    assert len(connected) == 1
    assert asked == []


async def test_what_waits_is_bounded(loader):
    """Bodies may be large, and many."""
    loader._waiting = 256 << 20
    with pytest.raises(Overloaded, match="wait to be decoded"):
        await loader.load([part(data_url(encoded("PNG")))])
    loader._waiting = 0
    with pytest.raises(InvalidRequest, match="bytes that are allowed"):
        await loader.load([part("data:image/png," + "%41" * (2 << 20))])
    assert loader._waiting == 0


def test_a_host_that_dawdles(monkeypatch):
    """A byte now and then, so that no single wait is long."""
    monkeypatch.setattr(sources, "is_public", lambda address: True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection:
                while not over.wait(0.05):
                    try:
                        connection.send(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        limits = MediaLimits(domains=("127.0.0.1",), fetch_seconds=0.3)
        with pytest.raises(Refused, match=r"takes more than 0\.3 s to fetch|cannot be fetched"):
            sources.fetch(f"http://127.0.0.1:{server.getsockname()[1]}/a.png", limits)
        over.set()
        thread.join()


async def test_a_decoder_that_hangs_or_ends_is_replaced(client, frontend, tmp_path):
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time\ntime.sleep(600)\n")
    frontend.media = MediaLoader(PROCESSOR, MediaLimits(decode_seconds=0.3))
    good = data_url(encoded("PNG"))
    usual = frontend.media._all[0]._command
    for script, said in ((str(hangs), "takes more than 0.3 s to decode"), (os.devnull, "it ends what decodes it")):
        for worker in frontend.media._all:
            worker._command = lambda script=script: [usual()[0], script]
        assert said in await refused(client, "image_url", good)
    frontend.media.limits = MediaLimits()
    for worker in frontend.media._all:
        worker._command = usual
    assert (await frontend.media.load([part(good)]))[0][0].length == 4
    frontend.media.close()


def part(url: str, kind: str = "image"):
    from penstock.media.prompt import MediaPart

    return MediaPart(kind, url, "field")


async def test_what_is_taken(loader):
    kinds = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
    loaded = await loader.load([part(data_url(encoded(kind))) for kind in kinds])
    assert [file for _, file in loaded] == [encoded(kind) for kind in kinds]
    made = [one for one, _ in loaded]
    assert [one.shape for one in made] == [(1, 56, 56)] * 5
    assert made[0].digest == made[3].digest != made[1].digest
    ((film, _),) = await loader.load([part(data_url(video(16, 84, 56), "video/mp4"), "video")])
    assert (film.kind, film.shape, film.grid) == ("video", (8, 56, 84), (4, 2, 3))
    assert film.interval == pytest.approx(2.0)
    assert len(film.pixels) == 8 * 56 * 84 * 3
