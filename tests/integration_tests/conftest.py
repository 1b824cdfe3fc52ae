"""The training runs that the tests of this folder look at.

All runs on one number of processes share a process group: a spawn costs more than a
run. The tiny model in fp32, 16 blocks of 16 tokens, on generated text.
"""

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, Launched
from tests.distributed.train_worker import TITAN, Run, launch_plan

SEQ_LEN = 256
STEPS = 10
SPARSE = [
    "--sparse_attention.budget=top_k",
    "--sparse_attention.num_vertical=24",
    "--sparse_attention.num_slash=4",
    "--sparse_attention.sink=2",
]
# Without a pattern's name: the default, vertical_slash.
PATTERNS = {
    "dense": ["--sparse_attention.pattern=dense"],
    "full_k": ["--sparse_attention.budget=top_k"],  # default caps exceed 16 blocks
    "full_p": ["--sparse_attention.vertical_p=1.0", "--sparse_attention.slash_p=1.0"],
    "sparse": SPARSE,
}
COMPILED = [
    "--compile.enable",
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
    "--debug.deterministic",
]
# Its learning rate moves nothing: each validation sees the initial weights.
VALIDATED = [
    *PATTERNS["dense"],
    "--training.steps=2",
    "--optimizer.lr=1e-12",
    "--validation.enable",
    "--validation.dataset=local",
    "--validation.seq_len=128",
    "--validation.local_batch_size=2",
    "--validation.freq=2",
]
TWO_LEVEL = ["--ring.rotation=two_level", "--ring.inner_degree=2"]
ALLGATHER = ["--ring.rotation=allgather"]
# Interpreted, and so a few steps.
TRITON = [*SPARSE, "--sparse_attention.backend=triton", "--training.steps=3"]
CHUNKED = ["--loss.chunk_size=40"]  # does not divide a rank's 128 or 64 tokens
QWEN = ["--model.name=mtraining_qwen2", "--model.flavor=tiny_tied", *SPARSE]


def words(seed: int, count: int) -> str:
    """Text that a model can learn something of."""
    rng = random.Random(seed)
    stems = ["ring", "block", "query", "key", "value", "head", "layer", "rank", "mask"]
    return " ".join(
        rng.choice(stems) + rng.choice(["", "s", "_", "."]) for _ in range(count)
    )


def write_documents(file: Path, lengths: list[int]) -> Path:
    """A .jsonl with one document of so many words in each line."""
    rows = [{"text": words(i, count)} for i, count in enumerate(lengths)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl, and valid.jsonl in which every second document is long."""
    folder = tmp_path_factory.mktemp("corpus")
    write_documents(folder / "train.jsonl", [200 + 17 * i for i in range(40)])
    write_documents(folder / "valid.jsonl", [700, 130] * 4 + [700, 166])
    return folder


class Plans:
    """Runs of one number of processes."""

    def __init__(self, corpus: Path, folder: Path, world_size: int):
        self.corpus, self.folder, self.world_size = corpus, folder, world_size
        self.runs: list[Run] = []

    def add(self, name: str, *flags: str, single_label: bool = False) -> None:
        common = [
            "--job.custom_config_module=mtraining_flex.config",
            f"--job.dump_folder={self.folder / name}",
            "--model.name=mtraining_llama3",
            "--model.flavor=tiny",
            f"--model.hf_assets_path={ROOT}/mtraining_flex/data/tokenizer",
            "--training.dataset=local",
            f"--training.dataset_path={self.corpus / 'train.jsonl'}",
            f"--validation.dataset_path={self.corpus / 'valid.jsonl'}",
            f"--training.seq_len={SEQ_LEN}",
            "--training.local_batch_size=1",
            f"--training.steps={STEPS}",
            "--training.mixed_precision_param=float32",
            "--optimizer.lr=1e-3",
            "--lr_scheduler.warmup_steps=2",
            "--activation_checkpoint.mode=none",
            "--sparse_attention.granularity=16",
            "--metrics.log_freq=1",
            "--comm.train_timeout_seconds=60",
            "--debug.seed=7",
        ]
        if not any("context_parallel_degree" in flag for flag in flags):
            common.append("--parallelism.context_parallel_degree=-1")
        self.runs.append(Run(name, [*common, *flags], single_label))

    def add_single_label(self, name: str, *flags: str) -> None:
        self.add(
            name,
            *SPARSE,
            "--training.steps=1",
            "--training.max_norm=1e9",
            "--training.global_batch_size=2",
            *flags,
            single_label=True,
        )

    def launch(self) -> Launched:
        return launch_plan(self.folder, self.world_size, self.runs)


def equality(plans: Plans) -> None:
    """What must be the same on any number of ranks."""
    plans.add("dense", *PATTERNS["dense"])
    plans.add("full_k", *PATTERNS["full_k"])
    plans.add("sparse", *PATTERNS["sparse"])
    plans.add("qwen2", *QWEN)
    plans.add_single_label("single_label", "--training.local_batch_size=2")
    plans.add_single_label("single_label_accumulated")


@pytest.fixture(scope="session")
def one(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    plans = Plans(corpus, tmp_path_factory.mktemp("one"), 1)
    alone = "--parallelism.context_parallel_degree=1"
    plans.add("titan", f"--model.name={TITAN}", alone)
    plans.add("full_p", *PATTERNS["full_p"])
    equality(plans)
    plans.add("triton", *TRITON)
    plans.add("validation", *VALIDATED)
    return plans.launch()


@pytest.fixture(scope="session")
def two(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    plans = Plans(corpus, tmp_path_factory.mktemp("two"), 2)
    equality(plans)
    plans.add("allgather", *SPARSE, *ALLGATHER)
    plans.add("triton", *TRITON, *COMPILED[1:3])  # checkpointed
    plans.add("metrics", *SPARSE, "--metrics.enable_tensorboard", "--training.steps=4")
    plans.add("validation", *VALIDATED)
    plans.add("chunked", *SPARSE, *CHUNKED)
    plans.add("chunked_qwen2", *QWEN, *CHUNKED)
    plans.add("chunked_compiled", *SPARSE, *COMPILED, *CHUNKED)
    plans.add("chunked_validation", *VALIDATED, *CHUNKED)
    checkpoint = ["--checkpoint.enable", "--checkpoint.interval=5"]
    plans.add("uninterrupted", *SPARSE, *COMPILED, *checkpoint)
    return plans.launch()


@pytest.fixture(scope="session")
def two_again(
    corpus: Path, two: Launched, tmp_path_factory: pytest.TempPathFactory
) -> Launched:
    """New processes: the run of before, and the same from the checkpoint of step 5."""
    two.check("uninterrupted")
    plans = Plans(corpus, tmp_path_factory.mktemp("two_again"), 2)
    plans.add("repeated", *SPARSE, *COMPILED)
    plans.add("resumed", *SPARSE, *COMPILED, "--checkpoint.enable")
    shutil.copytree(
        two.folder / "uninterrupted" / "checkpoint" / "step-5",
        plans.folder / "resumed" / "checkpoint" / "step-5",
    )
    return plans.launch()


@pytest.fixture(scope="session")
def four(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Rings of four, and two rings of two side by side."""
    plans = Plans(corpus, tmp_path_factory.mktemp("four"), 4)
    equality(plans)
    rings_of_two = ["--parallelism.context_parallel_degree=2"]
    replicas = ["--parallelism.data_parallel_replicate_degree=2"]
    sharded = ["--parallelism.data_parallel_shard_degree=2"]
    plans.add("two_level", *SPARSE, *TWO_LEVEL)
    gathered = [*TWO_LEVEL, "--ring.inner=allgather"]
    plans.add("two_level_compiled", *SPARSE, *COMPILED, *gathered)
    plans.add("readers", *SPARSE, *rings_of_two, *sharded, "--training.steps=6")
    plans.add_single_label("single_label_fsdp", *rings_of_two, *sharded)
    plans.add_single_label(
        "single_label_hsdp",
        *rings_of_two,
        *replicas,
        "--parallelism.data_parallel_shard_degree=1",
    )
    plans.add("validation", *VALIDATED, *rings_of_two, *sharded)
    plans.add_single_label("chunked_single_label", *rings_of_two, *sharded, *CHUNKED)
    plans.add_single_label("chunked_accumulated", *CHUNKED)
    return plans.launch()
