"""From text to `[B, S]` batches: corpora, a small tokenizer, resumable sequences."""

from pathlib import Path

TOKENIZER_DIR = Path(__file__).parent / "tokenizer"
"""A byte-level BPE tokenizer of 4096 entries (recipes/train_tokenizer.py)."""

__all__ = ["TOKENIZER_DIR"]
