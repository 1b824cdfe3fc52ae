"""Qwen2.5: as Llama 3, but for a few things.

Biases on queries, keys and values (none on the output projection), rotary pairs that
lie half a head apart, the feed-forward's width given as a number, and embeddings that
the smaller models share between input and output.
"""

# No `from __future__ import annotations` here: torchtitan reads the field types.
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchtitan.models.qwen3.model.model import FeedForward
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.logging import logger

from mtraining_flex.models.common import (
    Attention,
    Block,
    Decoder,
    count_attention_flops,
    count_nparams_and_flops,
)


@dataclass
class Qwen2Args(BaseModelArgs):
    """The shape of a model; the defaults are those of Qwen2.5-3B."""

    dim: int = 2048
    n_layers: int = 36
    n_heads: int = 16
    n_kv_heads: int | None = 2
    """Key and value heads; None is as many as query heads."""
    vocab_size: int = 151936
    hidden_dim: int = 11008
    """Width of the feed-forward."""
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    enable_weight_tying: bool = True
    """Input and output embedding are one weight."""
    max_seq_len: int = 32768
    """Longest sequence of the model's own training; then that of this run."""
    depth_init: bool = True
    """Initial deviation falls with a layer's own depth, not with that of the model."""
    attn_type: str = "sparse"
    """"sparse" or, for a dense twin, "sdpa"."""

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        seq_len = job_config.training.seq_len
        if seq_len > self.max_seq_len:
            logger.warning(
                f"training.seq_len ({seq_len}) exceeds the model's own max_seq_len "
                f"({self.max_seq_len}): its rotary angles have not seen such positions"
            )
        self.max_seq_len = seq_len

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and training FLOPs per token without attention."""
        return count_nparams_and_flops(model, tied=self.enable_weight_tying)

    def attention_flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token of dense causal attention."""
        return count_attention_flops(self, seq_len)


class Qwen2Attention(Attention):
    """With biases on q, k and v."""

    interleaved = False

    def __init__(self, layer_id: int, model_args: Qwen2Args):
        super().__init__(layer_id, model_args)
        for name in ("wq", "wk", "wv"):
            plain = getattr(self, name)
            setattr(self, name, nn.Linear(plain.in_features, plain.out_features))

    def init_weights(self, init_std: float) -> None:
        super().init_weights(init_std)
        for linear in (self.wq, self.wk, self.wv):
            nn.init.zeros_(linear.bias)


class Qwen2Block(Block):
    def __init__(self, layer_id: int, model_args: Qwen2Args):
        attention = Qwen2Attention(layer_id, model_args)
        feed_forward = FeedForward(model_args.dim, model_args.hidden_dim)
        super().__init__(layer_id, model_args, attention, feed_forward)


class Qwen2(Decoder):
    def __init__(self, model_args: Qwen2Args):
        layers = range(model_args.n_layers)
        blocks = [Qwen2Block(layer_id, model_args) for layer_id in layers]
        super().__init__(model_args, blocks, tied=model_args.enable_weight_tying)


qwen2_flavors = {
    "debugmodel": Qwen2Args(
        dim=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=4096,
        hidden_dim=768,
        enable_weight_tying=False,
    ),
    "tiny": Qwen2Args(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=4096,
        hidden_dim=192,
        enable_weight_tying=False,
    ),
}
qwen2_flavors["tiny_tied"] = replace(qwen2_flavors["tiny"], enable_weight_tying=True)
