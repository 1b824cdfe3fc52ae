"""The models of this recipe, as torchtitan train specs.

    mtraining_llama3    Llama-3's architecture
    mtraining_qwen2     Qwen2.5's architecture

`register()` makes them known to torchtitan; `recipes.train` calls it.
"""

from collections.abc import Mapping

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.protocols.train_spec import (
    TrainSpec,
    _extra_train_specs,
    register_train_spec,
)

from mtraining_flex.data.loader import build_dataloader
from mtraining_flex.loss import build_loss
from mtraining_flex.metrics import build_metrics_processor
from mtraining_flex.models.hf import Llama3Adapter, Qwen2Adapter
from mtraining_flex.models.llama3 import Llama3, llama3_flavors
from mtraining_flex.models.qwen2 import Qwen2, qwen2_flavors
from mtraining_flex.parallelize import parallelize
from mtraining_flex.validate import build_validator


def _spec(
    model_cls: type[ModelProtocol],
    flavors: Mapping[str, BaseModelArgs],
    adapter: type[BaseStateDictAdapter],
) -> TrainSpec:
    return TrainSpec(
        model_cls=model_cls,
        model_args=flavors,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_loss,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
        state_dict_adapter=adapter,
    )


TRAIN_SPECS = {
    "mtraining_llama3": _spec(Llama3, llama3_flavors, Llama3Adapter),
    "mtraining_qwen2": _spec(Qwen2, qwen2_flavors, Qwen2Adapter),
}


def register() -> None:
    """Make the train specs known to torchtitan. Safe to call twice."""
    for name, spec in TRAIN_SPECS.items():
        if name not in _extra_train_specs:
            register_train_spec(name, spec)
