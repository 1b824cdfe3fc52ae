"""Loss, speed, density, recall and balance, in torchtitan's logs and TensorBoard.

torchtitan's numbers are kept where they hold under context parallelism and corrected
where they do not: it counts each token once per CP rank, takes a rank's share of a loss
for its mean, and counts the FLOPs of dense attention.
"""

from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_max
from torchtitan.tools.logging import logger

from mtraining_flex.counters import recorder
from mtraining_flex.ring.comm import comm_for


class SparseMetricsProcessor(MetricsProcessor):
    """torchtitan's processor, and what the attention counted on the device."""

    num_flops_per_token: int

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any
    ):
        super().__init__(job_config, parallel_dims)
        self.model_args = model_args
        self.dense_flops_per_token: int | None = None
        self._loss_sum: Tensor | None = None
        self._valid: Tensor | None = None

    def add_loss(self, loss_sum: Tensor, labels: Tensor) -> None:
        """Note this rank's loss sum over its labels, for the largest rank's mean."""
        valid = (labels != IGNORE_INDEX).sum()
        loss_sum = loss_sum.detach()
        self._loss_sum = (
            loss_sum if self._loss_sum is None else self._loss_sum + loss_sum
        )
        self._valid = valid if self._valid is None else self._valid + valid

    def _max_loss(self) -> float:
        assert self._loss_sum is not None and self._valid is not None
        # A rank without a valid label has no mean and must not be the largest.
        mean = torch.where(self._valid > 0, self._loss_sum / self._valid, -torch.inf)
        self._loss_sum = self._valid = None
        return dist_max(mean, self.parallel_dims.get_optional_mesh("loss"))

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one step; collective, like torchtitan's."""
        extra = dict(extra_metrics or {})
        if self.parallel_dims.cp_enabled and "n_tokens_seen" in extra:
            extra["n_tokens_seen"] /= self.parallel_dims.cp
        mesh = self.parallel_dims.get_optional_mesh("cp")
        attention = recorder.summary(
            comm_for(None if mesh is None else mesh.get_group())
        )
        extra |= attention
        if self._loss_sum is not None:
            global_max_loss = self._max_loss()
        if self.dense_flops_per_token is None:
            self.dense_flops_per_token = self.num_flops_per_token
        flops = self.model_args.attention_flops_per_token(
            self.job_config.training.seq_len
        )
        kept = flops * attention["sparse/density"]
        self.num_flops_per_token = int(self.dense_flops_per_token + kept)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
        if attention:
            logger.info(attention_line(step, attention))


def attention_line(step: int, metrics: dict[str, float]) -> str:
    """One log line of the means over layers."""
    parts = [
        f"{name.split('/')[1]}: {value:.4g}"
        for name, value in metrics.items()
        if "/layer_" not in name
    ]
    return f"step: {step:2}  attention  " + "  ".join(parts)


def build_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any
) -> SparseMetricsProcessor:
    """For torchtitan's train spec."""
    return SparseMetricsProcessor(job_config, parallel_dims, model_args)
