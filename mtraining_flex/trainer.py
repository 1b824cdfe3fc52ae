"""torchtitan's trainer, with the batch sharded by our layout.

What is wrong with a configuration is found in `__init__`, before a process group where
it can be, and always before the first step.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.utils import set_pg_timeouts
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from mtraining_flex import cpu_device, selftest
from mtraining_flex.attention import comm_of
from mtraining_flex.config import validate_job
from mtraining_flex.counters import recorder
from mtraining_flex.layout import shard_batch
from mtraining_flex.metrics import SparseMetricsProcessor
from mtraining_flex.models.hf_folder import check_config, check_folder, write_assets
from mtraining_flex.parallelize import attention_modules, parallelize
from mtraining_flex.ring.comm import set_timeouts
from mtraining_flex.sentinel import sentinel


class SparseTrainer(Trainer):
    """Trains a model of this recipe; torchtitan's interface throughout."""

    def __init__(self, job_config: Any):
        cpu_device.check()
        spec = get_train_spec(job_config.model.name)
        if spec.parallelize_fn is not parallelize:
            raise ValueError(
                f"model.name ('{job_config.model.name}') is not a model of this "
                "recipe: use 'mtraining_llama3' or 'mtraining_qwen2'"
            )
        if job_config.model.flavor not in spec.model_args:
            raise ValueError(
                f"model.flavor ('{job_config.model.flavor}') must be one of "
                f"{list(spec.model_args)}"
            )
        self.layout = validate_job(job_config, int(os.environ.get("WORLD_SIZE", "1")))
        _check_hf_folder(job_config, spec.model_args[job_config.model.flavor])
        self._first_step: int | None = None  # of this process
        super().__init__(job_config)
        self._start_sentinel()

    def _start_sentinel(self) -> None:
        """Check the ring once, and from here on in steps; see `sentinel`."""
        job, model = self.job_config, self.model_parts[0]
        sentinel.configure(
            job.sentinel.every,
            Path(job.job.dump_folder) / "sentinel",
            len(attention_modules(model)),
        )
        if not job.sentinel.startup:
            return
        args = self.model_args
        shape = selftest.Shape(
            args.n_heads,
            args.n_kv_heads or args.n_heads,
            model.layers["0"].attention.head_dim,
            TORCH_DTYPE_MAP[job.training.mixed_precision_param],
            self.device,
        )
        mesh = self.parallel_dims.get_optional_mesh("cp")
        selftest.check_at_start(job.sparse_attention, job.ring, mesh, shape)

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
        """This rank's share of the batch, with true positions."""
        assert list(input_dict) == ["input"], f"unknown inputs {list(input_dict)}"
        mesh = self.parallel_dims.get_optional_mesh("cp")
        batch = input_dict["input"], labels
        (inputs, labels), positions = shard_batch(self.layout, mesh, *batch)
        sentinel.check_batch(
            self.layout, comm_of(mesh), batch, (inputs, labels), positions
        )
        self._local_labels = labels
        extra = {"positions": positions}
        if self.job_config.loss.chunk_size > 0:
            extra["labels"] = labels
        return inputs, labels, {}, extra

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, Tensor],
        labels: Tensor,
        global_valid_tokens: Tensor,
    ) -> Tensor:
        """As torchtitan's; notes the local loss in steps that are logged."""
        loss = super().forward_backward_step(
            input_dict=input_dict,
            labels=labels,
            global_valid_tokens=global_valid_tokens,
        )
        if recorder.active:
            assert isinstance(self.metrics_processor, SparseMetricsProcessor)
            loss_sum = loss.detach() * global_valid_tokens
            self.metrics_processor.add_loss(loss_sum, self._local_labels)
        return loss

    def train_step(
        self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]
    ) -> None:
        """One optimiser step; counted where it is logged, checked where it is due."""
        if self._first_step is None:
            self._first_step = self.step
        elif self.step == self._first_step + 1:
            self._shorten_timeouts()
        logged = self.metrics_processor.should_log(self.step)
        with recorder.recording(logged), sentinel.watching(self.step):
            super().train_step(data_iterator)

    def train(self) -> None:
        """All steps; then what belongs beside weights in Hugging Face's format."""
        super().train()
        checkpoint = self.job_config.checkpoint
        saved = checkpoint.enable and checkpoint.last_save_in_hf
        if saved and not checkpoint.load_only and dist.get_rank() == 0:
            self._write_hf_assets()

    def _write_hf_assets(self) -> None:
        job, tokenizer = self.job_config, self.tokenizer
        folder = Path(self.checkpointer._create_checkpoint_id(self.step))
        if not list(folder.glob("*.safetensors")):
            return  # this run had no last step
        policy = {
            "sparse_attention": asdict(job.sparse_attention),
            "ring": asdict(job.ring),
            "seq_len": job.training.seq_len,
            "steps": self.step,
        }
        tokens = {
            f"{name}_token_id": getattr(tokenizer, f"{name}_id", None)
            for name in ("bos", "eos")
        }
        dtype = TORCH_DTYPE_MAP[job.checkpoint.export_dtype]
        assets = Path(job.model.hf_assets_path)
        write_assets(folder, self.model_args, dtype, assets, policy, tokens)
        logger.info(f"Hugging Face model in {folder}")

    def _shorten_timeouts(self) -> None:
        """The groups of all rings wait no longer than torchtitan's own.

        After the first step of this process: torchtitan does so after step 1 alone, so
        a resumed run would keep the timeout that a first step needs.
        """
        timeout = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
        if self._first_step != 1:
            set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
        set_timeouts(timeout)


def _check_hf_folder(job_config: Any, model_args: Any) -> None:
    """Before anything is built: do the weights to start from fit?

    Raises:
        ValueError: as `check_folder` and `check_config`.
    """
    checkpoint = job_config.checkpoint
    if not (checkpoint.enable and checkpoint.initial_load_in_hf):
        return
    if (Path(job_config.job.dump_folder) / checkpoint.folder).exists():
        return  # the run goes on from its own checkpoint
    folder = Path(checkpoint.initial_load_path or job_config.model.hf_assets_path)
    rope = job_config.rope
    check_config(folder, model_args, not rope.theta, rope.scaling == "model")
    check_folder(folder, model_args)


def main() -> None:
    """Entry of `recipes.train`."""
    from torchtitan.train import main as train

    train(SparseTrainer)
