"""Each kernel once at small sizes, for `compute-sanitizer` on a GPU.

compute-sanitizer --tool memcheck python -m tests.kernels.sanitize
compute-sanitizer --tool racecheck python -m tests.kernels.sanitize
"""

import torch

from kernels_triton import block_sparse, merge, probe, vertical_slash
from kernels_triton.naive import BlockLists
from tests.kernels.test_vertical_slash import CASES, DEVICE, Case, make


def vertical_slashes() -> None:
    cases = [*CASES, Case(1, 4, 2, 3, 80, 128, NC=128, documents=True)]
    for case in cases:
        dtypes = [torch.bfloat16]
        if case.g == 128:
            dtypes += [torch.float16, torch.float32]
        for dtype in dtypes:
            make(case, dtype).run(vertical_slash, case)


def others(dim: int) -> None:
    """All kernels but those, in bf16 at a head dim; `block_sparse` with documents."""
    q, k, v, dout = (
        torch.randn(1, h, 384, dim, device=DEVICE).bfloat16() for h in (4, 2, 2, 4)
    )
    eye = torch.eye(3, dtype=torch.bool, device=DEVICE)
    some = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 0, 0]], device=DEVICE).bool()
    lists = BlockLists(*_lists(eye), *_lists(some), *_lists(eye.T), *_lists(some.T))
    doc = (torch.arange(384, device=DEVICE)[None] // 100).int()
    for docs in ({}, {"q_doc": doc, "k_doc": doc}):
        call = {"scale": 0.1, "granularity": 128, **docs}
        out, lse = block_sparse.block_sparse_forward(q, k, v, lists, **call)
        delta = vertical_slash.delta(out, dout)
        rows = (lse, delta)
        block_sparse.block_sparse_backward(dout, q, k, v, *rows, lists, **call)
    merge.merge(out, lse, out, lse)
    blocks = torch.arange(3, device=DEVICE)
    where = {"first_q": 320, "scale": 0.1, "granularity": 128}
    probe.probe_row_stats(q[:, :, -64:], k, blocks, **where)
    probe.probe_scores(q[:, :, -64:], k, lse[:, :, -64:], blocks, seq_len=384, **where)


def _lists(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of a map of blocks `[N, M]`, for all heads."""
    num = kept.sum(1).int()
    idx = (~kept).int().argsort(dim=1, stable=True).int()
    return num[None, None].contiguous(), idx[None, None].contiguous()


if __name__ == "__main__":
    vertical_slashes()
    for dim in (80, 128):
        others(dim)
    torch.cuda.synchronize()
    print("ok")
