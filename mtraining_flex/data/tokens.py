"""Token files: documents tokenised beforehand by `recipes.prepare_data`.

    manifest.json     what they were made of, and each file's counts and hash
    tokens-00000.arrow, ...

Each file is an Arrow stream of one column, "tokens", a list of int32 for each document,
with the BOS (if the tokenizer has one) and EOS that training would have added. They are
mapped into memory and not read, so a folder may be larger than memory.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

MANIFEST = "manifest.json"
FORMAT = 1
COLUMN = "tokens"
_SCHEMA = pa.schema([pa.field(COLUMN, pa.list_(pa.int32()))])
# A record batch is a unit of reading by index, and its offsets are 32 bits wide.
_BATCH_TOKENS, _BATCH_DOCUMENTS = 1 << 20, 1024


@dataclass(frozen=True)
class TokenFile:
    """One file of a folder."""

    name: str
    documents: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is in a folder, and how far it is written."""

    settings: dict[str, Any]
    """The flags of `recipes.prepare_data` that the tokens depend on, by their names."""
    source: dict[str, Any]
    """What shows that the source is still the same: counts, sizes."""
    tokenizer: dict[str, Any]
    """`tokenizer_identity` of the tokenizer that made the tokens."""
    source_tokenizer: dict[str, Any] | None = None
    """The same of the one that the source's tokens were made with, if it had tokens."""
    files: list[TokenFile] = field(default_factory=list)
    next_document: int = 0
    """First document (row) of the source that the files do not have."""
    left_out: int = 0
    """Documents before that one that were too short or empty."""
    complete: bool = False
    format: int = FORMAT

    @property
    def documents(self) -> int:
        """In all files."""
        return sum(file.documents for file in self.files)

    @property
    def tokens(self) -> int:
        """In all files."""
        return sum(file.tokens for file in self.files)

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest, all of it or nothing."""
        totals = {"documents": self.documents, "tokens": self.tokens}
        part = folder / f"{MANIFEST}.part"
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self) | totals, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ValueError: there is none, or not one that this version reads.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(
            f"has no {MANIFEST}: make token files with `python -m recipes.prepare_data`"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        made = content["format"]
        if made == FORMAT:
            totals = {name: content.pop(name) for name in ("documents", "tokens")}
            content["files"] = [TokenFile(**entry) for entry in content["files"]]
            manifest = Manifest(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {error!r}") from error
    if made != FORMAT:
        raise ValueError(f"{file} has format {made!r}, this version reads {FORMAT}")
    for name, total in totals.items():
        if total != getattr(manifest, name):
            raise ValueError(
                f"{file}: {name} ({total}) is not the sum over its files "
                f"({getattr(manifest, name)})"
            )
    return manifest


def hash_of(file: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# ---- writing ------------------------------------------------------------------------


class TokenFileWriter:
    """Writes one file, as `NAME.part` until `close`.

    The same documents make the same bytes.
    """

    def __init__(self, folder: Path, number: int):
        self._file = folder / f"tokens-{number:05d}.arrow"
        self._part = self._file.with_name(f"{self._file.name}.part")
        self._sink = self._part.open("wb")
        self._stream = pa.ipc.RecordBatchStreamWriter(self._sink, _SCHEMA)
        self._batch: list[np.ndarray] = []
        self._batch_tokens = 0
        self.documents = 0
        self.tokens = 0

    def write(self, tokens: np.ndarray) -> None:
        """Add a document, `[T]` int32."""
        self._batch.append(tokens)
        self._batch_tokens += len(tokens)
        self.documents += 1
        self.tokens += len(tokens)
        full = self._batch_tokens >= _BATCH_TOKENS
        if full or len(self._batch) == _BATCH_DOCUMENTS:
            self._write_batch()

    def _write_batch(self) -> None:
        if not self._batch:
            return
        ends: np.ndarray = np.cumsum([0, *map(len, self._batch)])
        lists = pa.ListArray.from_arrays(
            pa.array(ends, pa.int32()), pa.array(np.concatenate(self._batch))
        )
        self._stream.write_batch(pa.record_batch([lists], schema=_SCHEMA))
        self._batch, self._batch_tokens = [], 0

    def close(self) -> TokenFile:
        """Give the file its name; on the disk before that."""
        self._write_batch()
        self._stream.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        size, digest = self._part.stat().st_size, hash_of(self._part)
        self._part.replace(self._file)
        return TokenFile(self._file.name, self.documents, self.tokens, size, digest)

    def abandon(self) -> None:
        """Leave nothing."""
        self._sink.close()
        self._part.unlink(missing_ok=True)


# ---- reading ------------------------------------------------------------------------


def load_tokens(folder: Path) -> datasets.Dataset:
    """Documents with a column "tokens", by index.

    Raises:
        ValueError: no manifest, files that are missing or of another size, nothing in
            them; `recipes.prepare_data` has not ended.
    """
    manifest = read_manifest(folder)
    if not manifest.complete:
        raise ValueError(
            f"is not complete, {manifest.next_document} documents of its source are in "
            "it: run recipes.prepare_data again, it goes on where it stopped"
        )
    parts = []
    for entry in manifest.files:
        file = folder / entry.name
        check_size(file, entry)
        part = datasets.Dataset.from_file(str(file))
        if part.column_names != [COLUMN] or len(part) != entry.documents:
            raise ValueError(
                f"'{file}' has {len(part)} rows of {part.column_names}, {MANIFEST} "
                f"says {entry.documents} of ['{COLUMN}']"
            )
        parts.append(part)
    if not parts:
        raise ValueError("holds no document")
    # Arrays straight from the mapped file; the default would make lists of Python.
    return datasets.concatenate_datasets(parts).with_format("numpy")


def check_size(file: Path, entry: TokenFile) -> None:
    """See that a file is there, with all its bytes.

    Raises:
        ValueError: names it.
    """
    if not file.is_file():
        raise ValueError(f"'{file}' is missing, {MANIFEST} has it")
    size = file.stat().st_size
    if size != entry.bytes:
        raise ValueError(f"'{file}' has {size} bytes, {MANIFEST} says {entry.bytes}")


def check_file(folder: Path, entry: TokenFile, vocab_size: int) -> None:
    """Read a whole file and compare it with the manifest.

    Raises:
        ValueError: names the file: its size, hash or counts are others, or it has a
            token that the vocabulary has not.
    """
    file = folder / entry.name
    check_size(file, entry)
    digest = hash_of(file)
    if digest != entry.sha256:
        raise ValueError(f"'{file}' has hash {digest}, {MANIFEST} says {entry.sha256}")
    documents = tokens = 0
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            values = batch.column(COLUMN).flatten().to_numpy()
            documents, tokens = documents + batch.num_rows, tokens + len(values)
            if len(values) and not 0 <= values.min() <= values.max() < vocab_size:
                raise ValueError(
                    f"'{file}' has tokens {values.min()} to {values.max()}, the "
                    f"vocabulary has {vocab_size}"
                )
    if (documents, tokens) != (entry.documents, entry.tokens):
        raise ValueError(
            f"'{file}' has {documents} documents and {tokens} tokens, {MANIFEST} says "
            f"{entry.documents} and {entry.tokens}"
        )


def difference(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """The first key whose value is not the same in both, with both values."""
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name), theirs.get(name)
    return None
