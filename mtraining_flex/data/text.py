"""Which text a run reads: `dataset` and `dataset_path` of `[training]`, `[validation]`.

| dataset | dataset_path | read as |
|---|---|---|
| "stdlib" | none | Python's standard library, in memory (mtraining_flex.data.corpus) |
| "local" | file, folder or glob of .jsonl, .parquet, .txt | map style |
| "hub" | Hugging Face dataset id, `id[:config[:split]]` | stream |

Every source ends as a dataset with one document in each row and a column "text". Map
style means that any document can be had by its index, so that order and resume are
exact and cheap; a stream is read from the front.
"""

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import datasets

from mtraining_flex.data.corpus import stdlib_documents

logger = logging.getLogger(__name__)

Documents: TypeAlias = datasets.Dataset | datasets.IterableDataset

SOURCES = ("stdlib", "local", "hub")
TEXT_COLUMNS = ("text", "content")
# Suffix -> the reader in the `datasets` library and its options. The order is the order
# of the documents when a folder mixes formats.
FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),  # one file, one document
}


def load_documents(
    dataset: str,
    dataset_path: str | None = None,
    *,
    setting: str = "training",
    streaming: bool | None = None,
) -> Documents:
    """The documents that a section of the configuration selects.

    Args:
        dataset: "stdlib", "local" or "hub".
        dataset_path: see the module's table; an empty string counts as none.
        setting: section of the configuration, for messages.
        streaming: read from the front instead of by index; None takes the table's way.

    Returns:
        A dataset with a column "text", one document in each row.

    Raises:
        ValueError: names the setting and its value: an unknown source, a path that does
            not exist or holds no document, a file that cannot be read, no text column.
    """
    name = f"{setting}.dataset"
    if dataset == "stdlib":
        if dataset_path:
            raise ValueError(
                f"{name}_path ('{dataset_path}') has no meaning with {name} 'stdlib'; "
                f"remove it, or set {name} to 'local' or 'hub'"
            )
        documents = stdlib_documents()
        return documents.to_iterable_dataset() if streaming else documents
    if dataset not in SOURCES:
        raise ValueError(f"{name} ('{dataset}') must be one of {list(SOURCES)}")
    if not dataset_path:
        raise ValueError(
            f"{name}_path ({dataset_path!r}) must be set with {name} '{dataset}'"
        )
    with _naming(f"{name}_path", dataset_path):
        if dataset == "local":
            return _load_local(dataset_path, streaming=bool(streaming))
        return _load_hub(dataset_path, streaming=streaming is not False)


@contextmanager
def _naming(setting: str, value: str) -> Iterator[None]:
    """Turn what the `datasets` library raises into an error about a setting."""
    try:
        yield
    except StopIteration as error:  # how the library's JSON reader meets an empty file
        raise ValueError(f"{setting} ('{value}'): holds no document") from error
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        # The library wraps the reader's own error, and that one says what is wrong.
        reason = error.__cause__ or error
        raise ValueError(f"{setting} ('{value}'): {reason}") from error


# ---- local files --------------------------------------------------------------------


def _files_in(folder: Path) -> list[Path]:
    """All files below a folder except hidden ones, sorted by path."""
    found: list[Path] = []
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(found)


def find_files(path: str) -> list[Path]:
    """The document files that a path names: itself, those below it, or a glob's.

    Returns:
        Absolute paths, sorted, without repeats.

    Raises:
        ValueError: nothing is there, or nothing in a format that can be read.
    """
    path = os.path.expanduser(path)
    if os.path.exists(path):
        matches = [path]
    elif glob.has_magic(path):
        matches = glob.glob(path, recursive=True)
    else:
        raise ValueError("no such file or folder")
    files: set[Path] = set()
    for match in map(Path, matches):
        files.update(_files_in(match) if match.is_dir() else [match])
    readable = sorted(file.absolute() for file in files if file.suffix in FORMATS)
    if not readable:
        raise ValueError(
            f"holds none of {list(FORMATS)} among its {len(files)} files"
            if files
            else "matches no file"
        )
    if len(readable) < len(files):
        logger.warning(
            f"{len(files) - len(readable)} of {len(files)} files in '{path}' are not "
            f"{list(FORMATS)} and are left out"
        )
    return readable


def _load_local(path: str, streaming: bool) -> Documents:
    files = find_files(path)
    parts = []
    for suffix, (reader, options) in FORMATS.items():
        chosen = [str(file) for file in files if file.suffix == suffix]
        if not chosen:
            continue
        part = datasets.load_dataset(
            reader, data_files=chosen, split="train", streaming=streaming, **options
        )
        parts.append(_only_text(part, f"its {suffix} files"))
        if suffix == ".txt" and not streaming:
            assert len(part) == len(chosen), (len(part), len(chosen))
    # Each part is text alone by now, so formats can be mixed.
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


# ---- the hub ------------------------------------------------------------------------


def _load_hub(path: str, streaming: bool) -> Documents:
    dataset_id, *rest = path.split(":")
    if len(rest) > 2:
        raise ValueError("must be a dataset id, id:config or id:config:split")
    config = rest[0] if rest and rest[0] else None
    split = rest[1] if len(rest) == 2 and rest[1] else "train"

    def load(streaming: bool) -> Documents:
        part = datasets.load_dataset(
            dataset_id, config, split=split, streaming=streaming
        )
        return _only_text(part, f"split '{split}'")

    if streaming:
        try:
            return load(streaming=True)
        except NotImplementedError as error:
            logger.warning(f"'{path}' cannot be streamed, downloading it: {error}")
    return load(streaming=False)


# ---- columns ------------------------------------------------------------------------


def _only_text(part: Documents, where: str) -> Documents:
    """The text column alone, under the name "text" and as strings.

    Raises:
        ValueError: no row, or no text column; lists the columns there are.
    """
    streaming = isinstance(part, datasets.IterableDataset)
    columns = part.column_names
    if columns is None or streaming:  # a stream's columns show in its first row
        first = next(iter(part), None)
        columns = [] if first is None else list(first)
    if not columns or (not streaming and len(part) == 0):
        raise ValueError(f"{where} hold no document")
    column = next((name for name in TEXT_COLUMNS if name in columns), None)
    if column is None:
        raise ValueError(
            f"{where} have the columns {columns}; one must be named "
            + " or ".join(f"'{name}'" for name in TEXT_COLUMNS)
        )
    if not streaming:
        dtype = getattr(part.features[column], "dtype", None)
        if dtype not in ("string", "large_string"):
            raise ValueError(f"column '{column}' of {where} is {dtype}, not text")
    part = part.select_columns([column])
    if column != "text":
        part = part.rename_column(column, "text")
    if not streaming and part.features["text"].dtype != "string":
        part = part.cast_column("text", datasets.Value("string"))
    return part
