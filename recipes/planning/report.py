"""A plan in words, as TOML, and as JSON."""

from dataclasses import asdict
from typing import Any

from recipes.planning.compare import GIB, Plan, Prediction, Run
from recipes.planning.crossover import LONGEST
from recipes.planning.memory import CATEGORIES
from recipes.planning.traffic import sharding_traffic

MIB = 2**20


def report(plan: Plan) -> str:
    """Markdown."""
    parts = [_heading(plan), _settings_table(plan), _memory_table(plan)]
    if plan.refusals:
        parts.append("\n".join(["Cannot run:", "", *_refused(plan)]))
    parts += [_crossover_words(plan), _best_words(plan)]
    return "\n\n".join(parts)


def _refused(plan: Plan) -> list[str]:
    """One line for each reason."""
    groups: dict[str, list[str]] = {}
    for each in plan.refusals:
        groups.setdefault(each.reason, []).append(str(each.setting))
    return [f"- {'; '.join(names)}: {reason}" for reason, names in groups.items()]


def _heading(plan: Plan) -> str:
    run, first = plan.run, plan.predictions[0].problem
    model, config = run.model, run.config
    lines = [
        f"{config.model.name} {config.model.flavor}: {model.parameters / 1e9:.3g} B "
        f"parameters, {model.layers} layers, {model.heads}/{model.kv_heads} heads of "
        f"{model.head_dim}; {first.layout.seq_len} tokens, local_batch_size "
        f"{first.batch}, {first.passes} passes a step.",
        f"{run.world} x {run.hardware.name}, {run.node_gpus} on a node; backend "
        f"{run.backend}, activation checkpointing {first.checkpointing}, blocks "
        f"{'compiled' if first.compiled else 'not compiled'}.",
        f"context_parallel_degree {run.cp} ({run.degree_from}), data parallel "
        f"{run.world // run.cp}, {first.layout.local_len} tokens a rank.",
        f"Patterns {plan.patterns}.",
    ]
    if run.cp == 1 and run.world > 1:
        lines.append(
            f"A ring of one rank moves nothing: each of {run.world} ranks has whole "
            f"sequences. --cp {run.world} plans one ring of all ranks."
        )
    return "\n".join(lines)


def _settings_table(plan: Plan) -> str:
    rows = []
    for each in plan.predictions:
        time = each.time
        note = "launches" if time.host > time.device else ""
        rows.append(
            [
                str(each.setting),
                f"{each.imbalance[0]:.3f}",
                f"{each.imbalance[1]:.3f}",
                f"{each.layer.inner / MIB:.0f}",
                f"{each.layer.outer / MIB:.0f}",
                f"{each.step.inner / GIB:.2f}",
                f"{each.step.outer / GIB:.2f}",
                f"{time.total:.1f}",
                f"{each.tokens_per_s:.0f}",
                f"{each.memory.total / GIB:.2f}",
                f"{each.memory.largest('KV buffers') / MIB:.0f}",
                note,
            ]
        )
    first = plan.predictions[0].problem
    head = [
        "layout, rotation",
        "worker",
        "step",
        "layer MiB inner",
        "outer",
        "step GiB inner",
        "outer",
        "step ms",
        "tokens/s",
        "peak GiB",
        "KV MiB",
        "bound by",
    ]
    shards = sharding_traffic(first) * first.passes
    return (
        f"{_table(head, rows)}\n\nBytes are those of the ring. Parameters and "
        f"gradients add {shards.inner / GIB:.2f} GiB inner and "
        f"{shards.outer / GIB:.2f} GiB outer to a step. KV: the most that buffers of "
        "keys, values and their gradients take, which need not be at the peak."
    )


def _memory_table(plan: Plan) -> str:
    """Settings with the same peak in one row; and the moments of one setting."""
    alike: dict[str, list[Prediction]] = {}
    for each in plan.predictions:
        memory = each.memory
        alike.setdefault(f"{memory.moment} {memory.parts}", []).append(each)
    rows = []
    for group in alike.values():
        names = "; ".join(str(each.setting) for each in group)
        if len(group) == len(plan.predictions) > 1:
            names = "all"
        memory = group[0].memory
        rows.append([names, *_cells(memory.parts), memory.moment])
    shown = plan.best or plan.predictions[0]
    moments = [[name, *_cells(parts)] for name, parts in shown.memory.moments.items()]
    head = [*CATEGORIES, "total"]
    return (
        "Peak memory of a rank, MiB:\n\n"
        + _table(["layout, rotation", *head, "at the moment"], rows)
        + f"\n\nMoments of a step ({shown.setting}), MiB:\n\n"
        + _table(["moment", *head], moments)
    )


def _cells(parts: dict[str, float]) -> list[str]:
    """MiB by category, and in all."""
    sizes = [parts[name] for name in CATEGORIES]
    return [f"{size / MIB:.0f}" for size in (*sizes, sum(sizes))]


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown whose columns are aligned in a terminal, too."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: list[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width for width in widths]
    return "\n".join([line(head), line(rule), *map(line, rows)])


def _crossover_words(plan: Plan) -> str:
    cross = plan.crossover
    if cross is None:
        return "Pattern 'dense' keeps all: there is no crossover."

    def tokens(length: int | None) -> str:
        return f"more than {LONGEST} tokens" if length is None else f"{length} tokens"

    return (
        "Crossover, attention of one layer on one GPU against dense cuDNN: it cannot "
        f"pay below {tokens(cross.floor)}, where search and masks alone cost more; "
        f"with patterns like these it pays from {tokens(cross.whole)} on."
    )


def _best_words(plan: Plan) -> str:
    run, best = plan.run, plan.best
    if best is None:
        least = min(plan.predictions, key=lambda p: p.memory.total)
        return (
            f"No setting fits in {run.hardware.memory_gib} GiB: the least is "
            f"{least.memory.total / GIB:.2f} GiB ({least.setting}), at the moment "
            f"'{least.memory.moment}'. A larger --cp has fewer tokens on a rank, "
            "activation_checkpoint.mode = 'full' saves less."
        )
    times = asdict(best.time)
    host = times.pop("host")
    return "\n".join(
        [
            f"Best of those that fit in {run.hardware.memory_gib} GiB: {best.setting}.",
            f"{best.time.total:.1f} ms a step: "
            + ", ".join(f"{name} {ms:.1f}" for name, ms in times.items())
            + f"; the CPU launches it in {host:.1f}.",
            "",
            *toml_lines(plan.run, best),
        ]
    )


def toml_lines(run: Run, best: Prediction) -> list[str]:
    """What to set for a prediction."""
    lines = ["[parallelism]", f"context_parallel_degree = {run.cp}", "", "[ring]"]
    lines += [f'layout = "{best.setting.layout}"']
    lines += [f'rotation = "{best.setting.rotation}"']
    if best.setting.rotation == "two_level":
        lines += [f"inner_degree = {best.problem.node_ranks}"]
        lines += [f'inner = "{best.setting.inner}"']
    if run.config.sparse_attention.backend not in ("auto", run.backend):
        lines += ["", "[sparse_attention]", f'backend = "{run.backend}"']
    return lines


def as_json(plan: Plan) -> dict[str, Any]:
    """All numbers; bytes, ms."""
    run, best = plan.run, plan.best
    return {
        "world": run.world,
        "node_gpus": run.node_gpus,
        "hardware": run.hardware.name,
        "backend": run.backend,
        "context_parallel_degree": run.cp,
        "patterns": plan.patterns,
        "model": asdict(run.model),
        "settings": [
            asdict(each.setting)
            | {
                "worker_imbalance": each.imbalance[0],
                "step_imbalance": each.imbalance[1],
                "layer_bytes": asdict(each.layer),
                "step_bytes": asdict(each.step),
                "step_ms": each.time.total,
                "step_parts_ms": asdict(each.time),
                "tokens_per_s": each.tokens_per_s,
                "peak_bytes": each.memory.total,
                "peak_parts": each.memory.parts,
                "peak_moment": each.memory.moment,
                "moments": each.memory.moments,
                "fits": each.memory.total <= run.hardware.memory_gib * GIB,
            }
            for each in plan.predictions
        ],
        "refused": [asdict(x.setting) | {"reason": x.reason} for x in plan.refusals],
        "crossover": None if plan.crossover is None else asdict(plan.crossover),
        "best": None if best is None else asdict(best.setting),
        "toml": [] if best is None else toml_lines(run, best),
    }
