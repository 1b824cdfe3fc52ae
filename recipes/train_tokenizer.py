"""Train the tokenizer of the debug models on Python's standard library.

    python -m recipes.train_tokenizer

writes `tokenizer.json` and `tokenizer_config.json` into mtraining_flex/data/tokenizer.
Byte-level BPE: any text comes back as it was, there is no unknown token. One special
token, `<|endoftext|>`, ends a document and pads; there is no BOS. The same Python and
`tokenizers` versions write the same bytes; the files in the repository come from Python
3.11.7 and tokenizers 0.23.3.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mtraining_flex.data import TOKENIZER_DIR
from mtraining_flex.data.corpus import stdlib_documents

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE tokenizer with `END_OF_TEXT` as token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes, also those that the corpus never uses.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The two files that torchtitan's `HuggingFaceTokenizer` and transformers read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=TOKENIZER_DIR)
    output = parser.parse_args().output
    tokenizer = train_tokenizer(stdlib_documents()["text"][:])
    save_tokenizer(tokenizer, output)
    print(f"{tokenizer.get_vocab_size()} tokens written to {output}")


if __name__ == "__main__":
    main()
