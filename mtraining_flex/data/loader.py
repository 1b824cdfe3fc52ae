"""Documents in, sequences of equal length out, exactly resumable.

The path: documents -> the share of one data-parallel rank -> tokens, with one EOS and
(if the tokenizer has it) one BOS for each document -> one line of tokens -> cuts. With
dataset "tokens" the second arrow is behind us (`recipes.prepare_data`), and the line is
the same.

    tokens     t0 t1 t2 ... tS  ...           S = seq_len
    sequence 0 inputs t0 .. t(S-1)   labels t1 .. tS
    sequence 1 inputs tS .. t(2S-1)  labels t(S+1) .. t2S

So each token of the line is a label exactly once: the last label of a sequence is the
first input of the next. With `infinite=True` the line goes on into the next epoch, and
nothing is lost at the seam; otherwise the labels that fill no sequence are left out.

Shares: document `i` belongs to rank `i % dp_world_size`, in every epoch, so ranks never
read the same document, even when a rank with shorter documents is an epoch ahead.
Context-parallel peers have the same data-parallel rank and read the same sequences.
Map-style documents are shuffled within the rank's share, anew for each epoch, by the
seed and the epoch alone; a stream keeps its order.

State: a position (epoch, document, token) and no tokens, so it is a few bytes at any
seq_len. Resume encodes the current document again; a stream is read up to it again. The
position does not depend on seq_len: a run may go on from its checkpoint with longer
sequences.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from mtraining_flex.data.encode import encode_document, tokenizer_identity
from mtraining_flex.data.text import Documents, load_documents
from mtraining_flex.data.tokens import COLUMN, difference, read_manifest

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class Span(NamedTuple):
    """Where some inputs of a sequence come from."""

    epoch: int
    document: int
    """Index in the whole dataset, BOS and EOS included in its tokens."""
    start: int
    stop: int


@dataclass(frozen=True)
class Position:
    """The first input of the next sequence."""

    epoch: int = 0
    document_idx: int = 0
    """Place in the rank's order of this epoch."""
    token_idx: int = 0
    """Place in the encoded document."""


@dataclass
class _Piece:
    """An encoded document that is being cut."""

    epoch: int
    document_idx: int
    document: int
    begin: int
    """First token that is not an input yet."""
    tokens: np.ndarray
    """[T] int32"""


class TextSequences(IterableDataset, Stateful):
    """Sequences of `seq_len` tokens from one data-parallel rank's documents.

    Yields `({"input": [S] int64}, labels [S] int64)`. Each `iter()` starts from the
    first document, or once from a loaded state: every validation sees the same text.

    Args:
        documents: rows with a string "text", or "tokens" that `encode_document` made;
            by index, or a stream of `datasets`.
        tokenizer: torchtitan's; its own BOS and EOS settings are respected.
        seq_len: S, in tokens.
        dp_rank: which share to read.
        dp_world_size: number of shares.
        infinite: go on with the next epoch at the end of the documents.
        shuffle_seed: order of map-style documents; None keeps theirs.
        setting: section of the configuration, for messages.

    Raises:
        ValueError: fewer documents than ranks; while iterating: fewer tokens in an
            epoch than one sequence needs, or a row without text.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: BaseTokenizer,
        seq_len: int,
        *,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = True,
        shuffle_seed: int | None = None,
        setting: str = "training",
    ) -> None:
        assert 0 <= dp_rank < dp_world_size, (dp_rank, dp_world_size)
        if seq_len < 1:
            raise ValueError(f"{setting}.seq_len ({seq_len}) must be at least 1")
        self.num_documents: int | None = None
        self._stride, self._offset = dp_world_size, dp_rank
        if not isinstance(documents, datasets.IterableDataset):
            self.num_documents = len(documents)
            if self.num_documents < dp_world_size:
                raise ValueError(
                    f"{setting}.dataset has {self.num_documents} documents, fewer than "
                    f"the data-parallel degree ({dp_world_size}): each rank needs its "
                    "own; use more documents or a lower degree"
                )
        else:
            shuffle_seed = None
            if documents.num_shards % dp_world_size == 0:
                # Whole files for each rank: nobody reads what only others need.
                documents = documents.shard(dp_world_size, dp_rank, contiguous=False)
                self._stride, self._offset = 1, 0
        if tokenizer.eos_id is None:
            logger.warning(
                "the tokenizer has no EOS token: nothing separates the documents"
            )
        self._documents = documents
        self._tokenizer = tokenizer
        self.seq_len = seq_len
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.infinite = infinite
        self.shuffle_seed = shuffle_seed
        self._setting = setting
        self._position = Position()
        self._loaded: Position | None = None
        self.record: list[tuple[Span, ...]] | None = None
        """Set to a list to have the origin of each sequence appended (in-process)."""

    # ---- documents and tokens -------------------------------------------------------

    def _order(self, epoch: int) -> np.ndarray:
        """[n] indices of this rank's documents in the order of an epoch (map style)."""
        share: np.ndarray = np.arange(
            self.dp_rank, self.num_documents, self.dp_world_size
        )
        if self.shuffle_seed is None:
            return share
        # RandomState, because NumPy promises its numbers never change: a resume under
        # another version must find the same order.
        low, high = self.shuffle_seed % 2**32, (self.shuffle_seed >> 32) % 2**32
        return np.random.RandomState([low, high, epoch % 2**32]).permutation(share)

    def _rows(self, epoch: int, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """(document, its row) of this rank, from place `first` of its order."""
        if not isinstance(self._documents, datasets.IterableDataset):
            for index in self._order(epoch)[first:].tolist():
                yield index, self._documents[index]
            return
        # `skip` counts rows, so it lands on the row we left; the library's own stream
        # state may land on the start of a chunk.
        stream = self._documents.skip(first * self._stride)
        for idx, row in enumerate(stream):
            if idx % self._stride == self._offset:
                place = first + idx // self._stride
                yield place * self.dp_world_size + self.dp_rank, row

    def _encode(self, document: int, row: dict[str, Any]) -> np.ndarray:
        """[T] int32 tokens of a document, encoded before or now."""
        if COLUMN in row:
            return np.asarray(row[COLUMN], dtype=np.int32)
        where = f"{self._setting}.dataset: document {document}"
        return encode_document(self._tokenizer, row["text"], where)

    def _pieces(self, start: Position) -> Iterator[_Piece]:
        """The encoded documents from a position on, epoch after epoch."""
        epoch, first, begin = start.epoch, start.document_idx, start.token_idx
        while True:
            num_tokens = 0
            for idx, (document, row) in enumerate(self._rows(epoch, first), first):
                tokens = self._encode(document, row)
                num_tokens += len(tokens)
                if begin and begin >= len(tokens):
                    raise ValueError(
                        f"{self._setting}.dataset changed since the checkpoint: "
                        f"document {document} has {len(tokens)} tokens, the checkpoint "
                        f"is at token {begin}"
                    )
                if len(tokens):
                    yield _Piece(epoch, idx, document, begin, tokens)
                begin = 0
            if first == 0:  # a whole epoch was seen
                self._check_epoch(num_tokens)
            if not self.infinite:
                return
            logger.info(
                f"{self._setting}.dataset: epoch {epoch} is read, starting again"
            )
            epoch, first, begin = epoch + 1, 0, 0

    def _check_epoch(self, num_tokens: int) -> None:
        if num_tokens <= self.seq_len:
            raise ValueError(
                f"{self._setting}.seq_len ({self.seq_len}) is too long for the data: "
                f"rank {self.dp_rank} of the data-parallel degree "
                f"({self.dp_world_size}) has {num_tokens} tokens in an epoch, one "
                f"sequence needs {self.seq_len + 1}"
            )

    # ---- sequences ------------------------------------------------------------------

    def __iter__(self) -> Iterator[Sample]:
        # Not a generator: the state asked for between here and the first sequence must
        # already be the start of this pass.
        worker = get_worker_info()
        assert worker is None or worker.num_workers == 1, (
            "workers would repeat the data"
        )
        start, self._loaded = self._loaded or Position(), None
        self._position = start
        return self._sequences(start)

    def _sequences(self, start: Position) -> Iterator[Sample]:
        pieces: deque[_Piece] = deque()
        buffered = 0
        for piece in self._pieces(start):
            pieces.append(piece)
            buffered += len(piece.tokens) - piece.begin
            while buffered > self.seq_len:
                window = self._cut(pieces)
                buffered -= self.seq_len
                front = pieces[0]
                self._position = Position(front.epoch, front.document_idx, front.begin)
                yield {"input": window[:-1]}, window[1:]
        logger.info(
            f"{self._setting}.dataset is read to the end; its last "
            f"{max(buffered - 1, 0)} labels fill no sequence of {self.seq_len}"
        )

    def _cut(self, pieces: deque[_Piece]) -> torch.Tensor:
        """[S + 1] tokens: S are taken, the last is only looked at."""
        window = np.empty(self.seq_len + 1, dtype=np.int64)
        spans = []
        filled = 0
        while filled < self.seq_len:
            piece = pieces[0]
            end = min(piece.begin + self.seq_len - filled, len(piece.tokens))
            taken = end - piece.begin
            window[filled : filled + taken] = piece.tokens[piece.begin : end]
            spans.append(Span(piece.epoch, piece.document, piece.begin, end))
            filled += taken
            piece.begin = end
            if end == len(piece.tokens):
                pieces.popleft()
        window[-1] = pieces[0].tokens[pieces[0].begin]
        if self.record is not None:
            self.record.append(tuple(spans))
        return torch.from_numpy(window)

    # ---- checkpoint -----------------------------------------------------------------

    def _identity(self) -> dict[str, int | None]:
        """What must be the same for a position to mean the same."""
        return {"num_documents": self.num_documents, "seed": self.shuffle_seed}

    def state_dict(self) -> dict[str, Any]:
        """The position of the next sequence; a handful of integers."""
        return {**asdict(self._position), **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next `iter()` go on from a saved position.

        Raises:
            ValueError: the data or its seed is not the one of the checkpoint.
        """
        for name, value in self._identity().items():
            if state_dict[name] != value:
                raise ValueError(
                    f"{self._setting}.dataset: {name} ({value}) differs from the "
                    f"checkpoint's ({state_dict[name]}); use the same data and "
                    "debug.seed, or put 'dataloader' in checkpoint.exclude_from_loading"
                )
        self._loaded = Position(
            **{name: state_dict[name] for name in asdict(self._position)}
        )
        self._position = self._loaded


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = True,
) -> ParallelAwareDataloader:
    """The training batches of `[training]`, for torchtitan's `build_dataloader_fn`.

    Yields `({"input": [B, S]}, labels [B, S])`, both int64. Documents are shuffled with
    `debug.seed`, or 0.

    Raises:
        ValueError: names the setting that is wrong.
    """
    return _build(
        "training",
        job_config.training,
        tokenizer,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        infinite=infinite,
        shuffle_seed=job_config.debug.seed or 0,
    )


def build_validation_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = False,
) -> ParallelAwareDataloader:
    """The batches of `[validation]`: not shuffled, the same in every validation.

    The last batch of a finite pass may be smaller, and ranks may have unequal numbers
    of batches: a loop with collectives must stop when the first rank ends.

    Raises:
        ValueError: names the setting that is wrong.
    """
    return _build(
        "validation",
        job_config.validation,
        tokenizer,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        infinite=infinite,
        shuffle_seed=None,
    )


def _build(
    setting: str,
    section: Any,
    tokenizer: BaseTokenizer,
    *,
    dp_rank: int,
    dp_world_size: int,
    infinite: bool,
    shuffle_seed: int | None,
) -> ParallelAwareDataloader:
    workers = section.dataloader.num_workers
    if workers not in (0, 1):
        raise ValueError(
            f"{setting}.dataloader.num_workers ({workers}) must be 0 or 1: a rank's "
            "documents make one line of tokens"
        )
    documents = load_documents(section.dataset, section.dataset_path, setting=setting)
    if section.dataset == "tokens":
        _check_tokenizer(setting, section.dataset_path, tokenizer)
    sequences = TextSequences(
        documents,
        tokenizer,
        section.seq_len,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        infinite=infinite,
        shuffle_seed=shuffle_seed,
        setting=setting,
    )
    count = sequences.num_documents
    logger.info(
        f"{setting}: dataset '{section.dataset}' "
        f"({'a stream' if count is None else f'{count} documents'}), cut to "
        f"{section.seq_len} tokens for data-parallel rank {dp_rank} of {dp_world_size}"
    )
    return ParallelAwareDataloader(
        sequences,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        **{**asdict(section.dataloader), "batch_size": section.local_batch_size},
    )


def _check_tokenizer(setting: str, path: str, tokenizer: BaseTokenizer) -> None:
    """See that the tokens of a folder are this run's tokenizer's.

    Raises:
        ValueError: names what differs, and both values.
    """
    made_with = read_manifest(Path(path).expanduser()).tokenizer
    found = difference(tokenizer_identity(tokenizer), made_with)
    if found is not None:
        name, ours, theirs = found
        where = getattr(tokenizer, "tokenizer_path", "")
        raise ValueError(
            f"{setting}.dataset_path ('{path}') was made with another tokenizer: "
            f"{name} is {theirs} there and {ours} in model.hf_assets_path ('{where}')"
        )
