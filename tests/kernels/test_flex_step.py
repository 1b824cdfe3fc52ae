"""The compiled steps on a GPU, and their graphs without one.

CPU: the traced graphs, run uncompiled, equal eager math on every pair of ranks; a graph
traced once must not take one argument for another. GPU: out, dq, dk, dv of `flex` and
`flash` against fp32, no compile after warm-up, memory flat, halves of different
backends merge.
"""

import pytest
import torch

from mtraining_flex import compat
from mtraining_flex.attention import sparse_attention
from mtraining_flex.block_mask import MASKS, StepMask, slash_step, vertical_step
from mtraining_flex.config import Ring, SparseAttention
from mtraining_flex.layout import build_layout
from mtraining_flex.pattern import find_pattern, pack_pattern
from mtraining_flex.pattern.types import dense_pattern, slash_bitmap
from mtraining_flex.ring import flex_step, ops
from mtraining_flex.ring.backends import resolve_backend
from mtraining_flex.ring.merge import merge
from mtraining_flex.ring.simulate import LockedStep, run_ranks
from mtraining_flex.ring.step import EagerStep, Part, get_step

PATTERN = ([[[0, 2], [0, 1, 3], [0], [0, 1, 2, 3]]], [[[5, 200], [0], [], [1, 2, 3]]])


@pytest.fixture
def uncompiled(monkeypatch):
    """Run the traced graphs as they are: without tables, so with the whole truth."""
    whole = property(lambda mask: (MASKS[mask.kind], mask.buffers))
    monkeypatch.setattr(StepMask, "kernel_mask", whole)
    monkeypatch.setattr(compat, "_CACHE", {})
    monkeypatch.setattr(compat, "compile_graph", compat.trace_graph)


@pytest.mark.parametrize("layout_name", ["striped", "zigzag"])
def test_one_graph_serves_every_pair_of_ranks(uncompiled, layout_name):
    torch.manual_seed(0)
    pattern = pack_pattern(*PATTERN)
    layout = build_layout(layout_name, 512, 2, 128)
    bitmap = slash_bitmap(pattern, 4)
    eager = EagerStep()
    for q_rank, kv_rank in ((0, 0), (1, 0), (0, 1), (1, 1)):
        masks = [
            slash_step(pattern, bitmap, layout, q_rank, kv_rank, (1, 4)),
            vertical_step(pattern, bitmap, layout, q_rank, (1, 4)),
        ]
        for mask, kv_heads in zip(masks, (2, 4), strict=True):
            q, dout = torch.randn(2, 1, 4, 256, 16)
            k, v = torch.randn(2, 1, kv_heads, mask.kv_len, 16)
            part = Part(k, v, mask)
            out, lse = eager.forward(q, part, 0.25)
            got_out, got_lse = flex_step._forward("TRITON", q, k, v, mask, 0.25)
            torch.testing.assert_close(got_out, out, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                got_lse * flex_step.LSE_UNIT["TRITON"],
                lse.float(),
                atol=1e-5,
                rtol=1e-5,
            )
            args = (q, k, v, out)
            got = flex_step._backward(
                "TRITON", dout, *args, lse / flex_step.LSE_UNIT["TRITON"], mask, 0.25
            )
            done = eager.finish(dout, out, lse)
            want = eager.backward(q, part, done, 0.25)
            for a, b in zip(got, (want.dq, *want.dkv), strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert len(compat._CACHE) == 4


@pytest.mark.parametrize("layout_name", ["striped", "contiguous", "zigzag"])
def test_kernel_mask_and_tables_are_the_truth(layout_name):
    """Full blocks whole, partial blocks under the kernel's mask, nothing else."""
    g, size = 8, 2
    slashes = [[[0, 2, 3], [0], [1, 5], list(range(8))]]
    pattern = pack_pattern(slashes, [[[5, 20], [0], [], [1, 60]]])
    layout = build_layout(layout_name, 64, size, g)
    bitmap = slash_bitmap(pattern, 8)
    index = [torch.arange(n) for n in (1, 4, 32)]
    b, h, q = index[0][:, None, None, None], index[1][:, None, None], index[2][:, None]
    for q_rank in range(size):
        masks = [
            slash_step(pattern, bitmap, layout, q_rank, kv_rank, (1, 4))
            for kv_rank in range(size)
        ] + [vertical_step(pattern, bitmap, layout, q_rank, (1, 4))]
        for mask in masks:
            kv, tables = torch.arange(mask.kv_len), mask.tables
            kernel_mask, buffers = mask.kernel_mask
            blocks = torch.zeros(2, 1, 4, 4, mask.kv_len // g, dtype=torch.bool)
            for kind, (num, idx) in enumerate(
                (
                    (tables.kv_num, tables.kv_idx),
                    (tables.full_kv_num, tables.full_kv_idx),
                )
            ):
                valid = torch.arange(idx.shape[-1]) < num[..., None]
                for place in valid.nonzero().tolist():
                    row = tuple(place[:3])
                    blocks[(kind, *row, int(idx[tuple(place)]))] = True
            partial, full = blocks.repeat_interleave(g, 3).repeat_interleave(g, 4)
            executed = full | (partial & kernel_mask(b, h, q, kv, *buffers))
            assert torch.equal(executed, mask.mask_mod(b, h, q, kv))


def test_wrong_lse_unit_is_refused(uncompiled, monkeypatch):
    monkeypatch.setitem(flex_step.LSE_UNIT, "TRITON", 1.0)
    flex_step.check_lse_unit.cache_clear()
    with pytest.raises(RuntimeError, match="expected unit"):
        flex_step.check_lse_unit("TRITON", torch.device("cpu"), torch.float32, 16)
    flex_step.check_lse_unit.cache_clear()


def test_b30_triton_gets_rows_that_int32_can_count():
    """K as a view of fused QKV at 512K tokens is copied, a model's own is not."""
    seq_len, dim = 524288, 128
    fused = torch.empty(1, seq_len, 48, dim, device="meta").transpose(1, 2)
    own = torch.empty(1, seq_len, 8, dim, device="meta").transpose(1, 2)
    copied, kept = flex_step._addressable("TRITON", fused[:, 32:40], own)
    assert kept is own
    assert copied.stride() == (8 * seq_len * dim, seq_len * dim, dim, 1)
    (as_it_is,) = flex_step._addressable("FLASH", fused[:, 32:40])
    assert as_it_is.stride(2) == 48 * dim
    # 2^31 elements: heads are counted in int64, rows still are not.
    q = torch.empty(1, 2 * seq_len, 32, dim, device="meta").transpose(1, 2)
    assert flex_step._addressable("TRITON", q)[0].stride(2) == dim
    assert flex_step._addressable("TRITON", q[:, :, :seq_len])[0].stride(2) == 32 * dim


@pytest.mark.parametrize("kernels", ["TRITON", "FLASH"])
def test_an_expanded_gradient_is_written_out(kernels):
    """That of `out.sum()` is one number for all elements."""
    expanded = torch.ones(()).expand(1, 2, 256, 64)
    rows = torch.ones(1, 2, 64, 256).mT
    for x in flex_step._addressable(kernels, expanded, rows):
        assert x.is_contiguous()


# --- on a GPU -------------------------------------------------------------------------


def gpu_backend(name):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    try:
        resolve_backend(name, "cuda", 128, torch.bfloat16, 64)
    except ValueError as error:
        pytest.skip(str(error))
    return name


def fp32_rows(q, k, v, dout, pattern, granularity=128):
    """out, dq, dk, dv in fp32, head by head and in chunks of rows, exact masks."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    seq_len = q.shape[2]
    out, dq = (
        torch.zeros_like(q, dtype=torch.float32),
        torch.zeros_like(q, dtype=torch.float32),
    )
    dk, dv = (torch.zeros_like(k, dtype=torch.float32) for _ in range(2))
    bitmap = slash_bitmap(pattern, seq_len // granularity)
    positions = torch.arange(seq_len, device=q.device)
    for b in range(q.shape[0]):
        for h in range(heads):
            pattern_head = (min(b, bitmap.shape[0] - 1), min(h, bitmap.shape[1] - 1))
            kept = bitmap[pattern_head]
            column = torch.zeros(seq_len, dtype=torch.bool, device=q.device)
            count = pattern.num_vertical[pattern_head]
            column[pattern.vertical[pattern_head][:count].long()] = True
            kh, vh = k[b, h // group].float(), v[b, h // group].float()
            for rows in positions.split(4096):
                offset = rows[:, None] // granularity - positions // granularity
                mask = kept[offset + seq_len // granularity] | column
                mask &= positions <= rows[:, None]
                s = (q[b, h, rows].float() @ kh.T) * q.shape[-1] ** -0.5
                p = s.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
                do = dout[b, h, rows].float()
                o = p @ vh
                ds = p * (do @ vh.T - (do * o).sum(-1, keepdim=True))
                ds *= q.shape[-1] ** -0.5
                out[b, h, rows], dq[b, h, rows] = o, ds @ kh
                dk[b, h // group] += ds.T @ q[b, h, rows].float()
                dv[b, h // group] += p.T @ do
    return out, dq, dk, dv


def strided(batch, heads, seq_len, dim, seed):
    """[B, H, S, D] as a model has it: a transposed view."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, seq_len, heads, dim)
    x = torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
    return x.transpose(1, 2)


def sparse_case(heads, kv_heads, seq_len, dim, batch=1):
    q, k, dout = (
        strided(batch, h, seq_len, dim, i)
        for i, h in enumerate((heads, kv_heads, heads))
    )
    v = 1 + strided(batch, kv_heads, seq_len, dim, 3)  # a signal of order one
    blocks = seq_len // 128
    generator = torch.Generator().manual_seed(7)
    slashes = [
        [0] + (torch.randperm(blocks, generator=generator)[: 1 + i % 9]).tolist()
        for i in range(batch * heads)
    ]
    slashes[1] = [0]
    slashes[-1] = list(range(blocks))  # one head is dense
    columns = [
        torch.randperm(seq_len, generator=generator)[: (i * 37) % 300].tolist()
        for i in range(batch * heads)
    ]

    def split(x):
        return [x[i * heads : (i + 1) * heads] for i in range(batch)]

    pattern = pack_pattern(split(slashes), split(columns), max_vertical=300)
    return q, k, v, dout, pattern.to("cuda")


def close(name, actual, expected, plain):
    """At most twice the error of plain bf16 attention, and zeros fail."""
    assert torch.isfinite(actual).all(), name
    norm = expected.norm()
    error = ((actual.float() - expected).norm() / norm).item()
    bound = 2 * plain
    assert error <= bound < 0.5, f"{name}: error {error:.2e}, bound {bound:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "flash", "triton"])
@pytest.mark.parametrize(
    "heads,kv_heads,dim,seq_len,batch",
    [
        (16, 2, 128, 8192, 1),
        (16, 2, 64, 8192, 2),
        (32, 8, 128, 8192, 1),
        (32, 8, 64, 8192, 1),
        (16, 2, 128, 32768, 1),
    ],
)
def test_against_fp32(backend, heads, kv_heads, dim, seq_len, batch):
    gpu_backend(backend)
    q, k, v, dout, pattern = sparse_case(heads, kv_heads, seq_len, dim, batch)
    expected = fp32_rows(q, k, v, dout, pattern)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sparse_attention(*leaves, pattern, backend=backend)
    got = (out, *torch.autograd.grad(out, leaves, dout))
    # bf16 attention's own error on this data: eager math in bf16-rounded p, ds.
    plain = bf16_error(q, k, v, dout)
    for name, a, b, p in zip(
        ("out", "dq", "dk", "dv"), got, expected, plain, strict=True
    ):
        close(name, a.detach(), b, p)


def bf16_error(q, k, v, dout):
    """Relative errors of torch's own bf16 SDPA on the first 2048 tokens."""
    q, k, v, dout = (x[:1, :, :2048] for x in (q, k, v, dout))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=True
        )
        grads = torch.autograd.grad(out, leaves, dout.to(dtype))
        results.append([x.float() for x in (out.detach(), *grads)])
    return [((b - a).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "flash", "triton"])
@pytest.mark.parametrize("layout_name", ["striped", "zigzag", "contiguous"])
@pytest.mark.parametrize("rotation", ["ring", "two_level"])
def test_simulated_ring(backend, layout_name, rotation, monkeypatch):
    """Four ranks on one GPU give what one rank gives."""
    gpu_backend(backend)
    monkeypatch.setattr(ops, "get_step", lambda name: LockedStep(get_step(name)))
    q, k, v, dout, pattern = sparse_case(16, 2, 8192, 128)
    expected = fp32_rows(q, k, v, dout, pattern)
    plain = bf16_error(q, k, v, dout)
    layout = build_layout(layout_name, 8192, 4, 128)
    inner_degree = 2 if rotation == "two_level" else 0
    transport = Ring(rotation=rotation, inner_degree=inner_degree).transport

    def rank(comm):
        # The operators, from this rank's thread: autograd runs CUDA backwards on one
        # thread, where ranks would wait for each other forever.
        index = layout.positions(comm.rank).cuda()
        q_r, k_r, v_r, dout_r = (x[:, :, index] for x in (q, k, v, dout))
        ring = (comm.name, layout_name, 128, *transport, backend, 128**-0.5)
        layer = torch.tensor(0)
        found = pattern.tensors()
        out, lse = ops.ring_attention(q_r, k_r, v_r, *found, layer, *ring)
        grads = ops.ring_attention_backward(
            dout_r, q_r, k_r, v_r, out, lse, *found, layer, *ring
        )
        torch.cuda.synchronize()
        return index, (out, *grads)

    got = [torch.empty_like(x) for x in expected]
    for index, parts in run_ranks(4, rank):
        for whole, part in zip(got, parts, strict=True):
            whole[:, :, index] = part.float()
    names = ("out", "dq", "dk", "dv")
    for name, a, b, p in zip(names, got, expected, plain, strict=True):
        close(name, a, b, p)


@pytest.mark.gpu
def test_halves_of_two_backends_merge():
    """Keys of rank 0 by FLASH, of rank 1 by Triton: lse units agree."""
    gpu_backend("flash")
    q, k, v, dout, pattern = sparse_case(16, 2, 8192, 128)
    layout = build_layout("striped", 8192, 2, 128)
    bitmap = slash_bitmap(pattern, 64)
    steps = [flex_step.FlexStep("flash"), flex_step.FlexStep("flex")]
    parts = []
    rows = layout.positions(1).cuda()
    for source, step in enumerate(steps):
        mask = slash_step(pattern, bitmap, layout, 1, source, (1, 16))
        keys = layout.positions(source).cuda()
        part = Part(k[:, :, keys], v[:, :, keys], mask)
        parts.append(step.forward(q[:, :, rows], part, 128**-0.5))
    out, _ = merge(*parts[0], *parts[1])
    only = pack_pattern(
        [[[x for x in h if x < 2**30] for h in b] for b in pattern.slash.tolist()],
        [[[] for _ in b] for b in pattern.slash.tolist()],
    ).to("cuda")
    expected = fp32_rows(q, k, v, dout, only)[0][:, :, rows]
    close("out", out, expected, bf16_error(q, k, v, dout)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "flash", "triton"])
def test_new_patterns_neither_compile_nor_leak(backend):
    gpu_backend(backend)
    q, k, v, dout, _ = sparse_case(16, 2, 8192, 128)
    config = SparseAttention(max_vertical=256, max_slash=16)
    compiled, reserved = [], []
    for step in range(50):
        torch.manual_seed(step)
        noise = torch.randn_like(q)
        pattern = find_pattern(q + noise, k, config)
        leaves = [x.detach().requires_grad_() for x in (q + noise, k, v)]
        out = sparse_attention(*leaves, pattern, backend=backend)
        torch.autograd.grad(out, leaves, dout)
        compiled.append(compat.num_compiled())
        reserved.append(torch.cuda.memory_reserved())
    assert compiled[1] == compiled[-1]
    assert reserved[5] == reserved[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "flash", "triton"])
def test_a_step_has_no_host_synchronisation(backend):
    gpu_backend(backend)
    q, k, v, dout, _ = sparse_case(16, 2, 8192, 128)
    config = SparseAttention(max_vertical=256, max_slash=16)

    def step():
        pattern = find_pattern(q, k, config)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = sparse_attention(*leaves, pattern, backend=backend)
        torch.autograd.grad(out, leaves, dout)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_deterministic_setting_is_bitwise():
    """Search, forward and backward twice, under torch's deterministic algorithms."""
    gpu_backend("flex")
    q, k, v, dout, _ = sparse_case(16, 2, 8192, 128)
    config = SparseAttention(max_vertical=256, max_slash=16)
    torch.use_deterministic_algorithms(True)
    try:
        assert resolve_backend("auto", "cuda", 128, torch.bfloat16, 128)[0] == "triton"
        runs = []
        for _ in range(3):
            pattern = find_pattern(q, k, config)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = sparse_attention(*leaves, pattern)
            runs.append((out, *torch.autograd.grad(out, leaves, dout)))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_search_on_gpu_is_the_same_on_four_ranks():
    """Bit for bit, in each layout, with the Triton probe."""
    gpu_backend("flex")
    q, k, *_ = sparse_case(16, 2, 8192, 128)
    config = SparseAttention(max_vertical=256, max_slash=16)
    alone = find_pattern(q, k, config)
    for name in ("striped", "zigzag", "contiguous"):
        layout = build_layout(name, 8192, 4, 128)

        def rank(comm, layout=layout):
            index = layout.positions(comm.rank).cuda()
            found = find_pattern(
                q[:, :, index], k[:, :, index], config, layout=layout, group=comm
            )
            torch.cuda.synchronize()
            return found

        for found in run_ranks(4, rank):
            for a, b in zip(found.tensors(), alone.tensors(), strict=True):
                assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "flash", "triton"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_b27_all_blocks_are_dense_attention(backend, dim):
    """Every head_dim, gradients against dense, where all blocks are kept."""
    gpu_backend(backend)
    q, k, dout = (strided(1, h, 1024, dim, i) for i, h in enumerate((16, 2, 16)))
    v = 1 + strided(1, 2, 1024, dim, 3)
    pattern = dense_pattern(8, q.device)
    expected = fp32_rows(q, k, v, dout, pattern)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sparse_attention(*leaves, pattern, backend=backend)
    got = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    plain = bf16_error(q, k, v, dout)
    names = ("out", "dq", "dk", "dv")
    for name, a, b, p in zip(names, got, expected, plain, strict=True):
        close(name, a, b, p)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "flash", "triton"])
def test_b30_views_of_fused_qkv_beyond_int32(backend):
    """512K tokens, 32 heads: offsets beyond 2^31 in q, k, v and out."""
    gpu_backend(backend)
    seq_len, heads, kv_heads, dim = 524288, 32, 8, 128
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.empty(
        1, seq_len, heads + 2 * kv_heads, dim, device="cuda", dtype=torch.bfloat16
    ).normal_(generator=generator)
    assert fused.numel() > 2**31
    q, k, v = fused.transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
    dout = torch.empty_like(q).normal_(generator=generator)
    columns = [5, 70000, 400000]
    pattern = pack_pattern([[[0, 1, 2000]] * heads], [[columns] * heads]).to("cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = sparse_attention(*leaves, pattern, backend=backend)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    last = torch.arange(seq_len - 128, seq_len, device="cuda")
    for rows in (torch.arange(64, device="cuda"), last):
        block = int(rows[0]) // 128
        keys = [128 * (block - d) + i for d in (2000, 1, 0) for i in range(128)]
        keys = sorted({*columns, *keys})
        keys = torch.tensor([x for x in keys if 0 <= x], device="cuda")
        for h in (0, heads - 1):
            k_h, v_h = (x[0, h // 4, keys].float() for x in (k, v))
            x = (q[0, h, rows].float() @ k_h.T) * dim**-0.5
            p = x.masked_fill(keys > rows[:, None], -torch.inf).softmax(-1)
            do = dout[0, h, rows].float()
            o = p @ v_h
            ds = p * (do @ v_h.T - (do * o).sum(-1, keepdim=True)) * dim**-0.5
            assert relative(out[0, h, rows], o) < 1e-2
            assert relative(dq[0, h, rows], ds @ k_h) < 1e-2
    # The last block's keys are seen by its own queries alone.
    dk_own = dv_own = 0.0
    for h in range(heads - 4, heads):
        k_all, v_all = (x[0, -1, keys].float() for x in (k, v))
        x = (q[0, h, last].float() @ k_all.T) * dim**-0.5
        p = x.masked_fill(keys > last[:, None], -torch.inf).softmax(-1)
        do = dout[0, h, last].float()
        delta = (do * (p @ v_all)).sum(-1, keepdim=True)
        ds = p * (do @ v_all.T - delta) * dim**-0.5
        dk_own = dk_own + (ds.T @ q[0, h, last].float())[-128:]
        dv_own = dv_own + (p.T @ do)[-128:]
    assert relative(dk[0, -1, last], dk_own) < 1e-2
    assert relative(dv[0, -1, last], dv_own) < 1e-2


def relative(actual, expected):
    assert expected.norm() > 0
    return ((actual.float() - expected).norm() / expected.norm()).item()
