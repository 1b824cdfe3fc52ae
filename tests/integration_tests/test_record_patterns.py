"""Patterns of a real training run: recorded, read back, and those that the run used."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mtraining_flex.attention import SparseAttention
from recipes.record_patterns import Recorded, load, record, watch_patterns

FLAGS = [
    "--job.config_file=train_configs/debug_model.toml",
    "--model.flavor=tiny",
    "--training.seq_len=256",
    "--training.mixed_precision_param=float32",
    "--sparse_attention.granularity=16",
    "--sparse_attention.max_slash=5",
    "--sparse_attention.max_vertical=24",
    "--sparse_attention.sink=2",
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the tiny model; the process is as before."""
    file: Path = tmp_path_factory.mktemp("patterns") / "patterns.pt"
    environment = dict(os.environ)
    record(FLAGS, 2, str(file))
    assert dict(os.environ) == environment
    assert not dist.is_initialized() and gc.isenabled()
    return file


def test_what_was_found(file: Path) -> None:
    recorded = load(str(file))
    assert list(recorded.patterns) == list(recorded.recall) == [0, 1]
    for layer, pattern in recorded.patterns.items():
        assert pattern.slash.shape == (1, 4, 5)
        assert pattern.vertical.shape == (1, 4, 24)
        assert all(t.device.type == "cpu" for t in pattern.tensors())
        assert (pattern.slash[..., 0] == 0).all(), "the local window"
        assert (pattern.vertical[..., :2] == torch.arange(2)).all(), "the sink"
        assert pattern.num_slash.max() <= 5 and pattern.num_vertical.max() <= 24
        assert 0 < recorded.recall[layer] <= 1
    shape = (recorded.seq_len, recorded.granularity, recorded.head_dim)
    assert shape == (256, 16, 16)
    assert (recorded.heads, recorded.kv_heads) == (4, 2)
    assert (recorded.config, recorded.step) == (FLAGS, 2)


def test_a_run_repeats_and_each_step_has_its_own(file: Path, tmp_path: Path) -> None:
    def same(a: Recorded, b: Recorded) -> bool:
        pairs = zip(a.patterns.values(), b.patterns.values(), strict=True)
        return all(
            torch.equal(x, y)
            for p, q in pairs
            for x, y in zip(p.tensors(), q.tensors(), strict=True)
        )

    # What the configuration says about compiling is not what a recording does.
    again = record([*FLAGS, "--compile.enable"], 2, str(tmp_path / "again.pt"))
    other = record(FLAGS, 1, str(tmp_path / "other.pt"))
    assert same(load(str(file)), again)
    assert not same(again, other)


def test_watching_ends() -> None:
    attention = SparseAttention(3)
    block = torch.nn.Module()
    block.attention = torch.nn.Module()
    block.attention.inner_attention = attention
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"3": block})
    with watch_patterns(model) as found:
        assert "find" in vars(attention)
    assert "find" not in vars(attention) and found == {}


@pytest.mark.parametrize(
    "content", (None, b"", b"text", {}, [1], {"patterns": 1}, {"patterns": {0: (1,)}})
)
def test_another_file_is_refused(tmp_path: Path, content: object) -> None:
    file = tmp_path / "file.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ValueError, match=r"file\.pt.*record"):
        load(str(file))


def test_no_steps() -> None:
    with pytest.raises(ValueError, match=r"--steps \(0\)"):
        record(FLAGS, 0, "nowhere.pt")
