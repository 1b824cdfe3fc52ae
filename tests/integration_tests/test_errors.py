"""A configuration that cannot be right ends the run before its first step.

The message names the setting and says what would be right.
"""

from pathlib import Path

import pytest
import torch.distributed as dist
from torchtitan.config import ConfigManager

from mtraining_flex import train_spec
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.trainer import SparseTrainer
from tests.distributed.launch import run

MODEL = ["--model.name=mtraining_llama3", "--model.flavor=tiny"]
CP = "--parallelism.context_parallel_degree="

# World size, flags, and what the message must hold.
REFUSED: dict[str, tuple[int, list[str], list[str]]] = {
    "length": (
        4,
        ["--training.seq_len=1000", f"{CP}4"],
        ["training.seq_len", "(1000)", "cp_size * granularity (4 * 128 = 512)"],
    ),
    "length+1": (4, ["--training.seq_len=8193", f"{CP}4"], ["(8193)", "multiple"]),
    "length-1": (4, ["--training.seq_len=8191", f"{CP}4"], ["(8191)", "multiple"]),
    "length+128": (4, ["--training.seq_len=8320", f"{CP}4"], ["(8320)", "512"]),
    "zigzag": (
        2,
        ["--training.seq_len=768", f"{CP}2", "--ring.layout=zigzag"],
        ["(768)", "2 * cp_size * granularity (2 * 2 * 128 = 512)"],
    ),
    "ranks": (
        32,
        ["--training.seq_len=2048", f"{CP}32"],
        ["cp_size (32)", "more ranks than blocks", "16 blocks"],
    ),
    "validation": (
        4,
        [f"{CP}4", "--validation.enable", "--validation.seq_len=1000"],
        ["validation.seq_len", "(1000)"],
    ),
    "degrees": (3, [f"{CP}2"], ["context_parallel_degree (2)", "world size (3)"]),
    "ddp": (2, ["--parallelism.data_parallel_replicate_degree=2"], ["plain DDP"]),
    "tp": (
        4,
        ["--parallelism.tensor_parallel_degree=2", f"{CP}2"],
        ["tensor_parallel_degree (2)", "must be 1"],
    ),
    "pp": (
        2,
        ["--parallelism.pipeline_parallel_degree=2"],
        ["pipeline_parallel_degree (2)", "must be 1"],
    ),
    "two_level": (
        4,
        [f"{CP}4", "--ring.rotation=two_level"],
        ["ring.inner_degree (4, the ring's ranks on a node of 4", "(4)", "'ring'"],
    ),
    "inner_degree": (
        4,
        [f"{CP}4", "--ring.rotation=two_level", "--ring.inner_degree=3"],
        ["ring.inner_degree (3)", "context_parallel_degree (4)", "'ring'"],
    ),
    "inner": (
        4,
        [f"{CP}4", "--ring.inner=allgather"],
        ["ring.inner (allgather)", "'two_level'", "'ring'"],
    ),
    "rotation": (1, ["--ring.rotation=x"], ["ring.rotation ('x')", "allgather"]),
    "layout": (1, ["--ring.layout=x"], ["ring.layout ('x')", "striped"]),
    "pattern": (1, ["--sparse_attention.pattern=x"], ["pattern ('x')", "dense"]),
    "budget": (1, ["--sparse_attention.budget=x"], ["budget ('x')", "top_p"]),
    "backend": (1, ["--sparse_attention.backend=x"], ["backend ('x')", "flex"]),
    "granularity": (
        1,
        ["--sparse_attention.backend=flex", "--sparse_attention.granularity=64"],
        ["granularity (64)", "must be 128", "'flex'"],
    ),
    "model": (
        1,
        ["--model.name=llama3"],
        ["model.name ('llama3')", "mtraining_llama3"],
    ),
    "flavor": (1, ["--model.flavor=huge"], ["model.flavor ('huge')", "'tiny'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_a_process_group(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size, flags, parts = REFUSED[name]
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world_size))
    # What torchtitan reads first; without it, going on too far is a KeyError.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    train_spec.register()
    module = "--job.custom_config_module=mtraining_flex.config"
    config = ConfigManager().parse_args([module, *MODEL, *flags])
    with pytest.raises(ValueError) as error:
        SparseTrainer(config)
    for part in parts:
        assert part in str(error.value)
    assert not dist.is_initialized()


def test_the_base_of_these_cases_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal is for its own flags: without them torchtitan is reached."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    train_spec.register()
    module = "--job.custom_config_module=mtraining_flex.config"
    with pytest.raises(KeyError, match="LOCAL_RANK"):
        SparseTrainer(ConfigManager().parse_args([module, *MODEL]))


def test_unknown_model_and_missing_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    train_spec.register()
    module = "--job.custom_config_module=mtraining_flex.config"
    with pytest.raises(ValueError, match="nobody"):
        SparseTrainer(ConfigManager().parse_args([module, "--model.name=nobody"]))
    with pytest.raises(ValueError, match="custom_config_module"):
        SparseTrainer(ConfigManager().parse_args(MODEL))


def test_flex_on_the_cpu() -> None:
    import torch

    with pytest.raises(ValueError, match="flex"):
        resolve_backend("flex", "cpu", 128, torch.float32, 64)


@pytest.mark.parametrize(
    "flags, parts",
    (
        (
            ["--training.seq_len=1000"],
            ["ValueError", "seq_len (1000)", "cp_size * granularity (2 * 128 = 256)"],
        ),
        (["--sparse_attention.backend=flex"], ["ValueError", "'flex'"]),
    ),
)
def test_as_a_user_sees_it(tmp_path: Path, flags: list[str], parts: list[str]) -> None:
    """Through the script: an exit code, the message on the terminal, and no step."""
    command = ["./run_train.sh", f"--job.dump_folder={tmp_path}", *flags]
    code, output = run(command, timeout=120, NGPU="2")
    assert code not in (0, None)
    for part in parts:
        assert part in output, output[-3000:]
    assert "loss:" not in output
