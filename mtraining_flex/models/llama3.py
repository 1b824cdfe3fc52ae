"""Llama 3: torchtitan's model with true positions and sparse attention.

RMSNorm, grouped queries, SwiGLU, no biases, interleaved rotary pairs, RoPE scaling by
wavelength; embeddings that the smaller models share between input and output.
"""

# No `from __future__ import annotations` here: torchtitan reads the field types.
from dataclasses import dataclass, field, replace

from torchtitan.models.llama3.model.model import FeedForward

from mtraining_flex.models.common import Attention, Block, Decoder, DecoderArgs
from mtraining_flex.models.rope import RopeScaling


@dataclass
class Llama3Args(DecoderArgs):
    """The shape of a model; the defaults are those of Llama 3.1 8B."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int | None = 8
    vocab_size: int = 128256
    multiple_of: int = 1024
    """The feed-forward is 8 / 3 dim wide, times the next, rounded up to this."""
    ffn_dim_multiplier: float | None = 1.3
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling = field(default_factory=lambda: _scaling(8.0))
    enable_weight_tying: bool = False
    max_seq_len: int = 131072


def _scaling(factor: float) -> RopeScaling:
    return RopeScaling("llama3", factor, original_length=8192)


class Llama3Block(Block):
    def __init__(self, layer_id: int, model_args: Llama3Args):
        feed_forward = FeedForward(
            dim=model_args.dim,
            hidden_dim=4 * model_args.dim,
            multiple_of=model_args.multiple_of,
            ffn_dim_multiplier=model_args.ffn_dim_multiplier,
        )
        attention = Attention(layer_id, model_args)
        super().__init__(layer_id, model_args, attention, feed_forward)


class Llama3(Decoder):
    def __init__(self, model_args: Llama3Args):
        layers = range(model_args.n_layers)
        blocks = [Llama3Block(layer_id, model_args) for layer_id in layers]
        super().__init__(model_args, blocks)


llama3_flavors = {
    "debugmodel": Llama3Args(
        dim=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=4096,
        multiple_of=256,
        ffn_dim_multiplier=None,
    ),
    "tiny": Llama3Args(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=4096,
        multiple_of=64,
        ffn_dim_multiplier=None,
    ),
    # Llama 3.2
    "1B": Llama3Args(
        dim=2048,
        n_layers=16,
        multiple_of=256,
        ffn_dim_multiplier=1.5,
        rope_scaling=_scaling(32.0),
        enable_weight_tying=True,
    ),
    "3B": Llama3Args(
        dim=3072,
        n_layers=28,
        n_heads=24,
        multiple_of=256,
        ffn_dim_multiplier=1.0,
        rope_scaling=_scaling(32.0),
        enable_weight_tying=True,
    ),
    # Llama 3.1
    "8B": Llama3Args(),
}
llama3_flavors["tiny_tied"] = replace(llama3_flavors["tiny"], enable_weight_tying=True)
