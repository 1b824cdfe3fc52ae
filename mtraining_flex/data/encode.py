"""One document's tokens, the same while training and in `recipes.prepare_data`."""

from pathlib import Path
from typing import Any

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer

from mtraining_flex.data.tokens import hash_of

# In the order in which torchtitan takes them.
_TOKENIZER_FILES = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt", "merges.txt"),
)


def encode_document(tokenizer: BaseTokenizer, text: Any, where: str) -> np.ndarray:
    """A document with one BOS, if the tokenizer has one, and one EOS, if it has one.

    Args:
        tokenizer: torchtitan's; its own BOS and EOS settings are respected.
        text: of one document.
        where: the document, for messages.

    Returns:
        [T] int32 tokens.

    Raises:
        ValueError: it is not text.
    """
    if not isinstance(text, str):
        raise ValueError(f"{where} has no text, got {type(text).__name__}")
    tokens = np.asarray(
        tokenizer.encode(text, add_bos=True, add_eos=True), dtype=np.int32
    )
    # A text that spells the special token itself would make two of them.
    bos_id, eos_id = getattr(tokenizer, "bos_id", None), tokenizer.eos_id
    while bos_id is not None and len(tokens) > 1 and all(tokens[:2] == bos_id):
        tokens = tokens[1:]
    while eos_id is not None and len(tokens) > 1 and all(tokens[-2:] == eos_id):
        tokens = tokens[:-1]
    return tokens


def tokenizer_identity(tokenizer: BaseTokenizer) -> dict[str, int | str | None]:
    """What must be the same for tokens to mean the same.

    Returns:
        `vocab_size`, `bos_id`, `eos_id`, and the SHA-256 of each file that the
        vocabulary was read from, if it was, by its name.
    """
    identity: dict[str, int | str | None] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_id": getattr(tokenizer, "bos_id", None),
        "eos_id": tokenizer.eos_id,
    }
    folder = getattr(tokenizer, "tokenizer_path", None)
    if folder is not None:
        sets = [[Path(folder, name) for name in names] for names in _TOKENIZER_FILES]
        files = next((files for files in sets if files[0].exists()), [])
        identity |= {file.name: hash_of(file) for file in files if file.exists()}
    return identity
