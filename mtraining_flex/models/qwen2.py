"""Qwen2.5: as Llama 3, but for a few things.

Biases on queries, keys and values (none on the output projection), rotary pairs that
lie half a head apart, the feed-forward's width given as a number, and embeddings that
the smaller models share between input and output.
"""

# No `from __future__ import annotations` here: torchtitan reads the field types.
from dataclasses import dataclass, replace

from torch import nn
from torchtitan.models.qwen3.model.model import FeedForward

from mtraining_flex.models.common import Attention, Block, Decoder, DecoderArgs


@dataclass
class Qwen2Args(DecoderArgs):
    """The shape of a model; the defaults are those of Qwen2.5-3B."""

    hidden_dim: int = 11008
    """Width of the feed-forward."""


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
        super().__init__(model_args, blocks)


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
    # Qwen2.5
    "0.5B": Qwen2Args(dim=896, n_layers=24, n_heads=14, hidden_dim=4864),
    "1.5B": Qwen2Args(
        dim=1536, n_layers=28, n_heads=12, hidden_dim=8960, max_seq_len=131072
    ),
    "3B": Qwen2Args(),
    "7B": Qwen2Args(
        dim=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        vocab_size=152064,
        hidden_dim=18944,
        enable_weight_tying=False,
        max_seq_len=131072,
    ),
}
qwen2_flavors["tiny_tied"] = replace(qwen2_flavors["tiny"], enable_weight_tying=True)
