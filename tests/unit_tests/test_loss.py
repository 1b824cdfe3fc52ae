"""Cross-entropy in chunks against all logits at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mtraining_flex.config import Loss
from mtraining_flex.loss import (
    chunked_cross_entropy,
    loss_of_chunk,
    naive_cross_entropy,
)
from mtraining_flex.models.llama3 import Llama3, llama3_flavors
from mtraining_flex.models.qwen2 import Qwen2, qwen2_flavors
from tests.helpers import assert_close

TOKENS, DIM, VOCAB = 53, 24, 101
CHUNKS = [1, 7, 16, 52, 53, 54, 4096]


def _case(dtype: torch.dtype, ignored: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, DIM, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (1, TOKENS), generator=generator)
    out = torch.rand(1, TOKENS, generator=generator) < ignored
    return (
        x.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        labels.masked_fill(out, -100),
    )


def _results(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss / 17, leaves)]


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
)
def test_equals_all_at_once(dtype: torch.dtype, rtol: float, chunk_size: int) -> None:
    x, weight, labels = _case(dtype)
    result = chunked_cross_entropy(x, weight, labels, chunk_size)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = naive_cross_entropy(*wide, labels)
    assert result.dtype == torch.promote_types(dtype, torch.float32)
    actual = _results(result, x, weight)
    assert [t.dtype for t in actual[1:]] == [dtype, dtype]
    for a, b in zip(actual, _results(expected, *wide), strict=True):
        assert_close(a.double(), b, rtol)


def test_autocast() -> None:
    """As a single GPU trains: fp32 parameters, products in bf16."""
    x, weight, labels = _case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = chunked_cross_entropy(x, weight, labels, 10)
        expected = naive_cross_entropy(x, weight, labels)
    narrow = [t.detach().bfloat16().double().requires_grad_() for t in (x, weight)]
    exact = naive_cross_entropy(*narrow, labels)
    for a, b, c in zip(
        _results(result, x, weight),
        _results(expected, x, weight),
        _results(exact, *narrow),
        strict=True,
    ):
        assert a.dtype == b.dtype == torch.float32
        assert_close(a.double(), c, 1e-2)
        assert_close(a, b, 1e-2)


@pytest.mark.parametrize("ignored", [0.0, 1.0])
def test_ignored_labels(ignored: float) -> None:
    x, weight, labels = _case(torch.float64, ignored)
    results = _results(chunked_cross_entropy(x, weight, labels, 10), x, weight)
    expected = _results(naive_cross_entropy(x, weight, labels), x, weight)
    for a, b in zip(results, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    assert (results[0] == 0) == (ignored == 1)


def test_far_logits() -> None:
    """A label that is sure, one that is hopeless, and logits that would overflow."""
    logits = torch.tensor([[3e4, 0.0, -3e4]] * 3)
    loss, gradient = loss_of_chunk(logits, torch.tensor([0, 2, -100]))
    assert loss == 6e4 and gradient.isfinite().all()
    assert torch.equal(gradient, torch.tensor([[0.0, 0, 0], [1, 0, -1], [0, 0, 0]]))


@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    x, weight, labels = _case(torch.float64)
    expected = _results(naive_cross_entropy(x, weight, labels), x, weight)
    for name, leaf in (("x", x), ("weight", weight)):
        leaf.requires_grad_(frozen not in (name, "both"))
    loss = chunked_cross_entropy(x, weight, labels, 10)
    assert_close(loss.detach(), expected[0], 1e-12)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        leaf, gradient = (weight, expected[2]) if frozen == "x" else (x, expected[1])
        (loss / 17).backward()
        assert_close(leaf.grad, gradient, 1e-12)


def test_twice_backward() -> None:
    """The gradients that wait are not used up."""
    x, weight, labels = _case(torch.float64)
    loss = chunked_cross_entropy(x, weight, labels, 10)
    first, second = (
        torch.autograd.grad(loss * f, [x, weight], retain_graph=True)
        for f in (1.0, 3.0)
    )
    for a, b in zip(first, second, strict=True):
        assert_close(a * 3, b, 1e-12)


class _Largest(TorchDispatchMode):
    """Elements of the largest result."""

    largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel())
        return result


def test_no_more_logits_than_a_chunk() -> None:
    x, weight, labels = _case(torch.float32)
    with _Largest() as mode:
        chunked_cross_entropy(x, weight, labels, 24).backward()
    assert mode.largest == VOCAB * DIM  # the weight's gradient; a chunk is as large
    with _Largest() as mode:
        naive_cross_entropy(x, weight, labels).backward()
    assert mode.largest == VOCAB * TOKENS


def test_compiled() -> None:
    x, weight, labels = _case(torch.float32)
    chunk: Any = torch.compile(loss_of_chunk, fullgraph=True, dynamic=False)
    result = chunked_cross_entropy(x, weight, labels, 16, chunk)
    expected = naive_cross_entropy(x, weight, labels)
    for a, b in zip(
        _results(result, x, weight), _results(expected, x, weight), strict=True
    ):
        assert_close(a, b, 1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_in_a_model(tied: bool) -> None:
    flavors: list[Any] = [llama3_flavors["tiny"], qwen2_flavors["tiny"]]
    for build, flavor in zip((Llama3, Qwen2), flavors, strict=True):
        args = type(flavor)(
            **{**vars(flavor), "attn_type": "sdpa", "enable_weight_tying": tied}
        )
        torch.manual_seed(4)
        model: nn.Module = build(args)
        model.init_weights()
        tokens, labels = torch.randint(4096, (2, 2, 40))
        labels[0, :5] = -100
        gradients = []
        for size in (0, 24):
            model.zero_grad()
            model.output.chunk_size = size
            if size:
                loss = model(tokens, labels=labels)
            else:
                logits = model(tokens).flatten(0, 1)
                loss = nn.functional.cross_entropy(
                    logits, labels.flatten(), reduction="sum"
                )
            loss.backward()
            found = {name: p.grad for name, p in model.named_parameters()}
            gradients.append({"loss": loss.detach(), **found})
        for name, expected in gradients[0].items():
            assert_close(gradients[1][name], expected, 1e-5 if name != "loss" else 1e-6)


def test_errors() -> None:
    x, weight, labels = _case(torch.float32)
    with pytest.raises(ValueError, match=r"labels \(1, 52\).*\(1, 53, 24\)"):
        chunked_cross_entropy(x, weight, labels[:, 1:], 8)
    with pytest.raises(ValueError, match=r"chunk_size \(0\)"):
        chunked_cross_entropy(x, weight, labels, 0)
    with pytest.raises(ValueError, match=r"loss.chunk_size \(-1\)"):
        Loss(chunk_size=-1).validate()
    Loss(chunk_size=0).validate()
