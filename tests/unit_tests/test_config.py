"""A wrong setting is refused with its name and its values; a right one is not."""

from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager

from mtraining_flex.config import (
    Ring,
    Sentinel,
    SparseAttention,
    resolve_degrees,
    resolve_inner_degree,
    validate_job,
)

MODULE = "--job.custom_config_module=mtraining_flex.config"


def _job(*overrides: str) -> Any:
    """torchtitan's configuration with our sections, as a command line gives it."""
    flags = [f"--{override}" for override in overrides]
    return ConfigManager().parse_args([MODULE, *flags])


def _refused(job: Any, world_size: int, *parts: str) -> None:
    with pytest.raises(ValueError) as error:
        validate_job(job, world_size)
    for part in parts:
        assert part in str(error.value)


def test_defaults_are_valid() -> None:
    SparseAttention().validate()
    Ring().validate()
    layout = validate_job(_job(), 1)
    assert (layout.name, layout.seq_len, layout.cp_size) == ("striped", 2048, 1)


SPARSE_ERRORS: list[tuple[dict[str, Any], list[str]]] = [
    ({"pattern": "x"}, ["pattern ('x')", "vertical_slash", "dense"]),
    ({"budget": "x"}, ["budget ('x')", "top_p", "top_k"]),
    ({"backend": "x"}, ["backend ('x')", "auto", "flex", "flash", "eager"]),
    ({"granularity": 0}, ["granularity (0)", "at least 1"]),
    ({"max_vertical": -1}, ["max_vertical (-1)", "at least 0"]),
    ({"max_slash": 0}, ["max_slash (0)", "at least 1"]),
    ({"num_vertical": -1}, ["num_vertical (-1)", "at least 0"]),
    ({"num_slash": 0}, ["num_slash (0)", "at least 1"]),
    ({"sink": -1}, ["sink (-1)", "at least 0"]),
    ({"local_window": 0}, ["local_window (0)", "at least 1"]),
    ({"probe_rows": 0}, ["probe_rows (0)", "at least 1"]),
    ({"vertical_p": 0.0}, ["vertical_p (0.0)", "(0, 1]"]),
    ({"vertical_p": 1.1}, ["vertical_p (1.1)", "(0, 1]"]),
    ({"slash_p": -0.5}, ["slash_p (-0.5)", "(0, 1]"]),
    ({"slash_p": float("nan")}, ["slash_p (nan)", "(0, 1]"]),
    ({"sink": 9, "max_vertical": 8}, ["sink (9)", "max_vertical (8)"]),
    ({"local_window": 5, "max_slash": 4}, ["local_window (5)", "max_slash (4)"]),
    (
        {"budget": "top_k", "num_vertical": 9, "max_vertical": 8},
        ["num_vertical (9)", "max_vertical (8)"],
    ),
    (
        {"budget": "top_k", "num_slash": 5, "max_slash": 4},
        ["num_slash (5)", "max_slash (4)"],
    ),
    ({"backend": "flex", "granularity": 64}, ["granularity (64)", "128", "'flex'"]),
    ({"backend": "flash", "granularity": 256}, ["granularity (256)", "'flash'"]),
    (
        {"backend": "triton", "granularity": 48},
        ["granularity (48)", "16, 32, 64 or 128", "'triton'"],
    ),
]


@pytest.mark.parametrize(("changes", "parts"), SPARSE_ERRORS)
def test_sparse_attention_errors(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        SparseAttention(**changes).validate()
    message = str(error.value)
    assert message.startswith("sparse_attention.")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "changes",
    [
        {"vertical_p": 1.0, "slash_p": 1e-3},
        {"max_vertical": 0},
        {"num_vertical": 0, "budget": "top_k"},
        # The counts of top_k say nothing about top_p.
        {"num_vertical": 9, "max_vertical": 8, "num_slash": 5, "max_slash": 4},
        {"granularity": 16, "backend": "eager"},
        {"granularity": 16},
        {"sink": 1024, "local_window": 256},
    ],
)
def test_settings_at_their_bounds_are_valid(changes: dict[str, Any]) -> None:
    SparseAttention(**changes).validate()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"layout": "x"}, ["ring.layout ('x')", "striped", "contiguous", "zigzag"]),
        ({"rotation": "x"}, ["ring.rotation ('x')", "ring", "allgather"]),
        ({"rotation": "two_level", "inner": "x"}, ["ring.inner ('x')", "allgather"]),
        ({"rotation": "two_level", "inner_degree": -1}, ["ring.inner_degree (-1)"]),
        ({"inner": "allgather"}, ["ring.inner (allgather)", "'two_level'", "'ring'"]),
        ({"inner_degree": 2}, ["ring.inner_degree (2)", "'two_level'", "'ring'"]),
    ],
)
def test_ring_errors(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Ring(**changes).validate()
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_sentinel_errors() -> None:
    with pytest.raises(ValueError, match=r"^sentinel\.every \(-1\) .*at least 0"):
        Sentinel(every=-1).validate()
    Sentinel(every=0, startup=False).validate()
    with pytest.raises(ValueError, match=r"sentinel\.every \(-1\)"):
        validate_job(_job("sentinel.every=-1"), 1)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["checkpoint.last_save_in_hf", "checkpoint.no_last_save_model_only"],
            ["checkpoint.last_save_in_hf (True)", "last_save_model_only (False)"],
        ),
        (
            ["checkpoint.initial_load_in_hf", "checkpoint.no_initial_load_model_only"],
            ["checkpoint.initial_load_in_hf (True)", "initial_load_model_only (False)"],
        ),
        (
            ["checkpoint.initial_load_in_hf_quantized"],
            ["checkpoint.initial_load_in_hf_quantized (True)"],
        ),
        (["rope.scaling=yarn"], ["rope.factor (1.0)"]),
    ],
)
def test_of_hugging_face(flags: list[str], parts: list[str]) -> None:
    _refused(_job(*flags), 1, *parts)


# The inner ring


@pytest.mark.parametrize(
    ("world_size", "cp", "per_node", "expected"),
    [(4, 4, 2, 2), (8, 4, 2, 2), (32, 32, 8, 8), (16, 8, 4, 4)],
)
def test_the_inner_ring_is_that_of_a_node(
    world_size: int, cp: int, per_node: int, expected: int
) -> None:
    job = _job("ring.rotation=two_level", f"parallelism.context_parallel_degree={cp}")
    job.training.seq_len = 128 * cp
    validate_job(job, world_size, per_node)
    assert job.ring.inner_degree == expected


def test_the_number_of_a_node_comes_from_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = Ring(rotation="two_level")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"inner_degree \(0\).*LOCAL_WORLD_SIZE"):
        resolve_inner_degree(ring, [range(4)])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resolve_inner_degree(ring, [range(4)]) == 2
    ring.inner_degree = 4
    assert resolve_inner_degree(ring, [range(8)]) == 4


@pytest.mark.parametrize(
    ("inner", "rings", "per_node", "parts"),
    [
        (0, [range(8)], 8, ["inner_degree (8, the ring's ranks on a node", "(8)"]),
        (0, [range(4)], 1, ["inner_degree (1, the ring's ranks on a node", "(4)"]),
        (0, [range(6)], 4, ["6 ranks", "4 processes", "[0, 0, 0, 0, 1, 1]"]),
        (0, [range(4), range(4, 8)], 6, ["is 2 for some", "4 for others", "6 proc"]),
        (3, [range(8)], 8, ["inner_degree (3)", "context_parallel_degree (8)"]),
        (1, [range(8)], 8, ["inner_degree (1)", "context_parallel_degree (8)"]),
        (8, [range(8)], 8, ["inner_degree (8)", "context_parallel_degree (8)"]),
    ],
)
def test_an_inner_ring_that_cannot_be(
    inner: int, rings: list[range], per_node: int, parts: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        ring = Ring(rotation="two_level", inner_degree=inner)
        resolve_inner_degree(ring, rings, per_node)
    assert all(part in str(error.value) for part in parts), str(error.value)


# The whole run


def test_a_run_without_our_sections_is_told_how_to_get_them() -> None:
    _refused(
        ConfigManager().parse_args([]), 1, "[sparse_attention]", "custom_config_module"
    )


def test_overrides_reach_our_sections() -> None:
    job = _job("sparse_attention.granularity=64", "ring.layout=zigzag")
    assert job.sparse_attention.granularity == 64
    assert job.ring.layout == "zigzag"
    layout = validate_job(job, 1)
    assert (layout.name, layout.granularity) == ("zigzag", 64)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sparse_attention.budget=x", "sparse_attention.budget ('x')"),
        ("ring.layout=x", "ring.layout ('x')"),
    ],
)
def test_a_run_validates_its_sections(override: str, message: str) -> None:
    _refused(_job(override), 1, message)


@pytest.mark.parametrize(
    "section", ["sparse_attention", "ring", "training", "parallelism"]
)
def test_unknown_keys_are_refused(section: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[job]\ncustom_config_module = "mtraining_flex.config"\n'
        f"[{section}]\nno_such_key = 1\n"
    )
    with pytest.raises(ValueError, match="no_such_key"):
        ConfigManager().parse_args([f"--job.config_file={file}"])


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _job("sparse_attention.no_such_key=1")
    assert "no_such_key" in capsys.readouterr().err


def test_toml_values_reach_our_sections(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[job]\ncustom_config_module = "mtraining_flex.config"\n'
        "[sparse_attention]\nvertical_p = 0.95\nsink = 4\n"
        '[ring]\nrotation = "allgather"\n'
    )
    job = ConfigManager().parse_args([f"--job.config_file={file}"])
    assert job.sparse_attention.vertical_p == 0.95
    assert job.sparse_attention.sink == 4
    assert job.ring.rotation == "allgather"
    validate_job(job, 1)


@pytest.mark.parametrize(
    ("degree", "world_size"),
    [
        ("pipeline_parallel_degree", 2),
        ("tensor_parallel_degree", 2),
        ("expert_parallel_degree", 2),
    ],
)
def test_other_parallelism_is_refused(degree: str, world_size: int) -> None:
    _refused(_job(f"parallelism.{degree}=2"), world_size, f"{degree} (2)", "must be 1")


@pytest.mark.parametrize(
    ("overrides", "world_size", "parts"),
    [
        (["data_parallel_replicate_degree=0"], 1, ["replicate_degree (0)"]),
        (["context_parallel_degree=0"], 1, ["context_parallel_degree (0)"]),
        (["context_parallel_degree=-2"], 1, ["context_parallel_degree (-2)"]),
        (
            ["context_parallel_degree=4", "data_parallel_shard_degree=2"],
            4,
            ["shard_degree (2)", "parallel_degree (4)", "= 8", "world size (4)"],
        ),
        (["context_parallel_degree=4"], 2, ["(1)", "(4)", "world size (2)"]),
        (["context_parallel_degree=2"], 3, ["(2)", "world size (3)"]),
        (["data_parallel_shard_degree=0"], 1, ["shard_degree (0)", "world size (1)"]),
    ],
)
def test_degrees_must_give_the_world(
    overrides: list[str], world_size: int, parts: list[str]
) -> None:
    _refused(_job(*(f"parallelism.{o}" for o in overrides)), world_size, *parts)


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ([], 8, 8),
        (["data_parallel_shard_degree=2"], 8, 4),
        (["data_parallel_shard_degree=2", "data_parallel_replicate_degree=2"], 8, 2),
        (["tensor_parallel_degree=2"], 8, 4),
        (["data_parallel_shard_degree=8"], 8, 1),
    ],
)
def test_minus_one_takes_the_ranks_that_are_left(
    overrides: list[str], world_size: int, expected: int
) -> None:
    flags = ["context_parallel_degree=-1", *overrides]
    job = _job(*(f"parallelism.{flag}" for flag in flags))
    resolve_degrees(job, world_size)
    assert job.parallelism.context_parallel_degree == expected


def test_minus_one_that_does_not_divide_is_refused() -> None:
    job = _job(
        "parallelism.context_parallel_degree=-1",
        "parallelism.data_parallel_shard_degree=3",
    )
    with pytest.raises(ValueError, match=r"\(-1\).*world size \(8\).*degrees \(3\)"):
        resolve_degrees(job, 8)


def test_a_given_degree_is_left_alone() -> None:
    job = _job("parallelism.context_parallel_degree=2")
    resolve_degrees(job, 8)
    assert job.parallelism.context_parallel_degree == 2


def test_the_layout_is_that_of_the_ring() -> None:
    job = _job(
        "parallelism.context_parallel_degree=-1",
        "parallelism.data_parallel_shard_degree=2",
        "training.seq_len=4096",
        "ring.layout=contiguous",
    )
    layout = validate_job(job, 8)
    assert (layout.name, layout.cp_size, layout.seq_len) == ("contiguous", 4, 4096)
    assert layout.local_blocks == 8


def test_the_global_batch_must_divide() -> None:
    job = _job(
        "training.local_batch_size=3",
        "training.global_batch_size=8",
        "parallelism.data_parallel_shard_degree=2",
    )
    _refused(job, 2, "global_batch_size (8)", "(6)")
    # Ranks of a ring share their sequences: here the batch is 3, and 9 will do.
    job = _job(
        "training.local_batch_size=3",
        "training.global_batch_size=9",
        "parallelism.context_parallel_degree=2",
    )
    validate_job(job, 2)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["training.seq_len=1000"],
            ["training.seq_len", "(1000)", "4 * 128 = 512"],
        ),
        (
            ["training.seq_len=1536", "ring.layout=zigzag"],
            ["training.seq_len", "(1536)", "2 * 4 * 128 = 1024"],
        ),
        (["training.seq_len=384"], ["training.seq_len", "cp_size (4)", "3 blocks"]),
        (
            ["training.seq_len=2048", "sparse_attention.probe_rows=2049"],
            ["probe_rows (2049)", "training.seq_len (2048)"],
        ),
        (
            [
                "training.seq_len=512",
                "sparse_attention.sink=513",
            ],
            ["sink (513)", "training.seq_len (512)"],
        ),
        (
            ["training.seq_len=512", "sparse_attention.local_window=5"],
            ["local_window (5)", "blocks of training.seq_len (4)"],
        ),
        (
            ["validation.enable", "validation.seq_len=1000"],
            ["validation.seq_len", "(1000)", "4 * 128 = 512"],
        ),
        (
            [
                "validation.enable",
                "validation.seq_len=512",
                "sparse_attention.local_window=5",
            ],
            ["local_window (5)", "blocks of validation.seq_len (4)"],
        ),
    ],
)
def test_lengths_must_fit(overrides: list[str], parts: list[str]) -> None:
    job = _job("parallelism.context_parallel_degree=4", *overrides)
    _refused(job, 4, *parts)


def test_validation_steps() -> None:
    job = _job("validation.enable")
    for steps in (-2, 0):  # torchtitan asserts on the command line already
        job.validation.steps = steps
        _refused(job, 1, f"validation.steps ({steps})", "or -1")


def test_a_validation_that_is_off_is_not_checked() -> None:
    validate_job(_job("validation.seq_len=1000"), 1)


def test_dense_needs_no_probe() -> None:
    job = _job(
        "training.seq_len=128",
        "sparse_attention.pattern=dense",
        "sparse_attention.probe_rows=999",
    )
    validate_job(job, 1)
