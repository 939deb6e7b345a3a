"""The file format, byte by byte, and what readers refuse."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from r3router.r3 import FormatError, Header, local, open_rows
from r3router.r3.format import HEADER_BYTES, narrow_dtype
from r3router.r3.host import alive, owner_line
from r3router.r3.store import ArenaFull, StoreDir, new_header, owned, reclaim

from .rows import LAYERS, TOP_K, expert_rows, put


def test_the_header_is_laid_out_as_documented() -> None:
    header = Header("uint16", 61, 6, 17, 5000, 0xDEADBEEF, True, 3, 1_700_000_000_123, 1_700_000_600_123, "step-7", "rid-é")
    raw = header.pack()
    assert len(raw) == 256
    assert raw[:8] == b"R3STORE1"
    assert struct.unpack_from("<IIIIII", raw, 8) == (1, 1, 2, 61, 6, 17)
    assert struct.unpack_from("<Q", raw, 32) == (5000,)
    assert struct.unpack_from("<II", raw, 40) == (0xDEADBEEF, 3)
    assert struct.unpack_from("<QQ", raw, 48) == (1_700_000_000_123, 1_700_000_600_123)
    assert raw[64:66] + raw[66:72] == b"\x06\x00step-7"
    assert raw[160:162] + raw[162:168] == b"\x06\x00rid-\xc3\xa9"
    assert raw[168:] == bytes(88)
    assert Header.unpack(raw) == header


def test_a_long_rid_is_cut_between_characters() -> None:
    header = Header("uint8", 1, 1, 0, 0, rid="x" * 93 + "é")
    assert Header.unpack(header.pack()).rid == "x" * 93


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"R3STORE2"), (8, b"\x02"), (12, b"\x02"), (16, b"\x03"), (20, bytes(4)), (24, bytes(4)), (32, b"\xff" * 8), (64, b"\xff\xff")],
)
def test_headers_that_make_no_sense_are_refused(at: int, value: bytes) -> None:
    raw = bytearray(Header("uint8", 2, 2, 0, 1).pack())
    raw[at : at + len(value)] = value
    with pytest.raises(FormatError):
        Header.unpack(bytes(raw))


@pytest.mark.parametrize(
    ("experts", "dtype"), [(128, "uint8"), (256, "uint8"), (257, "uint16"), (65_537, "int32"), (None, "int32"), (0, "int32")]
)
def test_the_dtype_is_the_models(experts: int | None, dtype: str) -> None:
    assert narrow_dtype(experts) == dtype


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (512, "uint16"), (1 << 20, "int32")])
def test_rows_are_read_as_they_were_written(store: StoreDir, experts: int, dtype: str) -> None:
    rows = expert_rows(3, 1000, experts)
    path = put(store, rows, dtype=dtype)
    header, got = open_rows(path)
    assert (header.dtype, header.rows, header.complete) == (dtype, 1000, True)
    assert got.dtype == np.dtype(dtype) and np.array_equal(got, rows)
    assert not got.flags.writeable
    raw = path.read_bytes()
    assert len(raw) == HEADER_BYTES + 1000 * LAYERS * TOP_K * got.itemsize
    assert zlib.crc32(raw[HEADER_BYTES:]) == header.crc32
    local.check(header, got, "it")
    assert not path.with_suffix(".tmp").exists()


def test_an_open_mapping_outlives_the_file(store: StoreDir) -> None:
    rows = expert_rows(5, 4000)
    path = put(store, rows)
    _, got = open_rows(path)
    path.unlink()
    assert np.array_equal(got, rows)


@pytest.mark.parametrize("bad", [-1, 256])
def test_an_id_that_does_not_fit_is_never_cut(store: StoreDir, bad: int) -> None:
    rows = expert_rows(1, 50)
    rows[49, LAYERS - 1, TOP_K - 1] = bad
    writing = store.reserve(new_header(50, LAYERS, TOP_K, "uint8", start=0, expires_s=60, rid="", weight_version=""))
    with pytest.raises(ValueError, match=f"{bad}"):
        writing.write([rows[:25], rows[25:]])
    writing.fail("it did not fit")
    assert sorted(p.suffix for p in store.path.iterdir()) == ["", ".err"]


def test_missing_and_surplus_rows_are_refused(store: StoreDir) -> None:
    for count in (9, 11):
        writing = store.reserve(new_header(10, LAYERS, TOP_K, "uint8", start=0, expires_s=60, rid="", weight_version=""))
        with pytest.raises(ValueError, match=r"rows|shape"):
            writing.write([expert_rows(1, count)])
        assert not writing.path.exists()


def test_a_file_that_is_written_is_told_from_one_that_is_not_there(store: StoreDir) -> None:
    writing = store.reserve(new_header(10, LAYERS, TOP_K, "uint8", start=0, expires_s=60, rid="", weight_version=""))
    with pytest.raises(local.StillWritten):
        open_rows(writing.path)
    with pytest.raises(local.NotHere):
        open_rows(store.path / ("0" * 32 + ".r3"))


def test_a_file_shorter_than_its_header_says_is_refused(store: StoreDir) -> None:
    path = put(store, expert_rows(1, 100))
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 99 * LAYERS * TOP_K)
    with pytest.raises(FormatError, match="promises"):
        open_rows(path)


def test_changed_rows_do_not_pass_the_check(store: StoreDir) -> None:
    path = put(store, expert_rows(1, 100))
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 7)
        file.write(b"\xee\xef")
    header, rows = open_rows(path)
    with pytest.raises(FormatError, match="checksum"):
        local.check(header, rows, "it")


def test_the_cap_is_hard_and_released_files_make_room(store: StoreDir) -> None:
    header = new_header(1000, 10, 10, "uint8", start=0, expires_s=60, rid="", weight_version="")
    full = []
    while True:
        try:
            full.append(store.reserve(header))
        except ArenaFull as error:
            assert str(store.cap) in str(error)
            break
    # 100,256 bytes are 25 pages.
    assert len(full) == store.cap // (25 * 4096)
    assert store.used <= store.cap
    for writing in full[:3]:
        writing.tmp.unlink()
    for _ in range(3):
        store.reserve(header)
    with pytest.raises(ArenaFull):
        store.reserve(header)


def test_a_directory_of_dead_owners_is_removed_and_one_of_the_living_is_not(tmp_path: Path) -> None:
    living, dead, other = (tmp_path / f"r3router-{name}" for name in ("living", "dead", "other"))
    for path in (living, dead, other):
        path.mkdir()
    (living / "owner").write_text(f"1 77\n{owner_line()}\n")
    # Our pid, but another start: the pid was given to a new process.
    pid = owner_line().split()[0]
    (dead / "owner").write_text(f"{pid} 1\n")
    assert alive(owner_line()) and not alive(f"{pid} 1")
    assert owned(living) and owned(other) and not owned(dead)
    assert reclaim(tmp_path) == [dead]
    assert living.exists() and other.exists() and not dead.exists()


def test_files_and_directory_are_the_owners_alone(store: StoreDir) -> None:
    path = put(store, expert_rows(1, 10))
    assert store.path.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_complete_header_differs_in_state_and_checksum_alone(store: StoreDir) -> None:
    path = put(store, expert_rows(1, 10))
    header, _ = open_rows(path)
    assert replace(header, complete=False).pack()[12:16] == bytes(4)
