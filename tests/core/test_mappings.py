"""Mappings are where they are said to be, large where the system has large pages, ending with what refers to them."""

import ctypes
import errno
import gc
import mmap
import os
import random
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core import mappings
from penstock.core.mappings import LARGE_PAGE, can_be_large, is_large, make_large, map_file, remove

SIZE = 3 * LARGE_PAGE
MAPS = Path("/proc/self/maps")
CONTENT = random.Random(0).randbytes(SIZE)


@contextmanager
def memfd(content=CONTENT):
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, SIZE)
        os.pwrite(fd, content, 0)
        yield fd
    finally:
        os.close(fd)


def places():
    return [line for line in MAPS.read_text().splitlines() if "memfd:test" in line]


def test_a_memfd_in_large_pages_has_what_it_had():
    if not can_be_large():
        pytest.skip("this system has no large pages for memfds")
    with memfd(CONTENT[: 5000 + LARGE_PAGE]) as fd:  # the last large page has nothing yet
        before = map_file(fd, 0, SIZE)
        assert not is_large(ctypes.addressof(before), SIZE)
        assert make_large(fd, 0, SIZE)
        memory = map_file(fd, 0, SIZE)
        assert is_large(ctypes.addressof(memory), SIZE)
        rest = map_file(fd, 4096, SIZE - 4096)  # whose first large page is not whole
        assert is_large(ctypes.addressof(rest) + LARGE_PAGE - 4096, SIZE - LARGE_PAGE)
        assert not is_large(ctypes.addressof(rest), SIZE - 4096)
        assert bytes(before) == CONTENT[: 5000 + LARGE_PAGE].ljust(SIZE, b"\0")
        assert make_large(fd, 0, SIZE)  # once more


@pytest.mark.parametrize("start", [0, 4096, LARGE_PAGE + 8192])
@pytest.mark.parametrize("present", [True, False])
def test_a_file_is_mapped_from_any_page_on(start, present):
    with memfd() as fd:
        memory = map_file(fd, start, SIZE - start, present=present)
        assert (ctypes.addressof(memory) - start) % LARGE_PAGE == 0
        assert bytes(memory) == CONTENT[start:]


def test_it_ends_with_its_last_reference():
    with memfd() as fd:
        memory = map_file(fd, 0, SIZE, writable=True)
        view = memoryview(memory).cast("B")
        del memory
        gc.collect()
        assert len(places()) == 1
        view[5] = ord("x")
        assert os.pread(fd, 1, 5) == b"x"
        del view
        gc.collect()
        assert not places()


def test_what_is_given_back_is_zeros_for_everybody():
    with memfd() as fd:
        memory, other = map_file(fd, 0, SIZE, writable=True), map_file(fd, 0, SIZE)
        make_large(fd, 0, SIZE)
        remove(ctypes.addressof(memory) + LARGE_PAGE, LARGE_PAGE + 4096)
        assert os.fstat(fd).st_blocks * 512 <= SIZE - LARGE_PAGE  # until it is read
        gone = slice(LARGE_PAGE, 2 * LARGE_PAGE + 4096)
        assert bytes(other)[gone] == bytes(LARGE_PAGE + 4096)
        assert bytes(other)[: gone.start] + bytes(other)[gone.stop :] == CONTENT[: gone.start] + CONTENT[gone.stop :]


@pytest.mark.parametrize("refused", [mappings._COLLAPSE, mappings._POPULATE_READ, mappings._HUGE_PAGE])
def test_an_older_system(refused, monkeypatch):
    advise = mappings._advise
    monkeypatch.setattr(mappings, "_advise", lambda *of: errno.EINVAL if of[2] == refused else advise(*of))
    with memfd() as fd:
        if refused == mappings._COLLAPSE:
            assert not make_large(fd, 0, SIZE)
        memory = map_file(fd, 0, SIZE)
        assert present_pages(memory) == SIZE // mmap.PAGESIZE
        assert bytes(memory) == CONTENT


def present_pages(memory):
    with open("/proc/self/smaps") as lines:
        at = f"{ctypes.addressof(memory):x}-"
        mine = False
        for line in lines:
            if "-" in line.split()[0]:
                mine = line.startswith(at)
            elif mine and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024 // mmap.PAGESIZE
    raise AssertionError("it is not mapped")


def test_what_cannot_be_mapped_leaves_no_addresses_behind(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 4096)
    fd = os.open(tmp_path / "file", os.O_WRONLY)
    try:
        before = MAPS.read_text().count("---p")
        with pytest.raises(OSError, match="mmap of"):
            map_file(fd, 0, 4096)
        gc.collect()
        assert MAPS.read_text().count("---p") <= before
    finally:
        os.close(fd)
