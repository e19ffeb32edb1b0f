"""/v1/files and /v1/batches: what they take, keep and show; running is `tests/service/test_batch_runner.py`'s."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.files import MAX_FORM_BYTES, OFF
from penstock.api.http import Application
from penstock.core.errors import BreaksEngines, EngineFailure, Overloaded
from penstock.service.batch_store import Answered, BatchStore, Upload

pytestmark = pytest.mark.anyio
LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'
LIMIT = 1 << 20
CANNOT = "files and batches cannot be kept now"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path)
    yield store
    store.check()
    store.close()


@pytest.fixture
async def client(make_client: Callable[..., httpx.AsyncClient], store: BatchStore) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(batch_store=store, max_file_bytes=LIMIT, max_body_bytes=5000) as client:
        yield client


async def upload(client: httpx.AsyncClient, content: bytes = LINE, **fields: Any) -> httpx.Response:
    data = {"purpose": "batch"} | fields
    return await client.post("/v1/files", data=data, files={"file": ("in.jsonl", content)})


def error(response: httpx.Response) -> tuple[int, Any, str]:
    said = response.json()["error"]
    return response.status_code, said["param"], said["message"]


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "files").iterdir())


@pytest.mark.parametrize("content", [LINE, LINE * 10_000])
async def test_a_full_disk_is_said_and_leaves_nothing(
    client: httpx.AsyncClient, store: BatchStore, tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a file, at its end, or in the database."""
    content = content[: LIMIT - 7]
    begin = store.begin_upload

    def begin_on_full_disk() -> Upload:
        upload = begin()
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, upload._file.fileno())
        os.close(full)
        return upload

    with monkeypatch.context() as patched:
        patched.setattr(store, "begin_upload", begin_on_full_disk)
        assert error(await upload(client, content)) == (503, None, f"{CANNOT} (No space left on device)")
    assert left(tmp_path) == []
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    kept = 0
    while (sent := await upload(client)).status_code == 200:  # until its pages are full
        kept += 1
    assert error(sent) == (503, None, f"{CANNOT} (database or disk is full)")
    assert len(left(tmp_path)) == kept
    store._db.execute("PRAGMA max_page_count = 100000")
    assert (await upload(client, content)).status_code == 200


async def test_a_file_and_its_life(client: httpx.AsyncClient, tmp_path: Path) -> None:
    content = LINE * 10_000  # longer than a body may be, and than a piece
    sent = await upload(client, content[: LIMIT - 7])
    file = sent.json()
    assert sent.status_code == 200, file
    assert (file["object"], file["bytes"], file["filename"], file["purpose"]) == (
        *("file", min(len(content), LIMIT - 7), "in.jsonl", "batch"),
    )
    assert (await client.get(f"/v1/files/{file['id']}")).json() == file
    got = await client.get(f"/v1/files/{file['id']}/content")
    assert got.content == content[: LIMIT - 7]
    assert (await client.get("/v1/files?purpose=batch")).json() == {
        "object": "list",
        "data": [file],
        "first_id": file["id"],
        "last_id": file["id"],
        "has_more": False,
    }
    assert (await client.get("/v1/files?purpose=batch_output")).json()["data"] == []
    deleted = await client.delete(f"/v1/files/{file['id']}")
    assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert left(tmp_path) == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        status, _, message = error(await client.request(method, f"/v1/files/{file['id']}{path}"))
        assert (status, message) == (404, f"file_id: there is no file {file['id']!r}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({"purpose": "x" * 5000}, "purpose"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "5000"}, "expires_after.anchor"),
    ],
)
async def test_a_form_that_is_wrong_leaves_nothing(
    client: httpx.AsyncClient, tmp_path: Path, fields: dict[str, str], param: str
) -> None:
    status, found, message = error(await upload(client, **fields))
    assert (status, found) == (400, param)
    assert message.startswith(f"{param}: ")
    assert left(tmp_path) == []


async def test_files_that_expire(client: httpx.AsyncClient) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = (await upload(client, **fields)).json()
    assert file["expires_at"] == file["created_at"] + 3600


async def test_a_file_that_is_too_long(client: httpx.AsyncClient, tmp_path: Path) -> None:
    assert (await upload(client, b"x" * LIMIT)).status_code == 200
    status, _, message = error(await upload(client, b"x" * (LIMIT + 1)))
    assert (status, message) == (413, f"the file is too long, at most {LIMIT} bytes are allowed")
    assert len(left(tmp_path)) == 1


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("application/json", b"{}", "content-type"),
        ("multipart/form-data", b"", "content-type"),
        ("multipart/form-data; boundary=b", b"", "body"),
        ("multipart/form-data; boundary=b", b"nonsense", "body"),
        ("multipart/form-data; boundary=b", b'--b\r\ncontent-disposition: form-data; name="file"; filename="', "body"),
        ("multipart/form-data; boundary=b", b"--b--\r\n", "purpose"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
            "file",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nbatch\r\n' * 2 + b"--b--\r\n",
            "file",
        ),
    ],
)
async def test_what_is_no_form(client: httpx.AsyncClient, tmp_path: Path, kind: str, body: bytes, param: str) -> None:
    response = await client.post("/v1/files", content=body, headers={"content-type": kind})
    assert error(response)[:2] == (400, param)
    assert left(tmp_path) == []


async def test_endless_parts_beside_the_file(client: httpx.AsyncClient) -> None:
    part = b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\n\r\n'
    body = part * (MAX_FORM_BYTES // len(part) + 100)
    response = await client.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert error(response)[0] == 413


async def test_other_bodies_stay_short(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x" * 6000})
    assert error(response)[0] == 413


async def created(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    file = (await upload(client)).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"} | fields
    response = await client.post("/v1/batches", json=asked)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


async def test_a_batch_as_it_is_shown(client: httpx.AsyncClient) -> None:
    batch = await created(client, metadata={"who": "me"})
    assert batch["expires_at"] == batch["created_at"] + 86400
    assert {name: batch[name] for name in ("object", "status", "request_counts", "metadata", "errors")} == {
        "object": "batch",
        "status": "validating",
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": {"who": "me"},
        "errors": None,
    }
    assert (await client.get(f"/v1/batches/{batch['id']}")).json() == batch
    assert error(await client.delete(f"/v1/files/{batch['input_file_id']}"))[0] == 409
    cancelled = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["cancelling_at"] is None) == ("cancelling", False)
    for method, path in (("GET", ""), ("POST", "/cancel")):
        assert error(await client.request(method, f"/v1/batches/batch_none{path}"))[0] == 404


async def test_pages_of_batches(client: httpx.AsyncClient) -> None:
    ids = [(await created(client))["id"] for _ in range(3)]
    page = (await client.get("/v1/batches?limit=2")).json()
    assert ([batch["id"] for batch in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    rest = (await client.get(f"/v1/batches?limit=2&after={page['last_id']}")).json()
    assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == ([ids[0]], False)
    for limit in ("0", "101", "x", "²"):
        assert error(await client.get("/v1/batches", params={"limit": limit}))[:2] == (400, "limit")
    assert error(await client.get("/v1/files?order=up"))[:2] == (400, "order")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
    ],
)
async def test_batches_that_are_refused(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    file = (await upload(client)).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"} | fields
    assert error(await client.post("/v1/batches", json=asked))[:2] == (400, param)


async def test_an_output_is_no_input(client: httpx.AsyncClient, store: BatchStore) -> None:
    batch = await created(client)
    store.claim("a", [])
    store.begin(batch["id"], "a", 1, None)
    store.record(batch["id"], "a", [Answered(1, False, b'{"x":1}')])
    claimed = store.batch("", batch["id"])
    assert claimed is not None
    store.finish(claimed, "a", 1000)
    ended = (await client.get(f"/v1/batches/{batch['id']}")).json()
    assert (ended["status"], ended["error_file_id"]) == ("completed", None)
    asked = {"input_file_id": ended["output_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert error(await client.post("/v1/batches", json=asked))[:2] == (400, "input_file_id")
    content = await client.get(f"/v1/files/{ended['output_file_id']}/content")
    assert content.content == b'{"x":1}\n'


async def test_keys_do_not_share(make_client: Callable[..., httpx.AsyncClient], store: BatchStore) -> None:
    async with make_client(batch_store=store, api_keys=("one", "two")) as client:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        file = {"files": {"file": ("x", LINE)}, "data": {"purpose": "batch"}}
        file_id = (await client.post("/v1/files", headers=one, **file)).json()["id"]  # type: ignore[arg-type]
        assert (await client.get(f"/v1/files/{file_id}/content", headers=one)).content == LINE
        for path in ("", "/content"):
            assert (await client.get(f"/v1/files/{file_id}{path}", headers=two)).status_code == 404
        assert (await client.get("/v1/files", headers=two)).json()["data"] == []
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await client.post("/v1/batches", headers=two, json=asked)).status_code == 400
        batch_id = (await client.post("/v1/batches", headers=one, json=asked)).json()["id"]
        assert (await client.get(f"/v1/batches/{batch_id}", headers=two)).status_code == 404
        assert (await client.post("/v1/files", **file)).status_code == 401  # type: ignore[arg-type]


async def test_without_a_folder_they_say_so(make_client: Callable[..., httpx.AsyncClient]) -> None:
    async with make_client() as client:
        for response in (
            await upload(client),
            await client.get("/v1/files"),
            await client.get("/v1/batches/x"),
            await client.post("/v1/batches", json={}),
        ):
            assert error(response) == (404, None, OFF)


async def test_what_a_line_is_answered(make_app: Callable[..., Application], frontend: Any) -> None:
    app = make_app()
    answer = await app.ask("/v1/completions", b'{"prompt":"x","service_tier":"flex"}', "tenant", "line-1")
    said = json.loads(answer.body)
    assert (answer.status, said["id"], said["choices"][0]["text"]) == (200, "cmpl-line-1", "Hello")
    assert frontend.submitted[-1].level.offline
    assert frontend.salts[-1].startswith("tenant")
    refused = await app.ask("/v1/completions", b'{"prompt":7}', "", "line-2")
    assert (refused.status, json.loads(refused.body)["error"]["param"]) == (400, "prompt")
    for raised, status, final in (
        (Overloaded("full", 7.2), 429, False),
        (EngineFailure("broke"), 500, False),
        (BreaksEngines("breaks"), 500, True),
        (RuntimeError("a fault"), 500, False),
    ):
        frontend.script = lambda generation, raised=raised: generation.fail(raised)
        answer = await app.ask("/v1/completions", b'{"prompt":"x"}', "", "line-3")
        assert (answer.status, answer.final) == (status, final)
        assert answer.retry_after == (8 if status == 429 else 1)


async def test_a_line_that_is_called_off(make_app: Callable[..., Application], frontend: Any) -> None:
    frontend.script = lambda generation: None
    line = asyncio.create_task(make_app().ask("/v1/completions", b'{"prompt":"x"}', "", "line"))
    async with asyncio.timeout(10):
        while not frontend.submitted:
            await asyncio.sleep(0)
        line.cancel()
        await frontend.submitted[0].cancelled.wait()
