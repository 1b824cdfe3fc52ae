"""What the models share: torchtitan's Transformer, with three things changed.

    positions   come in with the tokens; the rotary table follows from them (`rope`)
    attention   q, k, v go to an inner attention that can be the sparse ring
    weights     are drawn in their full shape, whatever the number of ranks (`init`)

Parameters have the names of torchtitan's Llama 3.
"""

# No `from __future__ import annotations` here: model arguments are read by torchtitan.
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Attention as TitanAttention
from torchtitan.models.llama3.model.model import Transformer, TransformerBlock
from torchtitan.models.utils import trunc_normal_
from torchtitan.protocols.model import AttentionMasksType, BaseModelArgs
from torchtitan.tools.logging import logger

from mtraining_flex.attention import SparseAttention
from mtraining_flex.loss import Chunk, chunked_cross_entropy, loss_of_chunk
from mtraining_flex.models.init import full_shape_parameters
from mtraining_flex.models.rope import (
    RopeScaling,
    apply_rotary,
    rotary_table,
    shield,
    unshield,
)


@dataclass
class DecoderArgs(BaseModelArgs):
    """What the models' arguments have in common."""

    dim: int = 2048
    n_layers: int = 36
    n_heads: int = 16
    n_kv_heads: int | None = 2
    """Key and value heads; None is as many as query heads."""
    vocab_size: int = 151936
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    enable_weight_tying: bool = True
    """Input and output embedding are one weight."""
    max_seq_len: int = 32768
    """Tokens that the angles reach, with `rope_scaling`."""
    depth_init: bool = True
    """Initial deviation falls with a layer's own depth, not with that of the model."""
    attn_type: str = "sparse"
    """"sparse" or, for a dense twin, "sdpa"."""

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Take `[rope]`, and warn of sequences longer than the angles were made for."""
        job_config.rope.apply(self)
        seq_len = job_config.training.seq_len
        if seq_len > self.max_seq_len:
            logger.warning(
                f"training.seq_len ({seq_len}) exceeds what the model's rotary angles "
                f"reach, max_seq_len ({self.max_seq_len}), with scaling "
                f"'{self.rope_scaling.kind}': set [rope] to stretch them"
            )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and training FLOPs per token without attention."""
        return count_nparams_and_flops(model, tied=self.enable_weight_tying)

    def attention_flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token of dense causal attention."""
        return count_attention_flops(self, seq_len)


def head_dim(model_args: DecoderArgs) -> int:
    return model_args.dim // model_args.n_heads


def inner_attention(layer_id: int, model_args: DecoderArgs) -> nn.Module:
    """What computes out `[B, H, S, D]` from q `[B, H, S, D]` and k, v `[B, HK, S, D]`.

    Raises:
        ValueError: an unknown `attn_type`.
    """
    match model_args.attn_type:
        case "sparse":
            return SparseAttention(layer_id)
        case "sdpa":
            return ScaledDotProductAttentionWrapper()
        case other:
            raise ValueError(f"attn_type ('{other}') must be 'sparse' or 'sdpa'")


class Attention(TitanAttention):
    """Projections, rotation by the table, inner attention."""

    interleaved = True
    """Which components of a head turn together; see `rope.apply_rotary`."""

    def __init__(self, layer_id: int, model_args: DecoderArgs):
        super().__init__(
            TransformerModelArgs(
                dim=model_args.dim,
                n_heads=model_args.n_heads,
                n_kv_heads=model_args.n_kv_heads,
            )
        )
        self.attn_type = model_args.attn_type
        self.inner_attention = inner_attention(layer_id, model_args)

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: AttentionMasksType | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """`[B, S, dim]` to `[B, S, dim]`.

        Args:
            freqs_cis: this model's rotary table, fp32 or as its `shield`ed bits.
            attention_masks: must be None: this attention is causal over one document.
            positions: not used; the table has them.

        Raises:
            ValueError: a mask was given.
        """
        if attention_masks is not None:
            raise ValueError(
                f"attention_masks must be None, got {type(attention_masks).__name__}: "
                "this attention is causal and would have to ignore it"
            )
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (w(x).view(heads) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rotary(q, k, unshield(freqs_cis), self.interleaved)
        out = self.inner_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            scale=self.head_dim**-0.5,
            enable_gqa=self.enable_gqa,
        )  # [B, H, S, D]
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(TransformerBlock):
    """torchtitan's block around an attention and a feed-forward that exist already."""

    def __init__(
        self,
        layer_id: int,
        model_args: DecoderArgs,
        attention: nn.Module,
        feed_forward: nn.Module,
    ):
        nn.Module.__init__(self)  # the parent's would build its own two
        self.n_heads, self.dim = model_args.n_heads, model_args.dim
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        self.ffn_norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        depth = layer_id + 1 if model_args.depth_init else model_args.n_layers
        self.weight_init_std = 0.02 / (2 * depth) ** 0.5


class Output(nn.Linear):
    """Hidden states to logits, or at once to the loss of given labels.

    The loss is computed in here, where FSDP has gathered the weight.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = 0  # tokens whose logits exist at a time; see `loss`
        self.chunk: Chunk = loss_of_chunk

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """`[B, S, dim]` to `[B, S, vocab]`, or to the sum of the loss.

        Args:
            labels: int64 `[B, S]`, -100 where a token does not count.
        """
        if labels is None:
            return super().forward(x)
        return chunked_cross_entropy(
            x, self.weight, labels, self.chunk_size, self.chunk
        )


class Decoder(Transformer):
    """Tokens and positions to logits. Holds no buffer.

    Args:
        blocks: the layers, in order.
    """

    def __init__(self, model_args: DecoderArgs, blocks: Sequence[Block]):
        super().__init__(
            TransformerModelArgs(
                dim=model_args.dim,
                n_layers=0,
                n_heads=model_args.n_heads,
                vocab_size=model_args.vocab_size,
                norm_eps=model_args.norm_eps,
            )
        )
        del self.freqs_cis
        self.output = Output(model_args.dim, model_args.vocab_size)
        self.model_args = model_args
        self.n_layers = len(blocks)
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.tied = model_args.enable_weight_tying
        self._tie()

    def _precompute_freqs_cis(self) -> Tensor:
        return torch.empty(0)  # for the parent's constructor only

    def _tie(self) -> None:
        if self.tied:
            self.output.weight = self.tok_embeddings.weight

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draw all weights, one block after the other, as torchtitan's Llama 3 does.

        A tied weight is drawn once, with the small deviation of the output.

        Args:
            buffer_device: not used, there is no buffer.
        """
        self._tie()  # `to_empty` on a model from the meta device has undone it
        if not self.tied:
            with full_shape_parameters(self.tok_embeddings):
                nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            with full_shape_parameters(layer):
                cast(Block, layer).init_weights()
        with full_shape_parameters(self.norm):
            self.norm.reset_parameters()
        std = self.model_args.dim**-0.5
        with full_shape_parameters(self.output):
            trunc_normal_(self.output.weight, std=std, a=-3 * std, b=3 * std)

    def rotary_table(self, positions: Tensor) -> Tensor:
        """fp32 `[1 or B, S, D // 2, 2]` of positions `[1 or B, S]`."""
        args = self.model_args
        return rotary_table(
            positions, head_dim(args), args.rope_theta, args.rope_scaling
        )

    def forward(
        self,
        tokens: Tensor,
        attention_masks: AttentionMasksType | None = None,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, S, vocab]` of tokens `[B, S]`, or their loss.

        Args:
            attention_masks: must be None.
            positions: global positions, int32 or int64 `[1 or B, S]`. None counts from
                0, which is right only for whole sequences of one document each.
            labels: int64 `[B, S]`: the sum of the cross-entropy is returned instead,
                computed `output.chunk_size` tokens at a time.

        Raises:
            ValueError: a mask, positions that do not fit the tokens, or none where a
                ring has spread the sequence over its ranks.
        """
        batch, seq_len = tokens.shape
        if positions is None:
            self._check_whole_sequence()
            positions = torch.arange(seq_len, device=tokens.device)[None]
        if positions.shape not in ((1, seq_len), (batch, seq_len)):
            raise ValueError(
                f"positions {tuple(positions.shape)} do not fit tokens "
                f"{tuple(tokens.shape)}: they must be [1, S] or [B, S]"
            )
        table = shield(self.rotary_table(positions))
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, table, attention_masks, positions)
        if labels is None:
            return self.output(self.norm(h))
        return self.output(self.norm(h), labels)

    def _check_whole_sequence(self) -> None:
        """Ranks of a ring that each counted from 0 would train smoothly, and wrong."""
        for module in self.modules():
            if isinstance(module, SparseAttention) and module.cp_size > 1:
                raise ValueError(
                    "positions must be given: the ring spreads a sequence over "
                    f"{module.cp_size} ranks, and a rank's tokens are not at 0, 1, 2, "
                    "..."
                )


def count_nparams_and_flops(model: nn.Module, tied: bool) -> tuple[int, int]:
    """Parameters, a tied weight counted once; and training FLOPs per token in them.

    2 FLOPs forward and 4 backward for each weight but the embedding's, which is looked
    up; a tied one multiplies at the output and counts. Attention is not included.
    """
    nparams = sum(p.numel() for p in model.parameters())
    embedding = model.get_parameter("tok_embeddings.weight")
    looked_up = 0 if tied else embedding.numel()
    return nparams, 6 * (nparams - looked_up)


def count_attention_flops(model_args: DecoderArgs, seq_len: int) -> int:
    """Training FLOPs per token of dense causal attention in all layers.

    Each of the S (S + 1) / 2 kept pairs of a sequence costs 2 D multiply-adds forward
    and twice that backward; what the backward recomputes does not count.
    """
    width = model_args.n_heads * head_dim(model_args)
    return 6 * model_args.n_layers * width * (seq_len + 1)
