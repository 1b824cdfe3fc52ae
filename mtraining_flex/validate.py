"""Validation on the training mesh: the loss of held-out text, per valid token.

torchtitan's validator reports the loss times the context-parallel degree and hangs when
ranks run out of data at different times. This one sums losses and valid tokens over all
ranks, and stops on all of them when the first runs out.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_sum
from torchtitan.tools.utils import device_type

from mtraining_flex.config import job_layout
from mtraining_flex.counters import recorder
from mtraining_flex.data.loader import build_validation_dataloader
from mtraining_flex.layout import shard_batch


class SparseValidator(BaseValidator):
    """Each call reads the same sequences from the beginning."""

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        parallel_dims: ParallelDims,
        loss_fn: Any,
        validation_context: Any,
        maybe_enable_amp: Any,
        metrics_processor: Any,
        **pipeline: Any,
    ):
        super().__init__(job_config)
        assert not any(pipeline.values()), "no pipeline in this recipe"
        self.data = (dp_world_size, dp_rank, tokenizer, job_config)
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        self.validation_context = validation_context
        self.maybe_enable_amp = maybe_enable_amp
        self.metrics_processor = metrics_processor
        self.layout = job_layout(
            job_config, job_config.validation.seq_len, "validation.seq_len"
        )
        # Built once here so that a mistake in [validation] ends the run before step 1.
        build_validation_dataloader(*self.data, infinite=False)

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the validation loss. Collective over all ranks."""
        (model,) = model_parts
        model.eval()
        steps = self.job_config.validation.steps
        loss_sum = torch.zeros((), dtype=torch.float64, device=device_type)
        valid = torch.zeros((), dtype=torch.float64, device=device_type)
        batches = iter(build_validation_dataloader(*self.data, infinite=steps != -1))
        done = 0
        with recorder.recording(False):
            while steps == -1 or done < steps:
                batch = next(batches, None)
                if not self._all_have(batch is not None):
                    break
                assert batch is not None
                loss, count = self._batch_loss(model, *batch)
                loss_sum += loss
                valid += count
                done += 1
        if done == 0:
            raise ValueError(
                f"validation.seq_len ({self.layout.seq_len}) leaves some rank without "
                f"a single batch of validation.local_batch_size "
                f"({self.job_config.validation.local_batch_size}) sequences"
            )
        mesh = self.parallel_dims.get_optional_mesh("loss")
        total, count = dist_sum(loss_sum, mesh), dist_sum(valid, mesh)
        self.metrics_processor.log_validation(loss=total / count, step=step)
        model.train()

    def _all_have(self, one: bool) -> bool:
        """Whether every rank still has data."""
        if not self.parallel_dims.dp_enabled:
            return one
        group = self.parallel_dims.get_mesh("batch").get_group()
        have = torch.tensor(one, dtype=torch.int32, device=device_type)
        dist.all_reduce(have, op=dist.ReduceOp.MIN, group=group)
        return bool(have.item())

    def _batch_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and valid tokens of this rank's share of one batch."""
        self.metrics_processor.ntokens_since_last_log += labels.numel()
        (tokens, labels), positions = shard_batch(
            self.layout,
            self.parallel_dims.get_optional_mesh("cp"),
            inputs["input"].to(device_type),
            labels.to(device_type),
        )
        with self.validation_context(), self.maybe_enable_amp:
            extra = {"labels": labels} if self.job_config.loss.chunk_size > 0 else {}
            pred = model(tokens, positions=positions, **extra)
            loss = self.loss_fn(pred, labels)
        return loss.detach(), (labels != IGNORE_INDEX).sum()


def build_validator(**kwargs: Any) -> SparseValidator:
    """For torchtitan's train spec."""
    return SparseValidator(**kwargs)
