"""What the benchmarks compute from what they time, and what they refuse."""

from pathlib import Path

import pytest
import torch

from mtraining_flex.pattern import density
from recipes import bench_attention, bench_granularity
from recipes.bench_attention import Row, Shape, load_pattern, make_pattern, parse
from recipes.bench_granularity import Point, at_recall
from recipes.record_patterns import record

SHAPE = Shape(seq_len=4096, heads=3, kv_heads=1, head_dim=64, granularity=128)


def test_rate_counts_kept_pairs() -> None:
    """Two matrix products of D a pair forward, five backward."""
    pairs = 3 * sum(range(1, 4097))
    rate = Row("", forward=2.0, backward=4.0, share=0.25).rate(SHAPE)
    flop = 2 * 64 * pairs * 0.25
    assert rate == pytest.approx((2 * flop / 2e-3 / 1e12, 5 * flop / 4e-3 / 1e12))


@pytest.mark.parametrize("kind", ["uniform", "local"])
def test_patterns_have_the_asked_density(kind: str) -> None:
    pattern = make_pattern(kind, SHAPE, 0.3, 100, device="cpu")
    assert (pattern.num_vertical == 100).all() and (pattern.slash[..., 0] == 0).all()
    kept = density(bench_attention.without_columns(pattern), 4096, 128)
    # At most one diagonal too many, and the diagonal blocks are half empty.
    assert ((kept > 0.26) & (kept < 0.3 + 32 / (32 * 33 / 2))).all()
    if kind == "local":
        assert pattern.slash[0, 0].tolist() == list(range(pattern.slash.shape[-1]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seq-len=1000", r"\(1000\) must be a positive multiple .* \(128\)"),
        ("--seq-len=1024 --lengths=1024,1100", r"\(1100\) must be a positive"),
        ("--seq-len=1024 --verticals=1025", r"\(1025\) must be from 0 .* \(1024\)"),
        ("--heads=3", r"--heads \(3\) must be a multiple of --kv-heads \(2\)"),
        ("--density=0", r"--density \(0.0\) must be in"),
        ("--pattern=recorded", "needs --recorded FILE"),
        ("--pattern=recorded --recorded=none.pt", "none.pt.* do not exist"),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_pattern(parse(flags.split()), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_attention"])
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        bench_attention.main()


FLAGS = [
    "--job.config_file=train_configs/debug_model.toml",
    "--model.flavor=tiny",
    "--training.seq_len=1024",
]


def test_a_recording_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "patterns.pt")
    config = ["--config", FLAGS[0].split("=")[1]]
    seen = []
    monkeypatch.setattr(
        "recipes.record_patterns.record", lambda *args: seen.append(args)
    )
    monkeypatch.setattr("sys.argv", ["", "--record", file, *config, "--steps", "3"])
    bench_attention.main()
    assert seen == [(["--job.config_file", config[1]], 3, file)]
    recorded = record(FLAGS, 1, file)
    args = parse(["--pattern=recorded", f"--recorded={file}", "--layer=1"])
    shape, pattern = load_pattern(args, "cpu")
    assert shape == Shape(1024, 4, 2, 16, 128)
    for a, b in zip(pattern.tensors(), recorded.patterns[1].tensors(), strict=True):
        assert torch.equal(a, b)
    for flag, message in (("--heads=8", r"--heads \(8\) .*\(4\)"), ("--layer=2", "2")):
        args = parse(["--pattern=recorded", f"--recorded={file}", flag])
        with pytest.raises(ValueError, match=message):
            load_pattern(args, "cpu")


def test_numbers_between_points_of_a_curve() -> None:
    points = [Point(64, 0, 0, d, r, None) for d, r in ((0.4, 0.8), (0.1, 0.2))]
    assert at_recall(points, 0.5, "density") == pytest.approx(0.25)
    assert at_recall(points, 0.5, "ms") is None
    assert at_recall(points, 0.81, "density") is None


def test_granularities_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole recipe on the CPU: the same budget in both, finer is no worse."""
    monkeypatch.setattr(
        "sys.argv", ["", *FLAGS, "--train=1", "--tokens=256,512", "--verticals=16"]
    )
    monkeypatch.setattr("mtraining_flex.cpu_device.leave", lambda: None)
    bench_granularity.main()
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    rows = [[float(x) for x in r[1:6]] for r in rows if len(r) == 8 and "." in r[4]]
    assert [r[:3] for r in rows] == [
        [g, tokens, 16.0] for g in (128, 64) for tokens in (256, 512)
    ]
    assert all(0 < r[3] < 1 and 0 < r[4] < 1 for r in rows)
    monkeypatch.setattr("sys.argv", ["", *FLAGS, "--train=1", "--tokens=200"])
    with pytest.raises(ValueError, match=r"--tokens \(200\) must be a multiple of 128"):
        bench_granularity.main()
