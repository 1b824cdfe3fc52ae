"""A corpus that every machine already has: Python's own standard library.

Long-context training needs long documents, and a first run should need no download. The
standard library of the running interpreter is some 12 MB of real, well-connected text:
a package, its files one after the other, is one long document (`idlelib`, `email` and
`encodings` are each over 100K tokens), and each top-level module is a document of its
own. The text depends on the Python version, so losses compare only within one version.
"""

import logging
import os
import sysconfig
import tokenize
from functools import lru_cache
from pathlib import Path

import datasets

logger = logging.getLogger(__name__)

SKIPPED_DIRS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "idle_test",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
    }
)
"""Directories that are left out at any depth: other people's code, and tests."""


def stdlib_path() -> Path:
    """Where the running interpreter keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _source_files(package: Path) -> list[Path]:
    """The *.py files below a directory, in an order that no file system decides."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(package):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_DIRS]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(package).parts)


def _read(path: Path) -> str | None:
    """A source file in the encoding it declares (PEP 263); None if it does not decode.

    A file in the wrong encoding is left out with a warning rather than patched with
    replacement characters, which would teach the model text that nobody wrote.
    """
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError) as error:
        logger.warning(f"{path} is left out of the corpus, it does not decode: {error}")
        return None


def source_documents(root: Path) -> list[dict[str, str]]:
    """One document for each package and each single module below `root`, by name.

    Args:
        root: a directory laid out like the standard library. A package is a directory
            whose name could be imported (`config-3.11-x86_64` could not).

    Returns:
        `{"name", "text"}` of each document. A package's files each follow a comment
        line with their path; empty files and packages without sources are left out.
    """
    entries = sorted(root.iterdir(), key=lambda path: path.name)
    documents = []
    for entry in entries:
        if entry.is_dir():
            if entry.name in SKIPPED_DIRS or not entry.name.isidentifier():
                continue
            files = _source_files(entry)
        elif entry.suffix == ".py":
            files = [entry]
        else:
            continue
        parts = []
        for file in files:
            source = _read(file)
            if source:
                parts.append(f"# {file.relative_to(root).as_posix()}\n{source}")
        if parts:
            documents.append({"name": entry.name, "text": "\n".join(parts)})
    return documents


@lru_cache(maxsize=1)
def stdlib_documents() -> datasets.Dataset:
    """The standard library as documents, in memory; nothing is written or downloaded.

    Returns:
        A map-style dataset with the columns "name" and "text", sorted by name.

    Raises:
        ValueError: this interpreter has no standard library in source form.
    """
    root = stdlib_path()
    documents = source_documents(root) if root.is_dir() else []
    if not documents:
        raise ValueError(
            f"dataset 'stdlib' found no *.py file in {root}: this Python keeps its "
            "standard library elsewhere; use dataset 'local' with a dataset_path"
        )
    return datasets.Dataset.from_list(documents)
