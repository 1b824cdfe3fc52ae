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

from mtraining_flex.parallelize import attention_modules
from recipes.bench_compile import (
    MeasuredTrainer,
    Numbers,
    Row,
    TritonCounter,
    compiled_graphs,
    disagreements,
    measure,
    problems,
    row_config,
    row_from_json,
    table,
)
from recipes.record_patterns import one_process
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
    Numbers(
        step_ms=2.0,
        slowest_ms=3.0,
        compile_s=0.5,
        graph_breaks=0,
        compiled={"fused": 3},
        recompiles={"fused": 0},
        peak_bytes=2**20,
        loss=8.0,
        first_grad_norms={"wq.weight": 0.5, "wo.weight": 2.0},
        kept=0.25,
    ),
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
        assert 0 < n.kept < 1 and min(n.first_grad_norms.values()) > 0
        assert n.first_grad_norms.keys() == {f"w{x}.weight" for x in "qkvo"}
        shown = f"| {n.loss:.5f} | {n.kept:.4f} | eager |"
        assert output.count(shown) >= 2, "once as soon as it has run, once at the end"
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
    assert sdpa.first_grad_norms == pytest.approx(dense.first_grad_norms, rel=1e-4)


def test_nothing_is_shown_of_rows_that_disagree() -> None:
    assert GOOD.numbers is not None
    sparse = replace(GOOD, mode="compile")
    wrong = replace(GOOD, numbers=replace(GOOD.numbers, loss=8.1))
    norms = {"wq.weight": 0.51, "wo.weight": 2.0}
    gradient = replace(GOOD, numbers=replace(GOOD.numbers, first_grad_norms=norms))
    norms = {"wq.weight": 0.0, "wo.weight": 2.0}
    zero = replace(GOOD, numbers=replace(GOOD.numbers, first_grad_norms=norms))
    nan = replace(GOOD, numbers=replace(GOOD.numbers, loss=float("nan")))
    dense = replace(wrong, attention="dense")
    refused = Row("flash", "eager", "refused", "no GPU")
    assert not disagreements([refused, GOOD, dense, sparse], False, 1e-3)
    (message,) = disagreements([GOOD, dense, wrong], False, 1e-3)
    assert "8 with flex, eager; 8.1 with flex, eager" in message
    assert len(disagreements([GOOD, gradient, nan], False, 1e-3)) == 2
    assert len(disagreements([zero, zero], False, 1e-3)) == 2, "both train nothing"
    assert disagreements([GOOD, dense], True, 1e-3), "the configuration is dense itself"


@pytest.mark.parametrize("fault", ["zero", "half the gradient"])
def test_a_wrong_attention_disagrees(fault: str, tmp_path: Path) -> None:
    """By more than the tolerance of bf16, whatever the rest of the model does."""

    def of_attention(wrong: bool) -> Row:
        config = row_config(FLAGS, f"{tmp_path}", "eager", "eager")
        config.training.steps = 2
        trainer = MeasuredTrainer(config)
        for module in attention_modules(trainer.model_parts[0]) if wrong else ():
            if fault == "zero":
                module.register_forward_hook(lambda module, args, out: out * 0)
            else:
                module.register_forward_hook(
                    lambda module, args, out: out * 0.5 + out.detach() * 0.5
                )
        numbers = measure(trainer, 1, 1)
        trainer.close()
        return replace(GOOD, numbers=numbers)

    with one_process():
        rows = [of_attention(False), of_attention(False), of_attention(True)]
    assert not disagreements(rows[:2], False, 1e-6)
    message = "\n".join(disagreements(rows, False, 1e-2))
    for kind in "qkvo" if fault == "zero" else "qkv":
        assert f"w{kind}.weight" in message


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
