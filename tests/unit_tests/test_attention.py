"""The public ways in: `sparse_attention`, `SparseAttention`, `RingContextParallel`.

What they cannot honour is refused with both numbers; nothing is ignored in silence.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from mtraining_flex.attention import SparseAttention, sparse_attention
from mtraining_flex.config import BACKENDS, Ring
from mtraining_flex.config import SparseAttention as SparseConfig
from mtraining_flex.layout import LAYOUTS, Layout, build_layout
from mtraining_flex.parallelize import RingContextParallel
from mtraining_flex.pattern import dense_pattern, find_pattern, pack_pattern
from mtraining_flex.reference import reference_attention, reference_pattern
from mtraining_flex.ring import ops
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.simulate import run_ranks
from tests.helpers import assert_close, random_pattern, random_qkv

G, SEQ = 8, 64
PATTERN = pack_pattern([[[0, 3]]], [[[1, 20]]])
QKV = tuple[Tensor, Tensor, Tensor]


def _config(**changes: Any) -> SparseConfig:
    settings: dict[str, Any] = {
        "granularity": G,
        "probe_rows": 8,
        "max_vertical": 12,
        "max_slash": 4,
    }
    return SparseConfig(**(settings | changes))


def _qkv(dtype: torch.dtype = torch.float64, seed: int = 0) -> QKV:
    return random_qkv(2, 4, 2, SEQ, 16, dtype, seed)


def _layout(name: str = "striped", seq_len: int = SEQ, size: int = 1) -> Layout:
    return build_layout(name, seq_len, size, G)


def _configured(**changes: Any) -> SparseAttention:
    attention = SparseAttention(layer_id=2)
    attention.configure(_config(**changes), Ring(), [_layout()], None)
    return attention


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


# sparse_attention


def test_defaults_are_a_sequence_in_one_piece() -> None:
    qkv = _qkv()
    out = sparse_attention(*qkv, PATTERN, granularity=G)
    expected, _ = reference_attention(*qkv, PATTERN, G)
    assert_close(out, expected, 1e-12)
    for name in LAYOUTS:
        same = sparse_attention(*qkv, PATTERN, granularity=G, layout=_layout(name))
        assert_close(same, expected, 1e-12)
    assert_close(
        sparse_attention(*qkv, PATTERN, granularity=G, scale=1.5),
        reference_attention(*qkv, PATTERN, G, 1.5)[0],
        1e-12,
    )


def test_the_default_granularity_is_128() -> None:
    qkv = random_qkv(1, 2, 1, 256, 8, torch.float64, seed=1)
    pattern = pack_pattern([[[0], [1]]], [[[5], []]])
    out = sparse_attention(*qkv, pattern)
    assert_close(out, reference_attention(*qkv, pattern, 128)[0], 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_result_has_the_dtype_of_q(dtype: torch.dtype) -> None:
    qkv = tuple(x.requires_grad_() for x in _qkv(dtype))
    out = sparse_attention(*qkv, PATTERN, granularity=G)
    assert out.dtype == dtype and out.shape == qkv[0].shape
    for x, grad in zip(qkv, torch.autograd.grad(out.sum(), qkv), strict=True):
        assert grad.dtype == dtype and grad.shape == x.shape
    assert_close(out, reference_attention(*qkv, PATTERN, G)[0], 1e-2)


def _shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> QKV:
    return torch.randn(q), torch.randn(k), torch.randn(v)


Q4 = (2, 4, SEQ, 16)
K4 = (2, 2, SEQ, 16)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ((Q4[1:], K4, K4), r"q \[B, H, S, D\].*\(4, 64, 16\)"),
        ((Q4, K4[1:], K4[1:]), r"k, v \[B, HK, S, D\].*\(2, 64, 16\)"),
        ((Q4, K4, (2, 2, SEQ, 8)), r"\(2, 2, 64, 16\), \(2, 2, 64, 8\)"),
        ((Q4, K4, (2, 1, SEQ, 16)), r"\(2, 2, 64, 16\), \(2, 1, 64, 16\)"),
        ((Q4, (2, 3, SEQ, 16), (2, 3, SEQ, 16)), r"heads \(4\).*kv heads \(3\)"),
        ((Q4, (1, 2, SEQ, 16), (1, 2, SEQ, 16)), "do not match"),
        ((Q4, (2, 2, 32, 16), (2, 2, 32, 16)), "do not match"),
        ((Q4, (2, 2, SEQ, 8), (2, 2, SEQ, 8)), "do not match"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_attention(*_shapes(*shapes), PATTERN, granularity=G)


@pytest.mark.parametrize(
    ("batch", "heads", "message"),
    [(3, 4, r"B \(3\) must be 1 or 2"), (2, 2, r"H \(2\) must be 1 or 4")],
)
def test_a_pattern_of_other_heads_is_refused(
    batch: int, heads: int, message: str
) -> None:
    pattern = random_pattern(batch, heads, SEQ, G, max_slash=3, max_vertical=3, seed=0)
    with pytest.raises(ValueError, match=message):
        sparse_attention(*_qkv(), pattern, granularity=G)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (("striped", 128, 1, 8), r"layout's seq_len \(128\).*\(64\)"),
        (("striped", 64, 2, 8), r"layout's cp_size \(2\).*\(1\)"),
        (("striped", 64, 1, 16), r"layout's granularity \(16\).*\(8\)"),
    ],
)
def test_a_layout_of_another_call_is_refused(
    layout: tuple[str, int, int, int], message: str
) -> None:
    other = build_layout(*layout)
    with pytest.raises(ValueError, match=message):
        sparse_attention(*_qkv(), PATTERN, granularity=G, layout=other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": 7}, r"seq_len \(64\) must be a multiple.*7"),
        ({"granularity": 128}, r"seq_len \(64\).*at least.*128"),
        ({"granularity": 0}, r"granularity \(0\)"),
        (
            {"rotation": "two_level", "inner_degree": 1},
            r"ring.inner_degree \(1\) must divide .*degree \(1\)",
        ),
        ({"inner_degree": 2}, r"ring.inner_degree \(2\) is only for .*'two_level'"),
        ({"inner": "allgather"}, r"ring.inner \(allgather\) is only for"),
        ({"rotation": "star"}, r"ring.rotation \('star'\) must be one of"),
        ({"backend": "cudnn"}, r"backend \('cudnn'\) must be one of.*eager"),
        (
            {"backend": "triton"},
            r"backend \('triton'\) cannot run here.*granularity \(8\)",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_attention(*_qkv(), PATTERN, **({"granularity": G} | changes))


@pytest.mark.parametrize("size", [3, 4])
def test_b08_a_length_that_does_not_divide_is_refused(size: int) -> None:
    """A shard is never padded, nor cut."""
    for seq_len in (8191, 8193, 8192 + 128):
        with pytest.raises(ValueError, match=rf"seq_len \({seq_len}\).*{size} \* 128"):
            build_layout("striped", seq_len, size, 128)
    # Nor does a ring of such shards run: 20 local tokens are no whole blocks of 8.
    q, k, v = (x[:, :, :20] for x in _qkv())

    def call(comm: Any) -> None:
        with pytest.raises(ValueError, match=rf"seq_len \({20 * size}\)"):
            sparse_attention(q, k, v, PATTERN, granularity=G, mesh=comm)

    run_ranks(size, call)


# Backends


@pytest.mark.parametrize("backend", ["flex", "flash"])
def test_a_gpu_backend_on_the_cpu_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=rf"backend \('{backend}'\).*CUDA.*'cpu'"):
        sparse_attention(*_qkv(), PATTERN, granularity=G, backend=backend)
    attention = SparseAttention()
    layout = build_layout("striped", 128, 1, 128)
    config = SparseConfig(backend=backend)
    attention.configure(config, Ring(), [layout], None)
    q, k, v = random_qkv(1, 2, 1, 128, 16, torch.float32, seed=0)
    with pytest.raises(ValueError, match=rf"backend \('{backend}'\).*CUDA"):
        attention(q, k, v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_auto_is_eager_on_the_cpu_and_says_why(dtype: torch.dtype) -> None:
    backend, reason = resolve_backend("auto", "cpu", 128, dtype, 128)
    assert backend == "eager" and "CPU" in reason
    qkv = _qkv(dtype)
    auto, eager = (
        sparse_attention(*qkv, PATTERN, granularity=G, backend=name)
        for name in ("auto", "eager")
    )
    assert torch.equal(auto, eager)


@pytest.mark.parametrize(
    ("granularity", "dtype", "message"),
    [(48, torch.bfloat16, r"granularity \(48\)"), (128, torch.float64, "float64")],
)
def test_auto_is_never_dense_on_a_gpu(
    granularity: int, dtype: torch.dtype, message: str
) -> None:
    """What the compiled backends cannot do is not done eagerly unasked."""
    with pytest.raises(ValueError, match=f"'auto'.*{message}.*set 'eager'"):
        resolve_backend("auto", "cuda", granularity, dtype, 128)
    assert resolve_backend("eager", "cuda", granularity, dtype, 128)[0] == "eager"


def test_auto_takes_the_kernels_that_have_a_tile() -> None:
    """FlexAttention compiles blocks of 128 alone; ours take 64, too."""
    backend, reason = resolve_backend("auto", "cuda", 64, torch.bfloat16, 128)
    assert backend == "triton" and "granularity (64) must be 128" in reason


def test_every_backend_is_resolved_or_refused() -> None:
    for backend in BACKENDS:
        try:
            name, reason = resolve_backend(backend, "cpu", 128, torch.bfloat16, 128)
        except ValueError as error:
            assert f"('{backend}')" in str(error)
        else:
            assert name == "eager" and reason


# SparseAttention


def test_not_configured_is_refused() -> None:
    with pytest.raises(ValueError, match="no layout yet.*RingContextParallel"):
        SparseAttention()(*_qkv())


def test_it_searches_at_each_call() -> None:
    attention = _configured(vertical_p=0.3, slash_p=0.5)
    found = []
    for seed in (0, 1):
        qkv = _qkv(seed=seed)
        pattern = reference_pattern(*qkv[:2], _config(vertical_p=0.3, slash_p=0.5))
        expected, _ = reference_attention(*qkv, pattern, G)
        assert_close(attention(*qkv), expected, 1e-12)
        found.append(pattern)
    assert not torch.equal(found[0].vertical, found[1].vertical)


def test_gradients_flow_through_the_kept_pairs() -> None:
    attention, inputs = _configured(), _qkv()
    qkv = tuple(x.clone().requires_grad_() for x in inputs)
    out = attention(*qkv)
    dout = torch.randn_like(out)
    actual = torch.autograd.grad(out, qkv, dout)
    pattern = find_pattern(*inputs[:2], _config())
    ref = tuple(x.clone().requires_grad_() for x in inputs)
    expected, _ = reference_attention(*ref, pattern, G)
    for a, b in zip(actual, torch.autograd.grad(expected, ref, dout), strict=True):
        assert_close(a, b, 1e-12)


def test_the_search_is_a_call_of_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = ops.search_pattern

    def spy(*args: Any) -> Any:
        assert not args[0].requires_grad and not args[1].requires_grad
        calls.append(int(args[6]))
        return real(*args)

    monkeypatch.setattr(ops, "search_pattern", spy)
    attention = _configured()
    qkv = tuple(x.requires_grad_() for x in _qkv())
    attention(*qkv).sum().backward()
    assert calls == [2], "once a call, for its layer, and not again in the backward"
    _configured(pattern="dense")(*qkv)
    assert calls == [2], "a dense pattern needs no search"


def test_a_dense_pattern_is_sdpa() -> None:
    qkv = _qkv()
    assert_close(_configured(pattern="dense")(*qkv), _sdpa(*qkv), 1e-12)
    sparse = _configured()(*qkv)
    assert not torch.allclose(sparse, _sdpa(*qkv), atol=1e-3)


def test_scale_reaches_search_and_attention() -> None:
    qkv = _qkv()
    pattern = reference_pattern(*qkv[:2], _config(), scale=1.5)
    expected, _ = reference_attention(*qkv, pattern, G, 1.5)
    assert_close(_configured()(*qkv, scale=1.5), expected, 1e-12)


def test_a_length_that_no_layout_has_is_refused() -> None:
    attention = SparseAttention()
    layouts = [_layout(), _layout(seq_len=128)]
    attention.configure(_config(), Ring(), layouts, None)
    qkv = random_qkv(1, 2, 1, 96, 8, torch.float32, seed=0)
    with pytest.raises(ValueError, match=r"96 local tokens.*\[64, 128\]"):
        attention(*qkv)


def test_each_length_takes_its_own_layout() -> None:
    attention = SparseAttention()
    layouts = [_layout(), _layout(seq_len=128)]
    attention.configure(_config(pattern="dense"), Ring(), layouts, None)
    for seq_len in (64, 128):
        qkv = random_qkv(1, 2, 1, seq_len, 8, torch.float64, seed=0)
        assert_close(attention(*qkv), _sdpa(*qkv), 1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.ones(SEQ, SEQ).tril().bool()}, "attn_mask"),
        ({"attn_mask": torch.zeros(1)}, "attn_mask"),  # a tensor is not a truth value
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"is_causal": False}, "is_causal=False"),
        ({"block_mask": "mask"}, "block_mask"),
        ({"score_mod": _sdpa}, "score_mod"),
        ({"is_causal": False, "dropout_p": 0.1}, "dropout_p"),
    ],
)
def test_b05_what_it_would_ignore_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _configured()(*_qkv(), **arguments)


def test_arguments_that_ask_for_nothing_are_taken() -> None:
    qkv, attention = _qkv(), _configured(pattern="dense")
    out = attention(*qkv, attn_mask=None, dropout_p=0.0, is_causal=True)
    assert_close(out, _sdpa(*qkv), 1e-12)


@pytest.mark.parametrize(
    ("changes", "ring", "layout", "message"),
    [
        ({"vertical_p": 2.0}, Ring(), _layout(), r"vertical_p \(2.0\)"),
        (
            {},
            Ring(rotation="two_level", inner_degree=2),
            _layout(),
            r"inner_degree \(2\).*degree \(1\)",
        ),
        ({}, Ring(), _layout(size=2), r"cp_size \(2\).*\(1\)"),
        ({"granularity": 16}, Ring(), _layout(), r"granularity \(8\).*\(16\)"),
        ({"budget_file": "x.json"}, Ring(), _layout(), "number of heads"),
        ({"backend": "triton"}, Ring(), _layout(), "'triton'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changes: dict[str, Any], ring: Ring, layout: Layout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAttention().configure(_config(**changes), ring, [layout], None)


def test_a_budget_file_is_read_for_the_layer(tmp_path: Path) -> None:
    file = tmp_path / "budget.json"
    entry = '{"1": ["vertical_and_slash", 2, 8, 0.0]}'
    file.write_text(f"[{{}}, {{}}, {entry}]")
    config = _config(budget_file=str(file))
    attention = SparseAttention(layer_id=2)
    attention.configure(config, Ring(), [_layout()], None, heads=4)
    qkv = _qkv()
    pattern = find_pattern(*qkv[:2], config, layer=2)
    assert pattern.num_vertical[:, 1].tolist() == [2, 2]
    assert pattern.num_slash[:, 1].tolist() == [1, 1]
    expected, _ = reference_attention(*qkv, pattern, G)
    assert_close(attention(*qkv), expected, 1e-12)
    with pytest.raises(ValueError, match="3 layers.*layer 3"):
        SparseAttention(3).configure(config, Ring(), [_layout()], None, heads=4)


def test_it_has_no_parameter_and_no_state() -> None:
    attention = _configured()
    assert not list(attention.parameters()) and not attention.state_dict()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rotation", ["ring", "allgather"])
def test_shards_of_a_ring(name: str, rotation: str) -> None:
    qkv, size = _qkv(), 4
    layout = _layout(name, size=size)
    pattern = reference_pattern(*qkv[:2], _config())
    expected, _ = reference_attention(*qkv, pattern, G)

    def call(comm: Any) -> Tensor:
        attention = SparseAttention()
        attention.configure(_config(), Ring(name, rotation), [layout], comm)
        here = layout.positions(comm.rank)
        return attention(*(x[:, :, here] for x in qkv))

    for rank, out in enumerate(run_ranks(size, call)):
        assert_close(out, expected[:, :, layout.positions(rank)], 1e-12)


# RingContextParallel


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One rank with gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


class _Attention(nn.Module):
    """Any model's attention: positional q, k, v, its own parameters, plain SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        raise AssertionError("the module's own attention was called")


def test_any_module_takes_the_ring(mesh: DeviceMesh) -> None:
    style = RingContextParallel(_config(), _layout())
    module = parallelize_module(_Attention(), mesh, style)
    assert isinstance(module, _Attention) and list(module.state_dict()) == ["weight"]
    qkv = _qkv()
    out = module(*qkv)
    assert isinstance(out, Tensor) and not isinstance(out, DTensor)
    pattern = reference_pattern(*qkv[:2], _config())
    assert_close(out, reference_attention(*qkv, pattern, G)[0], 1e-12)
    with pytest.raises(ValueError, match="attn_mask"):
        module(*qkv, attn_mask=torch.ones(1))


def test_dtensors_come_back_as_dtensors(mesh: DeviceMesh) -> None:
    style = RingContextParallel(_config(), _layout())
    module = parallelize_module(_Attention(), mesh, style)
    leaves = tuple(x.requires_grad_() for x in _qkv())
    wrapped = [DTensor.from_local(x, mesh, [Shard(2)]) for x in leaves]
    out = module(*wrapped)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(2),) and out.device_mesh == mesh
    assert out.shape == leaves[0].shape
    dout = torch.randn_like(leaves[0])
    plain = module(*leaves)
    assert torch.equal(out.to_local(), plain)
    actual = torch.autograd.grad(out.to_local(), leaves, dout)
    expected = torch.autograd.grad(plain, leaves, dout)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_dtensors_of_other_placements_are_refused(mesh: DeviceMesh) -> None:
    style = RingContextParallel(_config(), _layout())
    module = parallelize_module(_Attention(), mesh, style)
    q, k, v = _qkv()
    good = [DTensor.from_local(x, mesh, [Shard(2)]) for x in (q, k, v)]
    whole = DTensor.from_local(q, mesh, [Replicate()])
    heads = DTensor.from_local(k, mesh, [Shard(1)])
    with pytest.raises(ValueError, match="q must be a DTensor sharded on dimension 2"):
        module(whole, *good[1:])
    with pytest.raises(ValueError, match=r"k must be.*Shard\(dim=1\)"):
        module(good[0], heads, good[2])
    with pytest.raises(ValueError, match="v must be.*Tensor"):
        module(*good[:2], v)


def test_sparse_attention_is_told_its_layout(mesh: DeviceMesh) -> None:
    layouts = [_layout("zigzag"), _layout("zigzag", 128)]
    attention = SparseAttention(layer_id=5)
    style = RingContextParallel(_config(pattern="dense"), layouts)
    assert parallelize_module(attention, mesh, style) is attention
    assert int(attention.layer) == 5
    for seq_len in (64, 128):
        qkv = random_qkv(1, 2, 1, seq_len, 8, torch.float64, seed=0)
        assert_close(attention(*qkv), _sdpa(*qkv), 1e-12)


def test_modules_are_numbered_as_layers(mesh: DeviceMesh) -> None:
    model = nn.ModuleList([_Attention() for _ in range(3)])
    style = RingContextParallel(_config(), _layout())
    parallelize_module(model, mesh, {"*": style})
    assert [int(module.sparse_attention.layer) for module in model] == [0, 1, 2]


def test_a_mesh_of_two_dimensions_is_refused(mesh: DeviceMesh) -> None:
    wide = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
    with pytest.raises(ValueError, match="1 dimension, got 2"):
        SparseAttention().configure(_config(), Ring(), [_layout()], wide)
    with pytest.raises(ValueError, match="1 dimension, got 2"):
        sparse_attention(*_qkv(), PATTERN, granularity=G, mesh=wide)


def test_the_function_takes_a_mesh(mesh: DeviceMesh) -> None:
    qkv = _qkv()
    out = sparse_attention(*qkv, dense_pattern(8, "cpu"), granularity=G, mesh=mesh)
    assert_close(out, _sdpa(*qkv), 1e-12)


@pytest.mark.parametrize(
    ("changes", "layout", "ring", "message"),
    [
        ({"slash_p": 0.0}, _layout(), None, r"slash_p \(0.0\)"),
        ({}, _layout(), Ring(layout="zigzag"), r"\('zigzag'\).*\('striped'\)"),
        (
            {},
            _layout(),
            Ring(rotation="two_level", inner_degree=2),
            r"inner_degree \(2\).*degree \(1\)",
        ),
        ({}, _layout(), Ring(layout="x"), r"ring.layout \('x'\)"),
    ],
)
def test_a_style_that_does_not_fit_is_refused(
    changes: dict[str, Any], layout: Layout, ring: Ring | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RingContextParallel(_config(**changes), layout, ring=ring)


def test_a_layout_of_another_ring_is_refused(mesh: DeviceMesh) -> None:
    style = RingContextParallel(_config(), _layout(size=2))
    with pytest.raises(ValueError, match=r"cp_size \(2\).*\(1\)"):
        parallelize_module(_Attention(), mesh, style)
