"""The models: exact angles, torchtitan's Llama 3, a naive Qwen2, weights from a seed.

torchtitan is imported inside the tests: the spawned ranks import this module without
conftest, and `mtraining_flex` must come first.
"""

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mtraining_flex import cpu_device
from mtraining_flex.attention import SparseAttention
from mtraining_flex.config import Ring
from mtraining_flex.config import SparseAttention as SparseConfig
from mtraining_flex.layout import Layout, build_layout
from mtraining_flex.models.common import Attention, Decoder, inner_attention
from mtraining_flex.models.init import full_shape_parameters
from mtraining_flex.models.llama3 import Llama3, Llama3Args, llama3_flavors
from mtraining_flex.models.qwen2 import Qwen2, Qwen2Args, qwen2_flavors
from mtraining_flex.models.rope import (
    RopeScaling,
    apply_rotary,
    rotary_table,
    shield,
    unshield,
)
from mtraining_flex.ring.simulate import run_ranks
from tests.helpers import assert_close, titan_args

FAR = (0, 1, 256, 257, 15962, 262143, 524287, 2**20 - 1)
HEAD_DIM, THETA = 64, 500000.0
SEED = 11


def _llama(**changes: Any) -> Llama3:
    args = dataclasses.replace(llama3_flavors["tiny"], attn_type="sdpa", **changes)
    model = Llama3(args)
    model.init_weights()
    return model


def _qwen(**changes: Any) -> Qwen2:
    args = dataclasses.replace(qwen2_flavors["tiny"], attn_type="sdpa", **changes)
    model = Qwen2(args)
    model.init_weights()
    return model


both_models = pytest.mark.parametrize("build", [_llama, _qwen])


def _tokens(batch: int = 2, seq_len: int = 48) -> Tensor:
    return torch.randint(4096, (batch, seq_len))


# ---- Rotary embeddings ---------------------------------------------------------------


def _table_by_hand(positions: tuple[int, ...], head_dim: int, theta: float) -> Tensor:
    """fp64 `[1, S, D // 2, 2]`, by Python's own floats."""
    turns = [theta ** (2 * i / head_dim) for i in range(head_dim // 2)]
    angles = [[p / turn for turn in turns] for p in positions]
    rows = [[(math.cos(a), math.sin(a)) for a in row] for row in angles]
    return torch.tensor(rows, dtype=torch.float64)[None]


def _largest_error(table: Tensor, expected: Tensor) -> float:
    assert table.shape == expected.shape
    return (table.double() - expected).abs().max().item()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_angles_are_exact(compiled: bool, dtype: torch.dtype) -> None:
    function: Callable[..., Tensor] = rotary_table
    if compiled:
        function = torch.compile(rotary_table, fullgraph=True, backend="aot_eager")
    table = function(torch.tensor([FAR], dtype=dtype), HEAD_DIM, THETA)
    assert table.dtype == torch.float32
    assert _largest_error(table, _table_by_hand(FAR, HEAD_DIM, THETA)) < 1e-6


class _Recorder(nn.Module):
    """In a layer's place: keeps the table that it was given."""

    def forward(self, x: Tensor, table: Tensor, *rest: Any) -> Tensor:
        self.table = unshield(table) * 1.0
        return x


@both_models
@pytest.mark.parametrize("compiled", [False, True])
def test_angles_survive_bf16(build: Callable[..., Decoder], compiled: bool) -> None:
    model = build(n_layers=1, rope_scaling=RopeScaling())
    recorder = model.layers["0"] = _Recorder()
    model.to(torch.bfloat16)
    function: Callable[..., Tensor] = model
    if compiled:
        function = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = function(_tokens(1, len(FAR)), positions=torch.tensor([FAR]))
    assert logits.dtype == torch.bfloat16
    expected = _table_by_hand(FAR, 16, model.model_args.rope_theta)
    assert recorder.table.dtype == torch.float32
    assert _largest_error(recorder.table, expected) < 1e-6


def test_llama_scaling_is_that_of_torchtitan() -> None:
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.llama3.model.model import precompute_freqs_cis

    scaling = RopeScaling("llama3", 32.0, 1024, 1.5, 5.0)
    table = rotary_table(torch.arange(128)[None], 128, THETA, scaling)
    titan = RoPEScalingArgs(32.0, 1.5, 5.0, 1024)
    theirs = torch.view_as_real(precompute_freqs_cis(128, 128, THETA, titan))
    assert _largest_error(table, theirs[None].double()) < 2e-5  # fp32 angles up to 128
    # All three bands exist: kept, blended, slowed.
    plain = rotary_table(torch.ones(1, 1, dtype=torch.int64), 128, THETA)
    angles = [t[0, 1 if t.shape[1] > 1 else 0, :, 1].asin() for t in (table, plain)]
    ratio = angles[0] / angles[1]
    assert ((ratio - 1).abs() < 1e-4).any() and ((ratio - 1 / 32).abs() < 1e-4).any()
    assert ((ratio < 0.9) & (ratio > 0.1)).any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_is_a_complex_product(interleaved: bool, dtype: torch.dtype) -> None:
    q = torch.randn(2, 8, 4, 16, dtype=torch.float64).to(dtype)
    k = torch.randn(2, 8, 2, 16, dtype=torch.float64).to(dtype)
    positions = torch.randint(2**20, (2, 8))
    table = rotary_table(positions, 16, THETA)
    turns = torch.view_as_complex(table.double())[:, :, None]
    for x, out in zip((q, k), apply_rotary(q, k, table, interleaved), strict=True):
        assert out.dtype == dtype
        pairs = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        expected = torch.complex(*(p.double() for p in pairs)) * turns
        got = (out[..., ::2], out[..., 1::2]) if interleaved else out.chunk(2, -1)
        rtol = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 3e-3}[dtype]
        assert_close(got[0], expected.real, rtol)
        assert_close(got[1], expected.imag, rtol)


@pytest.mark.parametrize(
    "positions", [torch.arange(4.0)[None], torch.arange(4), torch.ones(1, 4).bfloat16()]
)
def test_positions_must_be_integers_in_rows(positions: Tensor) -> None:
    with pytest.raises(ValueError, match="positions must be"):
        rotary_table(positions, 16, THETA)


# ---- Llama 3 -------------------------------------------------------------------------


def _backward(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(tokens)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None for g in gradients.values())
    return logits, gradients


def test_llama_equals_that_of_torchtitan() -> None:
    from torchtitan.models.llama3.model.model import Transformer

    ours = _llama(n_layers=3, max_seq_len=64)
    theirs = Transformer(titan_args(ours.model_args))
    torch.manual_seed(SEED)
    with torch.no_grad():
        theirs.init_weights()
    torch.manual_seed(SEED)
    ours.init_weights()
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)

    tokens = _tokens()
    logits, gradients = _backward(ours, tokens)
    expected_logits, expected_gradients = _backward(theirs, tokens)
    assert_close(logits, expected_logits, 1e-5)
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], 1e-5)


@both_models
def test_compiled_equals_eager(build: Callable[[], Decoder]) -> None:
    """A block in one graph, forward and backward, as `parallelize` compiles it."""
    model = build()
    block = model.layers["0"]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 32, 64)
    table = model.rotary_table(torch.arange(32)[None])
    out = {}
    for name, function in (("compiled", compiled), ("eager", block)):
        leaf = x.clone().requires_grad_()
        result = function(leaf, shield(table), None)
        (result * x.cos()).sum().backward()
        out[name] = (result, leaf.grad)
    for actual, expected in zip(out["compiled"], out["eager"], strict=True):
        assert_close(actual, expected, 1e-6)


# ---- Qwen2 ---------------------------------------------------------------------------


def _naive_qwen(w: dict[str, Tensor], a: Qwen2Args, tokens: Tensor, at: Tensor):
    """Qwen2 of one sequence, token by token and head by head: `[S]` to `[S, vocab]`."""
    dim, kv_heads = a.dim // a.n_heads, a.n_kv_heads
    assert kv_heads is not None

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def rotate(x: Tensor, position: float) -> Tensor:
        out = x.clone()
        for i in range(dim // 2):
            angle = position / a.rope_theta ** (2 * i / dim)
            c, s = math.cos(angle), math.sin(angle)
            out[i] = x[i] * c - x[i + dim // 2] * s
            out[i + dim // 2] = x[i + dim // 2] * c + x[i] * s
        return out

    h = w["tok_embeddings.weight"][tokens]
    for layer in range(a.n_layers):

        def p(name: str, layer: int = layer) -> Tensor:
            return w[f"layers.{layer}.{name}"]

        x = norm(h, p("attention_norm.weight"))
        q, k, v = (
            x @ p(f"attention.w{c}.weight").T + p(f"attention.w{c}.bias") for c in "qkv"
        )
        heads = []
        for head in range(a.n_heads):
            kv = head // (a.n_heads // kv_heads)
            own, shared = (slice(i * dim, (i + 1) * dim) for i in (head, kv))
            qh = torch.stack([rotate(q[t, own], float(at[t])) for t in range(len(at))])
            kh = torch.stack(
                [rotate(k[t, shared], float(at[t])) for t in range(len(at))]
            )
            rows = []
            for t in range(len(at)):
                seen = at <= at[t]
                weight = (kh[seen] @ qh[t] / math.sqrt(dim)).softmax(0)
                rows.append(weight @ v[seen][:, shared])
            heads.append(torch.stack(rows))
        h = h + torch.cat(heads, -1) @ p("attention.wo.weight").T
        x = norm(h, p("ffn_norm.weight"))
        gate, up = (x @ p(f"feed_forward.w{i}.weight").T for i in (1, 3))
        h = h + (gate * gate.sigmoid() * up) @ p("feed_forward.w2.weight").T
    return norm(h, w["norm.weight"]) @ w["output.weight"].T


class _CausalByPosition(nn.Module):
    """Dense attention masked by given positions `[B, S]`, in any order of tokens."""

    positions: Tensor

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, enable_gqa: bool
    ) -> Tensor:
        at = self.positions
        future = (at[:, :, None] < at[:, None, :])[:, None]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = (q @ k.mT * scale).masked_fill(future, -torch.inf)
        return logits.softmax(-1) @ v


def _with_masks_by_position(model: Decoder) -> Callable[[Tensor, Tensor], Tensor]:
    inner = _CausalByPosition()
    for layer in model.layers.values():
        layer.attention.inner_attention = inner

    def call(tokens: Tensor, positions: Tensor) -> Tensor:
        inner.positions = positions
        return model(tokens, positions=positions)

    return call


def _randomize(model: nn.Module) -> None:
    """Biases and gains away from 0 and 1, where a missing one would not show."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.5)


@pytest.mark.parametrize("tied", [False, True])
def test_qwen_equals_a_naive_one(tied: bool) -> None:
    model = _qwen(enable_weight_tying=tied).double()
    _randomize(model)
    # A shard of a long sequence, different in each row, and not in order.
    positions = torch.stack([torch.randperm(5000)[:12] * 7 for _ in range(2)])
    tokens = _tokens(2, 12)
    logits = _with_masks_by_position(model)(tokens, positions)
    state = {name: t.detach() for name, t in model.state_dict().items()}
    for b in range(2):
        expected = _naive_qwen(state, model.model_args, tokens[b], positions[b])
        assert_close(logits[b], expected, 1e-6)


def test_order_of_tokens_does_not_matter() -> None:
    for build in (_llama, _qwen):
        model = build().double()
        _randomize(model)
        call = _with_masks_by_position(model)
        tokens, positions = _tokens(), torch.arange(48).expand(2, -1)
        order = torch.stack([torch.randperm(48) for _ in range(2)])
        logits = call(tokens, positions)
        assert_close(logits, model(tokens), 1e-9)
        moved = call(tokens.gather(1, order), positions.gather(1, order))
        expected = logits.gather(1, order[..., None].expand_as(logits))
        assert_close(moved, expected, 1e-9)


@pytest.mark.parametrize("name", ["wq", "wk", "wv"])
def test_every_bias_is_used(name: str) -> None:
    model, tokens = _qwen().double(), _tokens()
    before = model(tokens)
    bias = getattr(model.layers["1"].attention, name).bias
    assert torch.equal(bias, torch.zeros_like(bias)), "biases start at 0"
    with torch.no_grad():
        # A common shift of all keys after rotation would cancel in the softmax; one
        # before it does not.
        bias.add_(torch.randn_like(bias))
    assert (model(tokens) - before).abs().max() > 1e-4
    assert model.layers["1"].attention.wo.bias is None


def test_tie_holds() -> None:
    args = dataclasses.replace(qwen2_flavors["tiny_tied"], attn_type="sdpa")
    with torch.device("meta"):
        model = Qwen2(args)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)

    def tied() -> bool:
        return model.output.weight is model.tok_embeddings.weight

    assert tied()
    assert "output.weight" not in dict(model.named_parameters())
    std = args.dim**-0.5
    # Truncated at 3 deviations, a normal variable loses 1.4% of its deviation.
    assert abs(model.output.weight.std().item() / std - 0.986) < 0.01
    before = model.output.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = _tokens()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    assert tied() and not torch.equal(model.output.weight, before)
    model.to(torch.bfloat16)
    assert tied()


# ---- Around the models ---------------------------------------------------------------


@both_models
def test_masks_and_misfit_positions_are_refused(build: Callable[[], Decoder]) -> None:
    model, tokens = build(), _tokens(2, 8)
    with pytest.raises(ValueError, match="attention_masks must be None"):
        model(tokens, attention_masks=torch.ones(8, 8))
    for shape in ((1, 1), (1, 7), (3, 8), (2, 1)):
        with pytest.raises(ValueError, match="do not fit tokens"):
            model(tokens, positions=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("model_class", "args"),
    [(Llama3, llama3_flavors["tiny"]), (Qwen2, qwen2_flavors["tiny"])],
)
def test_a_ring_needs_positions(model_class: Any, args: Any) -> None:
    """Ranks that each count from 0 would train smoothly."""
    model, tokens = model_class(args), _tokens(1, 32)
    for cp_size in (1, 2):
        layout = build_layout("striped", 32 * cp_size, cp_size, 16)

        def rank(comm: Any, layout: Layout = layout) -> None:
            for layer in model.layers.values():
                config = SparseConfig(granularity=16, probe_rows=8)
                layer.attention.inner_attention.configure(
                    config, Ring(), [layout], comm
                )
            model(tokens)

        if cp_size == 1:
            run_ranks(1, rank)
            continue
        with pytest.raises(ValueError, match="positions must be given.*2 ranks"):
            run_ranks(2, rank)


@both_models
def test_positions_default_to_a_whole_sequence(build: Callable[[], Decoder]) -> None:
    model, tokens = build(), _tokens()
    expected = model(tokens, positions=torch.arange(48)[None].int())
    assert torch.equal(model(tokens), expected)
    stretched = model(tokens, positions=torch.arange(48)[None] * 2)
    assert not torch.equal(stretched, expected)
    assert not list(model.buffers())


def test_inner_attention() -> None:
    for model in (Llama3(llama3_flavors["tiny"]), Qwen2(qwen2_flavors["tiny"])):
        for number, layer in enumerate(model.layers.values()):
            assert isinstance(layer.attention, Attention)
            inner = layer.attention.inner_attention
            assert isinstance(inner, SparseAttention) and int(inner.layer) == number
    with pytest.raises(ValueError, match="'flex'"):
        inner_attention(0, Llama3Args(attn_type="flex"))


@pytest.mark.parametrize(
    "args", [*llama3_flavors.values(), *qwen2_flavors.values()], ids=str
)
def test_args_are_json(args: Llama3Args | Qwen2Args) -> None:
    again = json.loads(json.dumps(dataclasses.asdict(args)))
    assert again["attn_type"] == "sparse" and again["dim"] == args.dim


def test_rope_comes_from_the_run(caplog: pytest.LogCaptureFixture) -> None:
    from torchtitan.config import ConfigManager

    flags = ["rope.scaling=yarn", "rope.factor=16", "rope.original_length=32768"]
    module = "job.custom_config_module=mtraining_flex.config"
    for flavor in (llama3_flavors["tiny"], qwen2_flavors["3B"]):
        for seq_len, given, warned in (
            (1 << 19, flags, False),
            ((1 << 19) + 1, flags, True),
            ((1 << 17) + 1, [], True),
            (1 << 15, [], False),
        ):
            length = f"training.seq_len={seq_len}"
            every = [f"--{flag}" for flag in (module, length, *given)]
            args = copy.deepcopy(flavor)
            caplog.clear()
            args.update_from_config(ConfigManager().parse_args(every))
            assert ("rotary angles" in caplog.text) == warned, (seq_len, given)
            if given:
                assert args.rope_scaling == RopeScaling("yarn", 16.0, 32768)
            else:
                assert args.rope_scaling == flavor.rope_scaling


def test_flops_are_those_of_the_matmuls() -> None:
    """Counted by torch on forward and backward of dense models, tied and not."""
    from torch.utils.flop_counter import FlopCounterMode

    for model in (_llama(), _qwen(), _qwen(enable_weight_tying=True)):
        args = model.model_args
        nparams, flops = args.get_nparams_and_flops(model, 64)
        assert nparams == sum(p.numel() for p in model.parameters())
        vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
        inner = _CausalByPosition()
        inner.positions = torch.arange(64)[None]
        for layer in model.layers.values():
            layer.attention.inner_attention = inner
        with FlopCounterMode(display=False) as counter:
            model(_tokens(1, 64)).sum().backward()
        square = args.attention_flops_per_token(64) * 2 * 64 // 65  # masked pairs too
        counted = counter.get_total_flops() / 64
        assert counted == flops - 6 * vectors + square


# ---- Initial weights on several ranks ------------------------------------------------


class _Odd(nn.Module):
    """Sizes that no number of ranks divides, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight


def _draw(module: _Odd) -> None:
    with full_shape_parameters(module):
        assert module.first.weight is module.second.weight
        for p in module.parameters():
            assert not isinstance(p, DTensor)
            nn.init.normal_(p)


def _seeded(model: Decoder) -> Decoder:
    model.to_empty(device="cpu")
    torch.manual_seed(SEED)
    model.init_weights()
    return model


def _meta_models() -> dict[str, Decoder]:
    def sdpa(args: Any) -> Any:
        return dataclasses.replace(args, attn_type="sdpa")

    with torch.device("meta"):
        return {
            "llama": Llama3(sdpa(llama3_flavors["tiny"])),
            "qwen": Qwen2(sdpa(qwen2_flavors["tiny"])),
            "tied": Qwen2(sdpa(qwen2_flavors["tiny_tied"])),
        }


def _wrap(model: Decoder, mesh: Any, compiled: bool) -> None:
    """Checkpointing, compile and FSDP2, in the order of `parallelize`."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for name, layer in list(model.layers.items()):
        layer = checkpoint_wrapper(layer)
        if compiled:
            layer = torch.compile(layer)
        model.layers.register_module(name, layer)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    ends = [model.tok_embeddings, model.norm, model.output]
    fully_shard(ends, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _check_on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    expected = torch.load(f"{folder}/expected.pt")
    mesh = init_device_mesh("cpu", (2,))
    for label, model in _meta_models().items():
        _wrap(model, mesh, compiled=label == "qwen")
        _seeded(model)
        after = torch.rand(1)
        state = expected[label]
        assert torch.equal(after, state.pop("after")), "the generator went on equally"
        assert label != "tied" or model.output.weight is model.tok_embeddings.weight
        parameters = list(model.named_parameters(remove_duplicate=False))
        assert {_clean(name) for name, _ in parameters} == set(state)
        for name, p in parameters:
            assert isinstance(p, DTensor)
            assert torch.equal(p.full_tensor(), state[_clean(name)]), name
        if label != "qwen":  # which would have to compile
            _check_forward(model, state)
    odd = _Odd()
    fully_shard(odd, mesh=mesh)
    before = dict(odd.named_parameters())
    torch.manual_seed(SEED)
    _draw(odd)
    for name, p in odd.named_parameters():
        assert p is before[name]
        assert torch.equal(p.full_tensor(), expected["odd"][name])
    assert odd.first.weight is odd.second.weight
    dist.destroy_process_group()
    cpu_device.leave()


def _check_forward(model: Decoder, state: dict[str, Tensor]) -> None:
    """FSDP2 runs on the weights that were set, and does not round the table."""
    seen = []
    layer = model.layers["1"].attention
    layer.register_forward_pre_hook(lambda module, args: seen.append(args))
    tokens = torch.arange(len(FAR))[None]
    positions = torch.tensor([FAR])
    logits = model(tokens, positions=positions)
    x, table, *_ = seen[0]
    assert x.dtype == torch.bfloat16
    assert torch.equal(unshield(table), model.rotary_table(positions))
    plain = type(model)(model.model_args)
    plain.load_state_dict(state)
    assert_close(logits, plain(tokens, positions=positions), 0.02)


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """Two ranks with FSDP2 draw what one process draws, bit for bit."""
    expected: dict[str, dict[str, Tensor]] = {}
    for label, model in _meta_models().items():
        _seeded(model)
        after = torch.rand(1)
        expected[label] = {**model.state_dict(), "after": after}
    odd = _Odd()
    torch.manual_seed(SEED)
    _draw(odd)
    expected["odd"] = dict(odd.named_parameters())
    torch.save(expected, tmp_path / "expected.pt")
    torch.multiprocessing.spawn(_check_on_rank, (str(tmp_path),), nprocs=2)


def test_an_error_leaves_parameters_alone() -> None:
    """One rank is enough for DTensors; a failing body must not leave replacements."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        odd = _Odd()
        fully_shard(odd, mesh=init_device_mesh("cpu", (1,)))
        before = list(odd.named_parameters())
        values = [p.full_tensor().clone() for _, p in before]
        with pytest.raises(KeyError), full_shape_parameters(odd):
            nn.init.zeros_(odd.first.weight)
            raise KeyError
        for (_, p), (_, q), value in zip(
            before, odd.named_parameters(), values, strict=True
        ):
            assert p is q and torch.equal(q.full_tensor(), value)
        # What the body forgets is seen.
        with full_shape_parameters(odd):
            nn.init.zeros_(odd.first.weight)
        assert odd.first.bias.full_tensor().isnan().all()
        assert not odd.first.weight.full_tensor().any()
    finally:
        dist.destroy_process_group()


def test_layers_start_differently() -> None:
    for model in (_llama(), _qwen()):
        weights = [p for p in model.parameters() if p.ndim == 2]
        for p, q in itertools.combinations(weights, 2):
            assert p.shape != q.shape or not torch.equal(p, q)
