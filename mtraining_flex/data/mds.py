"""Read a local folder in MDS, the format of mosaicml-streaming, version 2.

`index.json` lists shards; each is a file of little-endian numbers:

    uint32 n, uint32 begin[n + 1], a header, then the n samples at their offsets
    sample: uint32 size of each column without a fixed size, then the columns

Long-document collections (ProLong among them) are published in it. The library itself
is not used: it asks for a torchvision, and with it for a build of torch. Of its
encodings those are known that texts and tokens use. Source: `streaming/base/format/mds`
of mosaicml/streaming (writer.py, reader.py, encodings.py).
"""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

INDEX = "index.json"
# The codes of an array whose encoding does not name its type.
_INTEGERS = {8: "<u1", 9: "<i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4"}
_INTEGERS |= {64: "<u8", 65: "<i8"}
_CODES = {np.dtype(dtype).name: code for code, dtype in _INTEGERS.items()}


class MdsFolder:
    """Samples by index, over all shards of a folder.

    A folder's own index.json lists all that is in it, as the indices that the library
    merges do; without one, the folders below are read, in the order of their names.
    Shards are mapped into memory and not read.

    Raises:
        ValueError: no index.json or not one of MDS, a version or a compression that is
            not read here, a shard that is missing or of another size.
    """

    def __init__(self, folder: Path):
        indices = _find_indices(folder)
        if not indices:
            raise ValueError(f"holds no {INDEX} of MDS")
        self._shards: list[tuple[Path, dict[str, Any]]] = []
        for index in indices:
            for shard in _read_index(index):
                self._shards.append((_shard_file(index, shard), shard))
        counts = [shard["samples"] for _, shard in self._shards]
        self._ends = np.cumsum(counts, dtype=np.int64)
        if not len(self):
            raise ValueError("holds no document")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return sum(shard["raw_data"]["bytes"] for _, shard in self._shards)

    @property
    def columns(self) -> dict[str, str]:
        """Name and encoding of each column of the first shard."""
        shard = self._shards[0][1]
        return dict(zip(shard["column_names"], shard["column_encodings"], strict=True))

    def sample(self, index: int, columns: list[str]) -> dict[str, Any]:
        """Some columns of a sample.

        Returns:
            Text, bytes, an integer or an array of integers for each column.

        Raises:
            ValueError: a column that is not there or in an encoding that is not read
                here, a file that is not what index.json says.
        """
        assert 0 <= index < len(self), (index, len(self))
        number = int(np.searchsorted(self._ends, index, side="right"))
        file, shard = self._shards[number]
        samples = shard["samples"]
        data = _map(file)
        # [samples + 1] of begin, behind the count
        header = data[: 4 * (samples + 2)].view("<u4")
        if len(header) != samples + 2 or header[0] != samples:
            raise ValueError(
                f"{file}: has {header[0] if len(header) else 0} samples, its {INDEX} "
                f"says {samples}"
            )
        idx = index - (int(self._ends[number]) - samples)
        begin, end = int(header[1 + idx]), int(header[2 + idx])
        if not begin <= end <= len(data):
            raise ValueError(f"{file}: sample {idx} is not within the file")
        return _sample(data[begin:end].tobytes(), shard, columns)


def is_text(encoding: str) -> bool:
    """Whether a column of this encoding holds text."""
    return encoding == "str"


def is_tokens(encoding: str) -> bool:
    """Whether a column of this encoding can hold tokens."""
    kind, *details = encoding.split(":")
    return kind == "ndarray" and (not details or details[0] in _CODES)


@lru_cache(maxsize=64)
def _map(file: Path) -> np.ndarray:
    """A file's bytes, `[n]` uint8. Kept out of `MdsFolder`, which may be pickled."""
    return np.memmap(file, dtype=np.uint8, mode="r")


def _find_indices(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return [folder / INDEX]
    found = []
    for parent, subfolders, names in os.walk(folder, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if INDEX in names:
            found.append(Path(parent, INDEX))
            subfolders.clear()
    return found


def _read_index(index: Path) -> list[dict[str, Any]]:
    """The shards that an index lists."""
    try:
        shards = json.loads(index.read_text())["shards"]
        for shard in shards:
            kind = f"{shard['format']} version {shard['version']}"
            if kind != "mds version 2":
                raise ValueError(f"{kind} is not read, only mds version 2")
            columns = [
                shard[f"column_{key}"] for key in ("names", "encodings", "sizes")
            ]
            if len(set(map(len, columns))) != 1:
                raise ValueError("its columns do not fit each other")
            _ = shard["raw_data"]["basename"], shard["raw_data"]["bytes"]
            _ = shard["samples"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{index}: is not an index of MDS, {error} fails") from error
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from error
    return shards


def _shard_file(index: Path, shard: dict[str, Any]) -> Path:
    file = index.parent / shard["raw_data"]["basename"]
    if not file.exists():
        packed = shard.get("zip_data")
        also = f"; unpack {packed['basename']} first" if packed else ""
        raise ValueError(f"{index}: there is no {file.name}{also}")
    size, stated = file.stat().st_size, shard["raw_data"]["bytes"]
    if size != stated:
        raise ValueError(f"{file}: has {size} bytes, its {INDEX} says {stated}")
    return file


def _sample(content: bytes, shard: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    names, sizes = shard["column_names"], list(shard["column_sizes"])
    for name in wanted:
        if name not in names:
            raise ValueError(f"has no column '{name}'; it has {names}")
    at = 0
    for column, size in enumerate(sizes):
        if not size:
            sizes[column] = int(np.frombuffer(content, "<u4", 1, at)[0])
            at += 4
    if at + sum(sizes) != len(content):
        raise ValueError(f"a sample has {len(content)} bytes, not {at + sum(sizes)}")
    row = {}
    columns = zip(names, shard["column_encodings"], sizes, strict=True)
    for name, encoding, size in columns:
        if name in wanted:
            row[name] = _decode(content[at : at + size], encoding, name)
        at += size
    return row


def _decode(content: bytes, encoding: str, name: str) -> Any:
    """Text, bytes, an integer or an array of integers.

    Raises:
        ValueError: something else.
    """
    kind, *details = encoding.split(":")
    if kind == "str":
        return content.decode()
    if kind == "bytes":
        return content
    if kind == "str_int":
        return int(content.decode())
    if kind == "int":
        return int(np.frombuffer(content, "<i8")[0])
    if kind in _CODES:
        return int(np.frombuffer(content, _INTEGERS[_CODES[kind]])[0])
    if kind == "ndarray":
        return _array(content, name, *details)
    raise ValueError(f"column '{name}' has the encoding '{encoding}', not read here")


def _array(content: bytes, name: str, dtype: str = "", shape: str = "") -> np.ndarray:
    """`[type][dimensions and width of sizes][sizes] values`; what the encoding names is
    not written."""
    at = 0
    if not dtype:
        code, at = content[0], 1
    else:
        code = _CODES.get(dtype, -1)
    if code not in _INTEGERS:
        raise ValueError(
            f"column '{name}' is an array of type {dtype or code}, not of integers"
        )
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        dimensions, width = content[at] >> 2, 2 ** (content[at] & 3)
        sizes = np.frombuffer(content, f"<u{width}", dimensions, at + 1).tolist()
        at += 1 + dimensions * width
    return np.frombuffer(content, _INTEGERS[code], -1, at).reshape(sizes)
