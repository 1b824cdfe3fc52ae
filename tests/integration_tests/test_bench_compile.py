"""The benchmark of eager and compiled steps: what it runs, and what it refuses to show.

On the CPU with a compiler that only traces: what takes long is Inductor's, and other
tests run it.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.bench_compile import (
    Numbers,
    Row,
    TritonCounter,
    compiled_graphs,
    disagreements,
    problems,
    row_from_json,
    table,
)
from tests.distributed.launch import run

FLAGS = [
    "--job.config_file=train_configs/debug_model.toml",
    "--model.flavor=tiny",
    "--training.seq_len=512",
    "--training.mixed_precision_param=float32",
    "--sparse_attention.max_slash=2",
    "--sparse_attention.max_vertical=32",
    "--compile.backend=aot_eager",
]
GOOD = Row(
    "flex",
    "eager",
    "ok",
    "flex",
    Numbers(2.0, 3.0, 0.5, 0, {"fused": 3}, {"fused": 0}, 2**20, 8.0, 0.5, 0.25),
)


def test_a_run_on_the_cpu(tmp_path: Path) -> None:
    """A backend that cannot run is a row; the other has its two modes, and agrees."""
    command = [sys.executable, "-m", "recipes.bench_compile", *FLAGS]
    command += ["--variants", "flex,eager", "--steps", "2", "--warmup", "1"]
    code, output = run([*command, "--json", f"{tmp_path}/rows.json"], timeout=240)
    assert code == 0, output[-5000:]
    report = json.loads((tmp_path / "rows.json").read_text())
    refused, *rows = (row_from_json(json.dumps(row)) for row in report["rows"])
    assert refused.status == "refused" and "needs a CUDA device" in refused.note
    assert f"| flex | eager {'| - ' * 8}| refused: {refused.note} |" in output
    assert [(r.attention, r.mode, r.status, r.note) for r in rows] == [
        ("eager", mode, "ok", "eager") for mode in ("eager", "compile")
    ]
    for row in rows:
        assert (n := row.numbers) is not None
        assert 0 < n.step_ms <= n.slowest_ms and n.peak_bytes > 0
        assert n.graph_breaks == 0 and not any(n.recompiles.values())
        assert 0 < n.kept < 1 and n.first_grad_norm > 0
        assert f"| {n.loss:.5f} | {n.kept:.4f} | eager |" in output
    assert "agree to 0.001" in output
    graphs = [row.numbers.compiled["torch.compile"] for row in rows]
    assert graphs == [0, 2], "one graph for all blocks, one for the loss"
    assert rows[1].numbers.loss == pytest.approx(rows[0].numbers.loss, abs=1e-4)


def test_sdpa_trains_as_dense_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.bench_compile", *FLAGS]
    command += ["--steps=1", "--warmup=2"]
    rows = []
    for row in ("sdpa:compile", "dense:eager"):
        code, output = run([*command, f"--row={row}"], timeout=240)
        assert code == 0, output[-5000:]
        rows.append(row_from_json(output.splitlines()[-1]))
    sdpa, dense = (row.numbers for row in rows)
    assert sdpa is not None and dense is not None
    assert (sdpa.kept, dense.kept) == (None, 1.0)
    assert sdpa.loss == pytest.approx(dense.loss, abs=1e-4)
    assert sdpa.first_grad_norm == pytest.approx(dense.first_grad_norm, rel=1e-4)


def test_nothing_is_shown_of_rows_that_disagree() -> None:
    assert GOOD.numbers is not None
    sparse = replace(GOOD, mode="compile")
    wrong = replace(GOOD, numbers=replace(GOOD.numbers, loss=8.1))
    gradient = replace(GOOD, numbers=replace(GOOD.numbers, first_grad_norm=0.51))
    nan = replace(GOOD, numbers=replace(GOOD.numbers, loss=float("nan")))
    dense = replace(wrong, attention="dense")
    refused = Row("flash", "eager", "refused", "no GPU")
    assert not disagreements([refused, GOOD, dense, sparse], False, 1e-3)
    (message,) = disagreements([GOOD, dense, wrong], False, 1e-3)
    assert "8.000000 with flex, eager; 8.100000 with flex, eager" in message
    assert len(disagreements([GOOD, gradient, nan], False, 1e-3)) == 2
    assert disagreements([GOOD, dense], True, 1e-3), "the configuration is dense itself"


def test_what_must_not_be_is_named() -> None:
    assert GOOD.numbers is not None
    failed = Row("flash", "eager", "failed", "exit code 1: a | b")
    numbers = replace(GOOD.numbers, graph_breaks=1, recompiles={"fused": 2})
    assert not problems([GOOD, Row("x", "eager", "refused", "no GPU")])
    found = problems([GOOD, failed, replace(GOOD, numbers=numbers)])
    assert [text.split(": ")[1][:11] for text in found] == [
        "exit code 1",
        "1 graph bre",
        "recompiles ",
    ]
    assert "| failed: exit code 1: a \\| b |" in table([failed])


def test_a_recompile_is_counted() -> None:
    triton = TritonCounter()
    call = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    call(torch.zeros(3))
    before = compiled_graphs(triton)
    call(torch.ones(3))
    assert compiled_graphs(triton) == before
    call(torch.zeros(4))
    assert compiled_graphs(triton)["torch.compile"] == before["torch.compile"] + 1
