"""The plan of a run: its arithmetic, against masks, simulated rings and the paper."""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchtitan.protocols.train_spec import get_train_spec

from mtraining_flex.block_mask import slash_step, vertical_step
from mtraining_flex.config import SparseAttention
from mtraining_flex.layout import LAYOUTS, build_layout
from mtraining_flex.pattern.types import dense_pattern, pack_pattern, slash_bitmap
from mtraining_flex.ring import simulate
from mtraining_flex.ring.comm import Transfer
from mtraining_flex.ring.simulate import ThreadComm
from recipes import plan
from recipes.planning import crossover as crossing
from recipes.planning import measure as measuring
from recipes.planning.hardware import FOLDER, Hardware, load_hardware
from recipes.planning.memory import CATEGORIES, peak_memory
from recipes.planning.problem import (
    Model,
    Problem,
    count_model,
    make_problem,
    model_arguments,
    read_config,
    recomputed_linears,
    saved_linears,
)
from recipes.planning.timing import Links, Ring, ring_ms, step_ms
from recipes.planning.traffic import Bytes, collective, count_traffic, kv_bytes
from recipes.planning.work import (
    count_all,
    count_work,
    slash_density,
    synthetic_patterns,
)
from recipes.record_patterns import Recorded
from tests.helpers import random_pattern, random_qkv
from tests.rings import grad_like, ring_results

CONFIG = "train_configs/debug_model.toml"
QWEN_3B = (
    "--model.name=mtraining_qwen2",
    "--model-args=dim=2048,n_layers=36,n_heads=16,n_kv_heads=2,vocab_size=151936,"
    "hidden_dim=11008,enable_weight_tying=true",
)


@pytest.fixture(scope="module")
def h200() -> Hardware:
    return load_hardware("h200")


@lru_cache
def _config(*flags: str) -> tuple[Any, Model]:
    """Read once; `make_problem` does not change it."""
    config = read_config(CONFIG, flags)
    return config, count_model(config, model_arguments(config))


def _problem(*flags: str, world: int = 4, inner: int = 2) -> Problem:
    return make_problem(*_config(*flags), world, inner, "triton")


# --- executed blocks ------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("size", "blocks"), [(1, 2), (2, 3), (4, 2), (8, 1)])
def test_work_is_what_the_masks_execute(name: str, size: int, blocks: int) -> None:
    """Heads of every kind, two sequences, by tables and by lists."""
    g, heads = 8, (2, 6)
    layout = build_layout(name, 2 * size * blocks * g, size, g)
    pattern = random_pattern(
        *heads, layout.seq_len, g, max_slash=9, max_vertical=20, seed=size
    )
    bitmap = slash_bitmap(pattern, layout.num_blocks)
    work = count_work(pattern, layout, 12)
    for q in range(size):
        for source in range(size):
            mask = slash_step(pattern, bitmap, layout, q, source, heads)
            for form in (mask.tables, mask.lists):
                assert work.slash[q, source] == int(form.executed().sum())
        mask = vertical_step(pattern, bitmap, layout, q, heads)
        for form in (mask.tables, mask.lists):
            assert work.columns[q] == int(form.executed().sum())
    assert work.slash.sum() > 0 and work.columns.sum() > 0


def test_a_pattern_of_one_head_stands_for_all() -> None:
    layout = build_layout("zigzag", 128, 2, 8)
    one = pack_pattern([[[0, 3]]], [[[5, 77]]])
    many = pack_pattern([[[0, 3]] * 6] * 2, [[[5, 77]] * 6] * 2)
    a, b = (count_work(pattern, layout, 12) for pattern in (one, many))
    assert (a.slash == b.slash).all() and (a.columns == b.columns).all()


@pytest.mark.parametrize("size", [2, 4, 32])
def test_closed_forms_of_dense_attention(size: int) -> None:
    """Worker imbalance in blocks; of the spec's section 1.4 in the limit."""
    blocks = 16 * size
    expected = {
        "contiguous": ((2 * size - 1) * blocks + size) / (size * (blocks + 1)),
        "zigzag": 1.0,
        "striped": 1 + (size - 1) / (blocks + 1),
    }
    for name, worker in expected.items():
        layout = build_layout(name, blocks * 8, size, 8)
        work = count_work(dense_pattern(blocks, "cpu"), layout, 3)
        assert work.slash.sum() == 3 * blocks * (blocks + 1) / 2
        got = work.imbalance("ring", size)
        assert got == pytest.approx((worker, got[1]), rel=1e-12)
        if name == "striped":  # the last rank is the slowest at every step
            assert got[1] == pytest.approx(worker, rel=1e-12)


def test_two_levels_compute_the_same_in_another_order() -> None:
    layout = build_layout("striped", 512, 8, 8)
    pattern = random_pattern(1, 6, 512, 8, max_slash=9, max_vertical=20, seed=3)
    work = count_work(pattern, layout, 6)
    flat, two = (work.steps(rotation, 4) for rotation in ("ring", "two_level"))
    assert (flat.sum(1) == two.sum(1)).all() and (flat != two).any()
    # Rank 5 is the second of the second node: it asks its own node first.
    assert two[5].tolist() == work.slash[5, [5, 4, 7, 6, 1, 0, 3, 2]].tolist()


def test_synthetic_patterns_have_the_asked_density() -> None:
    config = SparseAttention(max_slash=64, sink=4, local_window=2)
    layout = build_layout("striped", 128 * 128, 4, 128)
    patterns = synthetic_patterns(config, 3, 2, layout, density=0.2, verticals=100)
    assert len(patterns) == 3
    blocks = layout.num_blocks
    for pattern in patterns:
        assert (pattern.num_vertical == 100).all()
        assert (pattern.vertical[..., :16] == torch.arange(16)).all()
        assert (pattern.slash[..., :8] == torch.arange(8)).all()
        for head in pattern.slash[0]:
            kept = int((blocks - head[head < blocks]).sum())
            # At most one diagonal too many.
            assert 0 <= kept - 0.2 * blocks * (blocks + 1) / 2 < blocks
    caps = synthetic_patterns(config, 1, 2, layout)[0]
    assert (caps.num_slash == 64).all() and (caps.num_vertical == 1024).all()


# --- the time line --------------------------------------------------------------------


def test_the_papers_latency() -> None:
    """shared/mtraining-spec.md, section 8.3: one layer's forward of Qwen2.5-3B at 512K
    tokens on 4 nodes of 8 A100, from the paper's own times."""
    index_ms, cpu_ms = 1.13, 2.08
    compute, columns = np.full((32, 32), 0.51), np.zeros(32)
    links = Links(inner_ms=0.13, outer_ms=0.98)
    flat, two = (
        index_ms + cpu_ms + ring_ms(compute, columns, Ring(name, "ring", 8, 4), links)
        for name in ("ring", "two_level")
    )
    assert (round(flat, 2), round(two, 2)) == (34.10, 19.53)
    assert 1 - two / flat == pytest.approx(0.427, abs=5e-4)


def test_the_a100_table_is_the_papers() -> None:
    """Its links carry 16 MiB in the paper's times."""
    a100 = load_hardware("a100")
    assert a100.inner.ms(16 * 2**20) == pytest.approx(0.13, abs=0.005)
    assert a100.outer.ms(16 * 2**20) == pytest.approx(0.98, abs=0.005)


KV, DKV = Links(0.2, 3.0, 0.3, 7.0), Links(0.4, 6.0, 0.7, 11.0)


@pytest.mark.parametrize(
    ("ring", "forward", "backward"),
    [
        # Steps of 3 (the last has no hop), then the columns; in the backward two
        # tensors travel, and the last hop home is longer than the columns.
        (Ring("ring", "ring", 2, 2), 3 * 3 + 1 + 0.5, 3 + 2 * 9 + 6 + 6),
        (Ring("ring", "ring", 4, 1), 4 + 0.5, 4 + 0.5),
        # Rounds of two steps behind hops of 3, then of 6; 0.4 into the node, 6 home.
        (Ring("two_level", "ring", 2, 2), 3 + 2 + 0.5, 3 + 6 + 0.4 + 6),
        (Ring("two_level", "allgather", 2, 2), 3 + 2.3 + 0.5, 3 + 6 + 6),
        (Ring("allgather", "ring", 2, 2), 7 + 4.5, 7 + 4.5 + 11),
    ],
)
def test_time_lines_by_hand(ring: Ring, forward: float, backward: float) -> None:
    """Four ranks, 1 ms a step and 0.5 ms of columns."""
    compute, columns = np.ones((4, 4)), np.full(4, 0.5)
    assert ring_ms(compute, columns, ring, KV) == pytest.approx(forward)
    assert ring_ms(compute, columns, ring, KV, DKV) == pytest.approx(backward)


def test_the_last_hop_hides_behind_the_columns() -> None:
    """The hop to the next node does, the one before it inside the node does not."""
    compute, columns = np.ones((4, 4)), np.full(4, 6.2)
    two, flat = (Ring(name, "ring", 2, 2) for name in ("two_level", "ring"))
    assert ring_ms(compute, columns, two, KV, DKV) == pytest.approx(9 + 0.4 + 6.2)
    assert ring_ms(compute, columns, flat, KV, DKV) == pytest.approx(27 + 6.2)


def test_every_step_waits_for_the_slowest() -> None:
    """Only where ranks have to wait for each other."""
    compute, columns = np.diag([4.0, 4.0]), np.zeros(2)
    free = Links(0.0, 0.0)
    for rotation, expected in (("ring", 8.0), ("allgather", 4.0)):
        ring = Ring(rotation, "ring", 2, 1)
        assert ring_ms(compute, columns, ring, free) == expected
    for inner, expected in (("ring", 16.0), ("allgather", 8.0)):
        ring = Ring("two_level", inner, 2, 2)
        assert ring_ms(np.tile(compute, (2, 2)), np.zeros(4), ring, free) == expected
    alone = ring_ms(np.full((1, 1), 4.0), np.ones(1), Ring("ring", "ring", 1, 1), KV)
    assert alone == 5.0


# --- what travels ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rotation", "inner_rotation", "node"),
    [
        ("ring", "ring", 4),
        ("ring", "ring", 2),
        ("allgather", "ring", 4),
        ("allgather", "ring", 2),
        ("two_level", "ring", 2),
        ("two_level", "allgather", 2),
    ],
)
def test_bytes_are_those_of_a_simulated_ring(
    rotation: str, inner_rotation: str, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward of one layer on four ranks, every transfer counted."""
    sent: dict[tuple[str, int], float] = defaultdict(float)  # by link and rank
    past: dict[int, float] = defaultdict(float)  # by collectives of the whole ring
    lock = threading.Lock()

    class Counting(ThreadComm):
        def hop(self, direction: str, x: Tensor) -> Transfer:
            level = self.name.rpartition("/")[2]
            if level not in ("inner", "outer"):
                stays = (self.rank + 1) % 4 // node == self.rank // node
                level = "inner" if stays else "outer"
            self._add(level, x.nbytes)
            return super().hop(direction, x)

        def all_reduce(self, x: Tensor) -> Tensor:
            self._add("ring", 2 * x.nbytes * (self.size - 1) / self.size)
            return super().all_reduce(x)

        def all_gather(self, x: Tensor) -> Tensor:
            self._add(self._level(), x.nbytes * (self.size - 1))
            return super().all_gather(x)

        def reduce_scatter(self, x: Tensor) -> Tensor:
            self._add(self._level(), x.nbytes * (self.size - 1) / self.size)
            return super().reduce_scatter(x)

        def _level(self) -> str:
            return "inner" if self.name.endswith("/inner") else "ring"

        def _add(self, level: str, size: float) -> None:
            # Names of levels begin with that of the ring: "sim:...:rank/size".
            rank = int(self.name.split(":")[2].split("/")[0])
            with lock:
                if level == "ring":
                    past[rank] += size
                else:
                    sent[level, rank] += size

    monkeypatch.setattr(simulate, "ThreadComm", Counting)
    layout = build_layout("striped", 256, 4, 8)
    pattern = random_pattern(1, 4, 256, 8, max_slash=9, max_vertical=24, seed=1)
    qkv = random_qkv(1, 4, 2, 256, 16, torch.bfloat16, seed=0)
    settings: dict[str, Any] = {}
    if rotation == "two_level":
        settings = {"inner_degree": 2, "inner": inner_rotation}
    ring_results(qkv, grad_like(qkv[0]), pattern, layout, rotation, **settings)

    problem = _problem("--model.flavor=tiny")
    model = replace(problem.model, heads=4, kv_heads=2, head_dim=16)
    problem = replace(
        problem,
        model=model,
        layout=layout,
        rotation=rotation,
        inner_rotation=inner_rotation,
        node_ranks=node,
        max_vertical=24,
    )
    (around,) = set(past.values())
    counted = collective(problem, around) + Bytes(
        *(max(sent[level, rank] for rank in range(4)) for level in ("inner", "outer"))
    )
    assert count_traffic(problem).total == counted
    assert counted.inner > 0 and (counted.outer > 0) == (node == 2)
    again = count_traffic(replace(problem, checkpointing="full"))
    assert again.total.inner > counted.inner


def test_two_levels_by_counting_hops() -> None:
    """4 nodes of 8: in each round 7 hops of keys and 8 of gradients inside."""
    problem = _problem("--training.seq_len=131072", world=32, inner=8)
    traffic = count_traffic(
        replace(problem, rotation="two_level", node_ranks=8, max_vertical=0)
    )
    kv = kv_bytes(problem)
    assert kv == 2 * 2 * 4096 * 2 * 64  # keys and values, bf16, tokens, heads, D
    assert traffic.kv_forward == traffic.kv_backward == Bytes(4 * 7 * kv, 3 * kv)
    assert traffic.dkv == Bytes(4 * 8 * 2 * kv, 4 * 2 * kv)  # fp32
    assert traffic.columns == Bytes()


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", ["tiny", "tiny_tied", "debugmodel"])
def test_parameters_are_the_models(flavor: str, h200: Hardware) -> None:
    flags = ("--model.name=mtraining_qwen2", f"--model.flavor={flavor}")
    problem = _problem(*flags)
    spec = get_train_spec("mtraining_qwen2")
    arguments: Any = spec.model_args[flavor]
    with torch.device("meta"):
        built: Any = spec.model_cls(arguments)
    numbers = arguments.get_nparams_and_flops(built, 4096)[0]
    assert problem.model.parameters == numbers
    parts = peak_memory(problem, h200).parts
    assert parts["parameters"] == 4 * numbers / 4  # fp32, on four ranks
    assert parts["optimizer"] == 2 * parts["parameters"]


def test_categories_add_up(h200: Hardware) -> None:
    for mode in ("none", "selective", "full"):
        problem = _problem(f"--activation_checkpoint.mode={mode}")
        memory = peak_memory(problem, h200)
        for parts in memory.moments.values():
            assert tuple(parts) == CATEGORIES
            assert all(size >= 0 for size in parts.values()), parts
            assert sum(parts.values()) <= memory.total
        assert memory.total == sum(memory.parts.values())
        assert memory.largest("KV buffers") > 0 == memory.moments["loss"]["KV buffers"]


@pytest.mark.parametrize(("cp", "element"), [(1, 4), (4, 2)])
def test_full_checkpointing_saves_inputs(cp: int, element: int, h200: Hardware) -> None:
    """Of each block: fp32 under autocast, bf16 with FSDP; 4096 tokens of width 256."""
    problem = _problem("--activation_checkpoint.mode=full", world=cp)
    few, many = (
        peak_memory(changed, h200).moments["loss"]["activations"]
        for changed in (problem, _deeper(problem))
    )
    assert many - few == 4 * (4096 // cp) * 256 * element


def test_which_products_checkpointing_saves() -> None:
    """torchtitan saves every second one without a bias, the first included."""

    def names(*flags: str, recomputed: bool = False) -> list[str]:
        problem = _problem("--model.flavor=tiny", *flags)
        linears = recomputed_linears(problem) if recomputed else saved_linears(problem)
        return [x.name for x in linears]

    qwen, eager = "--model.name=mtraining_qwen2", "--compile.no-enable"
    assert names() == ["wq", "wv", "w1"]
    assert names(eager) == ["wq", "wv", "w1", "w2"]
    assert names(qwen) == ["wo", "w3"]
    assert names(recomputed=True) == ["wk", "wo", "w3"]
    assert names("--activation_checkpoint.mode=none", recomputed=True) == []
    assert len(names("--activation_checkpoint.mode=full", recomputed=True)) == 6


def _bigger(**changes: Any) -> Callable[[Problem], Problem]:
    return lambda problem: replace(problem, **changes)


def _longer(problem: Problem) -> Problem:
    layout = problem.layout
    return replace(problem, layout=replace(layout, seq_len=2 * layout.seq_len))


def _deeper(problem: Problem) -> Problem:
    """With as many parameters: more is saved between forward and backward alone."""
    return replace(problem, model=replace(problem.model, layers=8))


@pytest.mark.parametrize("change", [_longer, _deeper, _bigger(batch=2)])
@pytest.mark.parametrize("cp", [1, 4])
def test_more_takes_more(
    change: Callable[[Problem], Problem], cp: int, h200: Hardware
) -> None:
    config = SparseAttention(max_vertical=256, max_slash=16)
    small = _problem("--training.seq_len=65536", world=cp)
    results = []
    for problem in (small, change(small)):
        layers, heads = problem.model.layers, problem.model.heads
        patterns = synthetic_patterns(config, layers, heads, problem.layout)
        works = count_all(patterns, problem.layout, problem.batch * heads)
        device = step_ms(problem, h200, works).device
        results.append((device, peak_memory(problem, h200).total))
    assert results[0][0] < results[1][0] and results[0][1] < results[1][1]


# --- crossover ------------------------------------------------------------------------


def test_crossover_is_where_the_costs_meet(h200: Hardware) -> None:
    """Of search and masks alone, and the slower dense attention the earlier."""
    problem = _problem(world=1, inner=1)
    config = SparseAttention(max_vertical=256, max_slash=16)
    result = crossing.crossover(problem, h200, config, None, None)
    assert result is not None and result.floor is not None
    lengths = crossing._lengths(128)
    before = lengths[lengths.index(result.floor) - 1]
    for seq_len, pays in ((before, False), (result.floor, True)):
        alone = crossing._alone(problem, config, seq_len)
        cheaper = crossing.floor_ms(alone, h200) < crossing.dense_ms(alone, h200)
        assert cheaper == pays
    assert result.whole is not None and result.whole > result.floor
    slow = replace(h200.dense, forward_tflops=100.0, backward_tflops=100.0)
    other = crossing.crossover(problem, replace(h200, dense=slow), config, None, None)
    assert other is not None and other.whole is not None
    assert other.whole < result.whole
    dense = replace(problem, pattern="dense")
    assert crossing.crossover(dense, h200, config, None, None) is None


# --- the command ----------------------------------------------------------------------


def _plan(*flags: str, world: int = 4) -> int:
    return plan.main([f"--config={CONFIG}", f"--world={world}", *flags])


def test_the_debug_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert _plan("--inner=2", f"--json={file}") == 0
    text, numbers = capsys.readouterr().out, json.loads(file.read_text())
    assert len(numbers["settings"]) == 12 and not numbers["refused"]
    fastest = min(each["step_ms"] for each in numbers["settings"])
    chosen = numbers["best"]
    assert f'layout = "{chosen["layout"]}"' in text
    assert f'rotation = "{chosen["rotation"]}"' in text
    assert f"{fastest:.1f} ms a step" in text
    assert "context_parallel_degree 4 (every rank that nothing else uses" in text
    for each in numbers["settings"]:
        assert each["fits"]
        assert each["peak_bytes"] == pytest.approx(sum(each["peak_parts"].values()))
        assert each["tokens_per_s"] == pytest.approx(4096 / each["step_ms"] * 1e3)
        row = f"| {each['layout']}, {each['rotation']}"
        assert row in text
    flat = [s for s in numbers["settings"] if s["rotation"] == "ring"]
    by_layout = {s["layout"]: s["step_imbalance"] for s in flat}
    assert by_layout["striped"] < by_layout["zigzag"] < by_layout["contiguous"]


def test_a_large_run_takes_seconds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Qwen2.5-3B's shape at 512K tokens on 32 GPUs. The slow network decides."""
    file = tmp_path / "plan.json"
    begin = time.process_time()
    flags = ("--seq-len=524288", "--sparse_attention.max_slash=300", *QWEN_3B)
    code = _plan(
        *flags, "--density=0.05", "--verticals=256", f"--json={file}", world=32
    )
    assert code == 0 and time.process_time() - begin < 15
    numbers = json.loads(file.read_text())
    assert numbers["model"]["parameters"] == pytest.approx(3.09e9, rel=0.01)
    assert "5.0" in numbers["patterns"] and "256 columns" in numbers["patterns"]
    steps = {(s["layout"], s["rotation"], s["inner"]): s for s in numbers["settings"]}
    two, flat = (
        steps["striped", rotation, "ring"]["step_ms"]
        for rotation in ("two_level", "ring")
    )
    assert two < flat
    assert steps["striped", "ring", "ring"]["worker_imbalance"] < 1.02
    assert numbers["best"] == {
        "layout": "striped",
        "rotation": "two_level",
        "inner": "ring",
    }
    assert "inner_degree = 8" in capsys.readouterr().out


def test_settings_that_cannot_run_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    assert _plan("--inner=4", f"--json={file}") == 0
    refused = json.loads(file.read_text())["refused"]
    assert len(refused) == 6 and {x["rotation"] for x in refused} == {"two_level"}
    assert "inner_degree (4" in refused[0]["reason"]
    text = capsys.readouterr().out
    assert text.count("must divide parallelism.context_parallel_degree (4)") == 1
    # A length that zigzag cannot cut in 2 W chunks; nodes that share a ring unevenly.
    flags = ("--cp=6", f"--training.seq_len={6 * 128}", "--inner=4")
    assert _plan(*flags, world=6) == 0
    text = capsys.readouterr().out
    assert "seq_len (768) " in text and "2 * cp_size * granularity" in text
    assert "they are on nodes [0, 0, 0, 0, 1, 1]" in text
    assert "| striped, ring" in text and "| zigzag" not in text


def test_whence_the_degree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    degree = "--parallelism.context_parallel_degree=1"
    assert _plan(degree) == 0
    text = capsys.readouterr().out
    assert "context_parallel_degree 1 (from the configuration), data parallel 4" in text
    assert "--cp 4 plans one ring of all ranks" in text
    assert _plan(degree, "--cp=2") == 0
    text = capsys.readouterr().out
    assert "context_parallel_degree 2 (from --cp), data parallel 2" in text
    assert "plans one ring" not in text
    # The configuration's own inner ring is the node's size, and its rotation no limit.
    flags = ("--ring.rotation=two_level", "--ring.inner_degree=2")
    assert _plan(*flags) == 0
    text = capsys.readouterr().out
    assert "2 on a node" in text and "| zigzag, allgather" in text


def test_backends_differ(tmp_path: Path) -> None:
    """flex is the slowest on the H200; lists are smaller than tables."""
    file = tmp_path / "plan.json"
    times, indices = [], []
    for backend in ("flash", "triton", "flex"):
        flags = ("--inner=2", f"--backend={backend}", "--seq-len=65536")
        assert _plan(*flags, f"--json={file}") == 0
        striped = json.loads(file.read_text())["settings"][0]
        times.append(striped["step_parts_ms"]["ring"])
        moments = striped["moments"].values()
        indices.append(max(parts["index tensors"] for parts in moments))
    assert max(times[:2]) < times[2] and times[0] != times[1]
    assert indices[1] < indices[0] < indices[2]


def test_dense_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan("--inner=2", "--sparse_attention.pattern=dense") == 0
    text = capsys.readouterr().out
    assert "100.00% of the slash blocks, 0 columns" in text
    assert "no crossover" in text


def test_recorded_patterns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "patterns.pt")
    flags = ["--model.flavor=tiny", "--training.seq_len=1024"]
    found = [
        random_pattern(1, 4, 1024, 128, max_slash=8, max_vertical=64, seed=seed)
        for seed in range(2)
    ]
    recorded = Recorded(
        patterns={},
        recall={},
        seq_len=1024,
        granularity=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        config=flags,
        step=1,
    )
    patterns = {layer: p.tensors() for layer, p in enumerate(found)}
    torch.save(asdict(recorded) | {"patterns": patterns}, file)
    assert _plan(*flags, f"--patterns={file}") == 0
    columns = sum(float(p.num_vertical.double().mean()) for p in found) / 2
    words = f"Patterns recorded in {file}: {slash_density(found, 8):.2%} of the slash"
    text = capsys.readouterr().out
    assert f"{words} blocks, {columns:.0f} columns a head" in text
    for other, message in (
        (["--model.flavor=tiny"], "seq_len (1024) is not this run's (4096)"),
        (flags[1:], "layers (2) is not this run's (4)"),
        ([*flags, "--sparse_attention.max_slash=1"], "max_slash (1)"),
        ([*flags, "--density=0.1"], "--patterns has densities"),
    ):
        assert _plan(*other, f"--patterns={file}") == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--world=0", "--world (0) must be at least 1"),
        ("--device=cpu", "--device (cpu) is for --measure"),
        ("--world=x", "--world"),
        ("--inner=0", "--inner (0) must be at least 1"),
        ("--cp=0", "--cp (0) must be at least 1"),
        ("--cp=3", "must equal the world size (4)"),
        ("--config=none.toml", "--config ('none.toml') does not exist"),
        ("--config=README.md", "README.md: cannot be read"),
        ("--training.steps=x", "--training.steps"),
        ("--training.foo=1", "--training.foo=1"),
        ("--seq-len=1000", "seq_len (1000) must be a multiple of"),
        ("--hardware=h2000", "--hardware ('h2000') is neither a file nor one of"),
        ("--patterns=none.pt", "none.pt"),
        ("--density=0", "--density (0.0) must be in (0, 1]"),
        ("--density=0.9", "more than sparse_attention.max_slash (16)"),
        ("--verticals=300", "more than sparse_attention.max_vertical (256)"),
        ("--verticals=5000", "--verticals (5000)"),
        ("--sparse_attention.pattern=dense --density=0.1", "which keeps all"),
        ("--backend=eager", "--backend"),
        ("--sparse_attention.backend=eager", "('eager') cannot be reckoned"),
        ("--backend=flash --model.flavor=tiny", "head_dim (16) must be one of"),
        ("--backend=flex --sparse_attention.granularity=64", "(64) must be 128"),
        ("--backend=flash --debug.deterministic", "debug.deterministic is set"),
        ("--backend=flash --hardware=a100", "'flex', 'triton'] alone"),
        ("--model-args=foo=3", "has no field 'foo'"),
        ("--model-args=dim=wide", "dim ('wide') must be of the type of 256"),
        ("--model-args=dim=100,n_heads=3", "dim (100) must be a multiple"),
        ("--model.flavor=405B", "model.flavor ('405B') must be one of"),
        ("--model.name=llama3", "is not a model of this recipe"),
        ("--model.name=nothing", "is not a model of this recipe"),
        ("--parallelism.tensor_parallel_degree=2", "tensor_parallel_degree (2)"),
        ("--activation_checkpoint.selective_ac_option=2", "selective_ac_option"),
        ("--training.enable_cpu_offload", "training.enable_cpu_offload"),
        ("--json=/none/plan.json", "/none/plan.json"),
    ],
)
def test_errors_are_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(*flags.split()) == 2
    out, error = capsys.readouterr()
    assert message in error and out == "", error
    assert error.startswith("recipes.plan: ") and error.count("\n") == 1, error


def test_what_is_missing_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for argv, message in (
        (["--world=4"], "--config is missing"),
        ([f"--config={CONFIG}"], "--world is missing"),
    ):
        assert plan.main(argv) == 2
        assert message in capsys.readouterr().err
    file = tmp_path / "plain.toml"
    file.write_text('[model]\nname = "mtraining_llama3"\nflavor = "tiny"\n')
    assert plan.main([f"--config={file}", "--world=4"]) == 2
    assert "job.custom_config_module" in capsys.readouterr().err


def test_a_table_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Another number in the table is another plan; a faulty table is refused."""
    table = (FOLDER / "h200.toml").read_text()
    file = tmp_path / "mine.toml"
    memory = "memory_gib = 139.8"
    assert memory in table

    def run(text: str) -> int:
        file.write_text(text)
        return _plan(f"--hardware={file}", "--inner=2")

    assert run(table.replace(memory, "memory_gib = 0.05")) == 0
    text = capsys.readouterr().out
    assert "No setting fits in 0.05 GiB: the least is" in text
    for other, message in (
        (table.replace(memory, ""), "memory_gib is missing"),
        (table.replace(memory, "memory_gib = -1"), "memory_gib (-1) must be positive"),
        (
            table.replace(memory, 'memory_gib = "x"'),
            "memory_gib ('x') must be a number",
        ),
        (table.replace(memory, f"{memory}\nwheels = 4"), "unknown key wheels"),
        (table.replace("[outer]", "[outward]"), "unknown key outward"),
        (table.replace("backends.flex", "backends.flux"), "backends.flux must be one"),
        (table.split("[backends")[0], "needs at least one table [backends.NAME]"),
        (table.replace("[outer]", "outer = 3\n[other]"), ""),
        ("name = ", "cannot be read"),
    ):
        assert run(other) == 2, message
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert str(file) in error


def test_tables_that_come_with_the_recipe() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.toml"))
    assert names == ["a100", "h200"]
    for name in names:
        assert load_hardware(name).memory_gib > 0


# --- holding it against a GPU ---------------------------------------------------------

GOOD = measuring.Measured(
    case="a case",
    backend="flash",
    predicted_ms=100.0,
    predicted_parts_ms={"linear": 100.0},
    measured_ms=100.0,
    predicted_bytes=1e9,
    predicted_moment="loss",
    measured_bytes=10**9,
    blocks=(30, 4),
)


def test_bars_of_time_and_memory() -> None:
    """Both ways; on a CPU memory alone."""
    assert measuring.misses(GOOD, "cuda") == []
    for changes, what in (
        ({"measured_ms": 126.0}, "time is 0.794"),
        ({"measured_ms": 83.0}, "time is 1.205"),
        ({"measured_bytes": 1_120_000_000}, "memory is 0.893"),
        ({"measured_bytes": 900_000_000}, "memory is 1.111"),
    ):
        wrong = measuring.misses(replace(GOOD, **changes), "cuda")
        assert len(wrong) == 1 and what in wrong[0]
        on_cpu = measuring.misses(replace(GOOD, **changes), "cpu")
        assert bool(on_cpu) == ("memory" in what)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "products"),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttention",
            "attention",
        ),
        ("triton_tem_fused_flex_attention_backward_3", "attention"),
        ("column_dkdv_kernel", "attention"),
        ("_row_stats_kernel", "search"),
        ("triton_poi_fused_mul_silu_2", "fused"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel",
            "optimizer",
        ),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_by_kind(name: str, kind: str) -> None:
    assert measuring.kernel_kind(name) == kind


def test_a_case_that_fails_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Numbers that came before are kept, and what missed its bar is said."""
    first, second = measuring.CPU_CASES[:2]
    monkeypatch.setattr(measuring, "CPU_CASES", (first, second))
    numbers = asdict(replace(GOOD, case=first.name, measured_bytes=2 * 10**9))
    answers = {first.name: (numbers, "exit code 1: boom"), second.name: ({}, "no end")}
    monkeypatch.setattr(measuring, "start_child", lambda name, *_: answers[name])
    file = tmp_path / "measured.json"
    assert plan.main(["--measure", "--device=cpu", f"--json={file}"]) == 1
    out = capsys.readouterr().out
    assert "memory alone is compared" in out and "ratio 0.500" in out
    wrong = json.loads(file.read_text())["wrong"]
    assert [line.partition(": ")[2][:9] for line in wrong] == [
        "exit code",
        "predicted",
        "no end",
    ]
    assert all(line in out for line in wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        ([], "needs a CUDA GPU and there is none here: --device cpu"),
        (["--training.steps=3"], "has runs of its own, got --training.steps=3"),
        (["--seq-len=4096", "--cp=2"], "runs of its own, got --cp --seq-len"),
        (["--device=tpu"], "--device"),
    ):
        assert plan.main(["--measure", *flags]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
