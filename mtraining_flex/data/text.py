"""Which text a run reads: `dataset` and `dataset_path` of `[training]`, `[validation]`.

| dataset | dataset_path | read as |
|---|---|---|
| "stdlib" | none | Python's standard library, in memory (mtraining_flex.data.corpus) |
| "local" | file, folder or glob of .jsonl, .parquet, .txt | map style |
| "hub" | Hugging Face dataset id, `id[:config[:split]]` | stream |
| "mds" | folder of mosaicml-streaming with a text column | map style, mapped |
| "tokens" | folder that `recipes.prepare_data` wrote | map style, mapped |

Every source ends as a dataset with one document in each row and a column "text", or
"tokens" for the last. Map style means that any document can be had by its index, so
that order and resume are exact and cheap; a stream is read from the front. Mapped files
may exceed memory.

An MDS whose column is tokens (ProLong's `input_ids`) is refused: nothing in it says
which tokenizer made them. `recipes.prepare_data --source-tokenizer` makes them text and
tokens of the run's own tokenizer.
"""

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import datasets

from mtraining_flex.data.corpus import stdlib_documents
from mtraining_flex.data.mds import MdsFolder, is_text
from mtraining_flex.data.tokens import load_tokens

logger = logging.getLogger(__name__)

SOURCES = ("stdlib", "local", "hub", "mds", "tokens")
TEXT_COLUMNS = ("text", "content")
TOKEN_COLUMNS = ("input_ids", "tokens")
# Suffix -> the reader in the `datasets` library and its options. The order is the order
# of the documents when a folder mixes formats.
FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),  # one file, one document
}


class MdsTexts:
    """The text column of an MDS folder, a document by index.

    Args:
        folder: the samples.
        column: its name.
    """

    column_names = ["text"]

    def __init__(self, folder: MdsFolder, column: str):
        self._folder, self._column = folder, column

    def __len__(self) -> int:
        return len(self._folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`{"text": ...}`."""
        return {"text": self._folder.sample(index, [self._column])[self._column]}


Documents: TypeAlias = datasets.Dataset | datasets.IterableDataset | MdsTexts


def load_documents(
    dataset: str,
    dataset_path: str | None = None,
    *,
    setting: str | None = "training",
    streaming: bool | None = None,
    column: str | None = None,
) -> Documents:
    """The documents that a section of the configuration selects.

    Args:
        dataset: one of `SOURCES`.
        dataset_path: see the module's table; an empty string counts as none.
        setting: section of the configuration, for messages; None names the flags of
            `recipes.prepare_data` instead.
        streaming: read from the front instead of by index; None takes the table's way.
            Without meaning for "mds" and "tokens", which are always read by index.
        column: that holds the text; None takes "text" or "content".

    Returns:
        A dataset with a column "text" or (dataset "tokens") "tokens", one document in
        each row.

    Raises:
        ValueError: names the setting and its value: an unknown source, a path that does
            not exist or holds no document, a file that cannot be read, no text column.
    """
    name, path_name = setting_names(setting)
    if dataset == "stdlib":
        if dataset_path:
            raise ValueError(
                f"{path_name} ('{dataset_path}') has no meaning with {name} 'stdlib'; "
                f"remove it, or set {name} to 'local' or 'hub'"
            )
        documents = stdlib_documents()
        return documents.to_iterable_dataset() if streaming else documents
    if dataset not in SOURCES:
        raise ValueError(f"{name} ('{dataset}') must be one of {list(SOURCES)}")
    if not dataset_path:
        raise ValueError(
            f"{path_name} ({dataset_path!r}) must be set with {name} '{dataset}'"
        )
    with _naming(path_name, dataset_path):
        match dataset:
            case "local":
                return _load_local(dataset_path, bool(streaming), column)
            case "mds":
                return _load_mds(dataset_path, column)
            case "tokens":
                return load_tokens(Path(dataset_path).expanduser())
        return _load_hub(dataset_path, streaming is not False, column)


def setting_names(setting: str | None) -> tuple[str, str]:
    """What the dataset and its path are called: in a section, or as flags (None)."""
    if setting is None:
        return "--dataset", "--dataset-path"
    return f"{setting}.dataset", f"{setting}.dataset_path"


@contextmanager
def _naming(setting: str, value: str) -> Iterator[None]:
    """Turn what the `datasets` library raises into an error about a setting."""
    try:
        yield
    except StopIteration as error:  # how the library's JSON reader meets an empty file
        raise ValueError(f"{setting} ('{value}'): holds no document") from error
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # The library wraps the reader's own error, and that one says what is wrong.
        wrapped = isinstance(error, datasets.exceptions.DatasetsError)
        reason = (wrapped and error.__cause__) or error
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


def _load_local(path: str, streaming: bool, column: str | None) -> Documents:
    files = find_files(path)
    parts = []
    for suffix, (reader, options) in FORMATS.items():
        chosen = [str(file) for file in files if file.suffix == suffix]
        if not chosen:
            continue
        part = datasets.load_dataset(
            reader, data_files=chosen, split="train", streaming=streaming, **options
        )
        parts.append(_only_text(part, f"its {suffix} files", column))
        if suffix == ".txt" and not streaming:
            assert len(part) == len(chosen), (len(part), len(chosen))
    # Each part is text alone by now, so formats can be mixed.
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


# ---- the hub ------------------------------------------------------------------------


def _load_hub(path: str, streaming: bool, column: str | None) -> Documents:
    dataset_id, *rest = path.split(":")
    if len(rest) > 2:
        raise ValueError("must be a dataset id, id:config or id:config:split")
    config = rest[0] if rest and rest[0] else None
    split = rest[1] if len(rest) == 2 and rest[1] else "train"

    def load(streaming: bool) -> Documents:
        part = datasets.load_dataset(
            dataset_id, config, split=split, streaming=streaming
        )
        return _only_text(part, f"split '{split}'", column)

    if streaming:
        try:
            return load(streaming=True)
        except NotImplementedError as error:
            logger.warning(f"'{path}' cannot be streamed, downloading it: {error}")
    return load(streaming=False)


# ---- MDS ----------------------------------------------------------------------------


def open_mds(path: str) -> MdsFolder:
    """The MDS folder of a path.

    Raises:
        ValueError: nothing is there, or nothing that can be read.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError("no such folder")
    return MdsFolder(folder)


def _load_mds(path: str, column: str | None) -> MdsTexts:
    folder = open_mds(path)
    columns = folder.columns
    column = _text_column(list(columns), "its samples", column)
    if not is_text(columns[column]):
        raise ValueError(f"column '{column}' is {columns[column]}, not text{_TOKENS}")
    return MdsTexts(folder, column)


# ---- columns ------------------------------------------------------------------------


_TOKENS = (
    "; tokens need `python -m recipes.prepare_data --dataset mds --source-tokenizer "
    "DIR`, with the tokenizer that made them"
)


def _text_column(columns: list[str], where: str, column: str | None) -> str:
    """The column to read.

    Raises:
        ValueError: there is none; lists the columns there are.
    """
    for name in TEXT_COLUMNS if column is None else (column,):
        if name in columns:
            return name
    wanted = TEXT_COLUMNS if column is None else (column,)
    tokens = _TOKENS if set(columns) & set(TOKEN_COLUMNS) else ""
    raise ValueError(
        f"{where} have the columns {columns}; one must be named "
        + " or ".join(f"'{name}'" for name in wanted)
        + tokens
    )


def _only_text(part: Any, where: str, column: str | None) -> Any:
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
    column = _text_column(columns, where, column)
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
