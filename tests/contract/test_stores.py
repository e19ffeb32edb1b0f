"""Stores of blocks that engines share: what is got is what was put, by whomever, whatever happens to the place."""

import errno
import os
import shutil
import signal
import stat
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import count

import pytest

from penstock.cli.engine import preset_mooncake
from penstock.core.errors import ConfigError, Unavailable
from penstock.transfer import mooncake_store
from penstock.transfer.block_store import HEAD_BYTES
from penstock.transfer.bounded import Crew
from penstock.transfer.memory import PAGE
from penstock.transfer.stores import BACKENDS, check_store, open_store
from tests.helpers import stores
from tests.helpers.mooncake import memory_owner, mooncake_master
from tests.helpers.stores import BLOCK_BYTES, NAMESPACE, RECORD_BYTES, blocks, got, key
from tests.helpers.waiting import eventually

pytest.importorskip("xxhash")
NEEDS_MOONCAKE = pytest.mark.skipif(bool(mooncake_store.missing()), reason=mooncake_store.missing())
PLACES = {"file": stores.directory, "mooncake": stores.mooncake}
SCHEMES = ["file", pytest.param("mooncake", marks=NEEDS_MOONCAKE)]
NUMBERS = count()


def test_every_store_is_here():
    assert PLACES.keys() == BACKENDS.keys()


@pytest.fixture(scope="module", params=SCHEMES)
def place(request, tmp_path_factory):
    with PLACES[request.param](tmp_path_factory.mktemp("store") / "shared") as place:
        yield place


@pytest.fixture
def store(place, fresh):
    with closing(place.open(fresh)) as store:
        yield store


@pytest.fixture
def fresh():
    """A namespace of this test's own."""
    return f"{NAMESPACE}-{next(NUMBERS)}"


class TestBlocks:
    def test_come_back(self, store):
        assert store.contains([key(1)]) == 0
        assert got(store, 1, 2) == 0
        assert list(store.put(blocks(1, 2, 3))) == [True] * 3
        assert store.contains([key(1), key(2), key(3), key(4)]) == 3
        assert got(store, 1, 2, 3) == 3

    def test_are_counted_from_the_first_on(self, store):
        store.put(blocks(1, 3))
        assert store.contains([key(1), key(2), key(3)]) == 1
        assert got(store, 1, 2, 3) == 1
        assert got(store, 2, 3) == 0

    def test_are_as_many_as_there_are(self, store):
        """More than are staged or looked for at once."""
        numbers = range(900)
        assert all(store.put(blocks(*numbers)))
        assert store.contains([key(number) for number in (*numbers, 5000, 1)]) == 900
        assert got(store, *numbers) == 900
        assert store.put([]) == []
        assert store.get([]) == store.contains([]) == 0

    def test_may_be_put_again(self, store):
        for _ in range(2):
            assert list(store.put(blocks(1, 1))) == [True, True]
        assert got(store, 1) == 1

    def test_are_found_by_others_and_later(self, place, fresh):
        with closing(place.open(fresh)) as one, closing(place.open(fresh)) as other:
            one.put(blocks(1, 2))
            assert other.contains([key(1), key(2)]) == got(other, 1, 2) == 2
            one.close()
            assert got(other, 1) == 1
        with closing(place.open(fresh)) as later:
            assert got(later, 1, 2) == 2

    def test_of_another_namespace_are_others(self, place, fresh, store):
        with closing(place.open(f"{fresh}-other")) as other:
            store.put(blocks(1))
            assert other.contains([key(1)]) == got(other, 1) == 0


class TestSpoiled:
    """What lies under a key is not what was put there."""

    @pytest.fixture
    def stored(self, place, store, fresh):
        assert all(store.put(blocks(1, 2)))
        with stores.raw(place.url, fresh) as raw:
            yield raw

    def lost(self, store):
        """It is not believed, and can be put again."""
        assert got(store, 1) == 0
        eventually(lambda: list(store.put(blocks(1))) == [True] and got(store, 1) == 1)
        assert got(store, 2) == 1

    def test_a_bit_is_flipped(self, store, stored):
        for spoiled, place in enumerate([0, 8, 16, 24, 40, 56, HEAD_BYTES - 1, PAGE, PAGE + BLOCK_BYTES - 1], 1):
            record = bytearray(stored.read(key(1)))
            record[place] ^= 4
            stored.replace(key(1), record)
            self.lost(store)
            assert store.spoiled == spoiled

    def test_of_another_key(self, store, stored):
        stored.replace(key(1), stored.read(key(2)))
        self.lost(store)

    def test_of_another_namespace(self, place, store, stored, fresh):
        other = f"{fresh}-other"
        with closing(place.open(other)) as theirs, stores.raw(place.url, other) as raw:
            theirs.put([(key(1), memoryview(stores.contents(7)))])
            stored.replace(key(1), raw.read(key(1)))
        self.lost(store)

    @pytest.mark.parametrize("size", [RECORD_BYTES - PAGE, RECORD_BYTES + PAGE])
    def test_of_another_length(self, place, store, stored, fresh, size):
        record = stored.read(key(1)) + bytes(PAGE)
        with stores.raw(place.url, fresh, size) as other:
            other.replace(key(1), record[:size])
        self.lost(store)


class TestRoom:
    def test_of_a_full_store_the_newest_are_there(self, place, fresh):
        with closing(place.open(fresh, place.small)) as store:
            for first in range(0, 4 * place.room, 64):
                store.put(blocks(*range(first, first + 64)))
            there = [number for number in range(4 * place.room) if store.contains([key(number)])]
            assert place.room // 4 < len(there) <= 1.05 * place.room  # of which threads at once exceed it
            assert sum(number >= 2 * place.room for number in there) > len(there) // 2
            assert sum(got(store, number) for number in there) == len(there)


class TestProcesses:
    def test_share_it(self, place):
        numbers = range(1000, 1400)
        with stores.engine(place.url, *numbers[:300]) as one, stores.engine(place.url, *numbers[100:]) as other:
            for process in (one, other):
                said: list[str] = []
                while "300 put, 300 got" not in said:  # one that others put at that moment may be no block yet
                    said += stores.lines(process, 1)
                    assert said[-1].endswith(" got"), said
                    assert len(said) < 100, said

    def test_share_one_that_is_full(self, place):
        numbers = range(2000, 2000 + place.room)
        with stores.engine(place.small, *numbers) as one, stores.engine(place.small, *reversed(numbers)) as other:
            said = [stores.lines(process, 2) for process in (one, other)]
        assert all(line.endswith(" got") for line in said[0] + said[1]), said

    def test_are_killed_in_the_middle_of_a_put(self, place):
        numbers = range(3000, 3200)
        for number in range(3):
            with stores.engine(place.url, *numbers):
                eventually(lambda: self.some_of(place, numbers))
                time.sleep(number * 0.01)  # any moment
        with closing(place.open()) as store:
            assert sum(got(store, number) for number in numbers) <= len(numbers)
            eventually(lambda: all(store.put(blocks(*numbers))))
            assert got(store, *numbers) == len(numbers)

    @staticmethod
    def some_of(place, numbers):
        with closing(place.open()) as store:
            return any(store.contains([key(number)]) for number in numbers)


class TestAway:
    def test_it_answers_in_time_and_works_when_it_is_back(self, place, store):
        assert all(store.put(blocks(1)))
        place.stop()
        try:
            for _ in range(2):
                began = time.monotonic()
                with suppress(Unavailable):
                    assert got(store, 1) == 0
                with suppress(Unavailable):
                    assert not any(store.put(blocks(2)))
                with suppress(Unavailable):
                    assert store.contains([key(2)]) == 0
                assert time.monotonic() - began < 3 * place.seconds + 10, "each was given up"
        finally:
            place.go_on()

        def is_back():
            with suppress(Unavailable):
                return all(store.put(blocks(1, 2))) and got(store, 1, 2) == 2

        eventually(is_back, 60)

    def test_it_cannot_be_opened(self, place, fresh):
        place.stop()
        try:
            with pytest.raises((ConfigError, Unavailable)):
                place.open(fresh)
        finally:
            place.go_on()
        eventually(lambda: self.opens(place, fresh), 60)

    @staticmethod
    def opens(place, namespace):
        with suppress(Unavailable), closing(place.open(namespace)):
            return True


class TestDirectory:
    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path

    def test_a_file_system_that_hangs_is_given_up(self, folder, monkeypatch):
        """Opening a pipe that nobody writes to lasts until somebody does."""
        with closing(open_store(f"file://{folder}?timeout=60", NAMESPACE, BLOCK_BYTES)) as store:
            assert all(store.put(blocks(1, 2)))
            path = folder / NAMESPACE / key(1)[:1].hex() / key(1).hex()
            contents = path.read_bytes()
            path.unlink()
            os.mkfifo(path)
            asked = stores.buffers(1)
            with monkeypatch.context() as patch:
                patch.setattr(store._crew, "_seconds", 0.2)
                with pytest.raises(Unavailable, match=r"has not answered for 0\.2 s"):
                    store.get(asked)
            with pytest.raises(Unavailable, match="still does not answer"):
                store.get(asked)
            with pytest.raises(Unavailable, match="still does not answer"):
                store.contains([key(2)])
            with path.open("wb"):
                pass
            eventually(lambda: not store._crew.is_stuck)
            assert bytes(asked[0][1]) == bytes(BLOCK_BYTES), "what comes late is written nowhere"
            path.unlink()
            path.write_bytes(contents)
            assert got(store, 1, 2) == 2

    def test_only_its_user_reads_it(self, folder):
        with closing(open_store(f"file://{folder}", NAMESPACE, BLOCK_BYTES)) as store:
            store.put(blocks(1))
        for path in (folder / NAMESPACE).rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
        assert stat.S_IMODE((folder / NAMESPACE).stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        "use",
        [got, lambda store, number: store.contains([key(number)]), lambda store, number: store.put(blocks(number))],
        ids=["got", "found", "put again"],
    )
    def test_what_was_used_longest_ago_goes(self, folder, use):
        size = 256 * 2 * RECORD_BYTES
        same = [n for n in range(4000) if key(n)[0] == 7]  # one folder's, which has room for two
        with closing(open_store(f"file://{folder}?size={size}", NAMESPACE, BLOCK_BYTES)) as store:
            store.put(blocks(same[0]))
            store.put(blocks(same[1]))
            for age, number in enumerate((same[0], same[1])):
                path = folder / NAMESPACE / "07" / key(number).hex()
                os.utime(path, (time.time() - 1000 + age,) * 2)
            use(store, same[0])  # which makes it the younger one
            store.put(blocks(same[2]))
            assert [got(store, number) for number in same[:3]] == [1, 0, 1]

    def test_what_dead_writers_left_goes(self, folder):
        with closing(open_store(f"file://{folder}?size={256 * 2 * RECORD_BYTES}", NAMESPACE, BLOCK_BYTES)) as store:
            same = [n for n in range(4000) if key(n)[0] == 7]
            store.put(blocks(same[0]))
            left = [folder / NAMESPACE / "07" / name for name in (".old", ".young")]
            for path, age in zip(left, (4000, 10), strict=True):
                path.write_bytes(b"x")
                os.utime(path, (time.time() - age,) * 2)
            store.put(blocks(same[1]))
            assert [path.exists() for path in left] == [False, True]

    def test_anything_may_be_deleted_at_any_time(self, folder):
        with closing(open_store(f"file://{folder}", NAMESPACE, BLOCK_BYTES)) as store:
            for path in (folder / NAMESPACE, folder / NAMESPACE / key(1)[:1].hex()):
                store.put(blocks(1))
                shutil.rmtree(path)
                assert got(store, 1) == 0
                assert list(store.put(blocks(1))) == [True]
                assert got(store, 1) == 1

    def test_a_full_disk_keeps_nothing_more(self, folder, monkeypatch):
        with closing(open_store(f"file://{folder}", NAMESPACE, BLOCK_BYTES)) as store:
            store.put(blocks(1))

            def full(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            with monkeypatch.context() as patch:
                patch.setattr("penstock.transfer.directory.write_all", full)
                assert list(store.put(blocks(1, 2))) == [True, False]
            assert got(store, 1, 2) == 1
            assert not list((folder / NAMESPACE).rglob(".*"))
            assert list(store.put(blocks(2))) == [True]

    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
    def test_one_that_fails_is_unavailable(self, folder, monkeypatch, number):
        def fails(*_):
            raise OSError(number, os.strerror(number))

        with closing(open_store(f"file://{folder}", NAMESPACE, BLOCK_BYTES)) as store:
            store.put(blocks(1))
            with monkeypatch.context() as patch:
                patch.setattr("penstock.transfer.directory.read_into", fails)
                if number == errno.ESTALE:  # another host has deleted it
                    assert got(store, 1) == 0
                else:
                    with pytest.raises(Unavailable, match="fails"):
                        store.get(stores.buffers(1))
            assert got(store, 1) == 1


@NEEDS_MOONCAKE
class TestMooncake:
    @pytest.fixture
    def master(self, tmp_path):
        preset_mooncake()
        with mooncake_master(tmp_path, "--client_ttl=2") as master:
            yield master

    @staticmethod
    def open(master, **options):
        query = "&".join(f"{name}={value}" for name, value in {"segment": 0, "timeout": 10, **options}.items())
        return closing(open_store(f"mooncake://{master.address}?{query}", NAMESPACE, BLOCK_BYTES))

    def test_what_is_hot_outlives_its_owner(self, master):
        with ExitStack() as stack:
            owner = stack.enter_context(memory_owner(master.address, 64 << 20))
            cold = stack.enter_context(self.open(master))
            assert all(cold.put(blocks(1, 2)))
            hot = stack.enter_context(self.open(master, segment=64 << 20, hot=2))
            for _ in range(4):
                assert got(hot, 1) == got(cold, 1) == got(cold, 2) == 1
            assert got(hot, 2) == 1
            described = hot._backend._store.get_replica_desc
            eventually(lambda: len(described(hot._backend._name(key(1)))) == 2)
            assert len(described(hot._backend._name(key(2)))) == 1
            owner.kill()
            eventually(lambda: got(cold, 1) == 1)  # as soon as the master knows
            assert got(cold, 2) == 0

    def test_one_replica_is_none_more(self, master):
        with memory_owner(master.address, 64 << 20), self.open(master, segment=64 << 20, hot=1, replicas=1) as store:
            assert all(store.put(blocks(1)))
            assert got(store, 1) == got(store, 1) == 1
            assert len(store._backend._store.get_replica_desc(store._backend._name(key(1)))) == 1

    def test_what_an_owner_had_that_stands_still_is_a_miss(self, master):
        with memory_owner(master.address, 64 << 20) as owner, self.open(master, timeout=20) as store:
            assert all(store.put(blocks(1, 2)))
            owner.send_signal(signal.SIGSTOP)
            assert got(store, 1, 2) == 0
            assert list(store.put(blocks(3))) == [False]
            owner.send_signal(signal.SIGCONT)
            eventually(lambda: all(store.put(blocks(1, 2))) and got(store, 1, 2) == 2)

    def test_a_master_that_has_died_is_unavailable_until_there_is_another(self, master):
        with memory_owner(master.address, 64 << 20), self.open(master) as store:
            assert all(store.put(blocks(1, 2)))
            master.kill()
            for _ in range(2):
                with pytest.raises(Unavailable):
                    store.get(stores.buffers(1))
            with pytest.raises(Unavailable, match="no mooncake_master answers"):
                self.open(master)
            master.start()
            eventually(lambda: self.takes(store), 60)
            assert got(store, 1, 2) == 2

    @staticmethod
    def takes(store):
        with suppress(Unavailable):
            return all(store.put(blocks(1, 2)))

    def test_on_disk_it_outlives_everything(self, master, tmp_path, monkeypatch):
        master.kill()
        master.flags = ("--enable_offload=true",)
        master.start()
        monkeypatch.setenv("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend")
        monkeypatch.setenv("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1")
        monkeypatch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", f"{64 << 20}")
        (tmp_path / "disk").mkdir()
        with self.open(master, segment=64 << 20, disk=tmp_path / "disk") as store:
            assert all(store.put(blocks(1, 2)))
            names = [store._backend._name(key(number)) for number in (1, 2)]
            eventually(lambda: all(len(store._backend._store.get_replica_desc(name)) == 2 for name in names))
            master.kill()
        master.start()
        with self.open(master, segment=64 << 20, disk=tmp_path / "disk") as store:
            eventually(lambda: got(store, 1, 2) == 2)

    def test_what_mooncake_refuses_is_named(self, master):
        with pytest.raises(ConfigError, match=r"segment of 1048576\.0 GiB"):
            self.open(master, segment=1 << 50)

    def test_rdma_needs_its_hardware(self, master, tmp_path, monkeypatch):
        monkeypatch.setattr(mooncake_store, "RDMA_DEVICES", tmp_path / "none")
        with pytest.raises(ConfigError, match=r"protocol=rdma, allowed here is tcp"):
            self.open(master, protocol="rdma")


def test_without_mooncake(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"penstock\[mooncake\].*libibverbs1, librdmacm1 and libnuma1"):
        open_store("mooncake://127.0.0.1:1", NAMESPACE, BLOCK_BYTES)


class TestURLs:
    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("", "allowed: file://..., mooncake://..."),
            ("redis://host:1", "allowed: file://..., mooncake://..."),
            ("file:relative", "three slashes"),
            ("file://host/path", "three slashes"),
            ("file:///tmp?size=many", "size=many, allowed: a size such as 4G"),
            ("file:///tmp?size=1G&size=2G", "each option once"),
            ("file:///tmp?size", "allowed: a URL"),
            ("file:///tmp?color=red", "file has no option 'color', allowed: size, timeout"),
            ("file:///tmp?timeout=0", "timeout=0, allowed: seconds"),
            ("file:///tmp?timeout=nan", "timeout=nan, allowed: seconds"),
            ("file:///tmp#part", "without #"),
            ("mooncake://host", "mooncake://HOST:PORT"),
            ("mooncake://host:port", "mooncake://HOST:PORT"),
            ("mooncake://host:1/path", "without a path"),
            ("mooncake://host:1?protocol=udp", "protocol=udp, allowed: tcp, rdma"),
            ("mooncake://host:1?replicas=0", "replicas=0, allowed: a number from 1 on"),
            ("mooncake://host:1?segment=-1", "segment=-1, allowed: a size such as 4G"),
            ("mooncake://host:1?persistence=eager", "mooncake_master --enable_offload=true"),
            ("file://[", "allowed: a URL"),
        ],
    )
    def test_that_are_wrong_are_named(self, url, says):
        with pytest.raises(ConfigError) as error:
            check_store(url)
        assert says in str(error.value)
        assert str(error.value).startswith("remote-cache: ")
        assert error.value.field == "remote-cache"

    @pytest.mark.parametrize(
        "url",
        [
            *(
                "file:///tmp",
                "file://localhost/a%20b?size=4TiB&timeout=1.5",
                "mooncake://host:50051",
                "mooncake://[::1]:1",
            ),
            "mooncake://10.0.0.1:1?protocol=rdma&devices=mlx5_0,mlx5_1&segment=64GiB&replicas=3&hot=10&host=10.0.0.2",
            "mooncake://10.0.0.1:1?metadata=http://10.0.0.1:8080/metadata&segment=0&disk=/var/cache&timeout=2",
        ],
    )
    def test_that_are_right(self, url):
        check_store(url)

    def test_places_that_cannot_be_used(self, tmp_path):
        (tmp_path / "file").write_text("")
        for path, says in [("nowhere", "is its file system mounted"), ("file", "is its file system mounted")]:
            with pytest.raises(ConfigError, match=says):
                open_store(f"file://{tmp_path / path}", NAMESPACE, BLOCK_BYTES)
        with pytest.raises(ConfigError, match="allowed with blocks of this size is 6 MiB and more"):
            open_store(f"file://{tmp_path}?size=5MiB", NAMESPACE, BLOCK_BYTES)


class TestCrew:
    def test_calls_are_made_beside_each_other_and_answered_in_order(self):
        with closing(Crew("it", 3, 20)) as crew:
            meeting = threading.Barrier(3)

            def call(number):
                meeting.wait(20)
                return number

            assert crew.run([partial(call, number) for number in range(3)]) == [0, 1, 2]

    def test_an_error_comes_when_all_are_over(self):
        over = []
        with closing(Crew("it", 1, 20)) as crew:
            with pytest.raises(ZeroDivisionError):
                crew.run([lambda: 1 // 0, lambda: over.append(1)])
            assert over == [1]
            assert crew.run([lambda: 2]) == [2]

    def test_what_is_given_up_blocks_the_next_and_its_rest_never_begins(self, monkeypatch):
        go_on, begun = threading.Event(), []
        with closing(Crew("it", 1, 0.05)) as crew:
            with pytest.raises(Unavailable, match=r"it has not answered for 0\.05 s"):
                crew.run([lambda: go_on.wait(20), lambda: begun.append(1)])
            with pytest.raises(Unavailable, match="it still does not answer"):
                crew.run([lambda: begun.append(2)])
            go_on.set()
            eventually(lambda: not crew.is_stuck)
            monkeypatch.setattr(crew, "_seconds", 60)
            assert crew.run([lambda: 3]) == [3]
            assert not begun

    def test_it_closes_although_a_call_hangs(self):
        go_on = threading.Event()
        crew = Crew("it", 2, 0.05)
        with pytest.raises(Unavailable):
            crew.run([lambda: go_on.wait(20)])
        crew.close()
        go_on.set()
        for thread in crew._threads:
            thread.join(20)
            assert not thread.is_alive()
