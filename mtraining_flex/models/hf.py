"""Hugging Face's names of our weights, and their order of rotary pairs.

torchtitan loads and saves Hugging Face checkpoints with `checkpoint.initial_load_in_hf`
and `last_save_in_hf`; its adapter is here, what else lies in a folder in `hf_folder`.
"""

import json
import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from mtraining_flex.models.common import DecoderArgs, head_dim
from mtraining_flex.models.hf_folder import (
    IGNORED,
    TIED,
    check_folder,
    hf_names,
    same_names,
)


class _Adapter(StateDictAdapter):
    """torchtitan's interface, for both models."""

    interleaved: bool
    fqn_to_index_mapping: dict[Any, int] | None

    def __init__(self, model_args: DecoderArgs, hf_assets_path: str | None):
        # Not the parent's: it would warn where there is no index, as with a tokenizer
        # alone, and keep what an index lists besides this model's tensors.
        self.args, self.hf_assets_path = model_args, hf_assets_path
        self.names = hf_names(model_args)
        self.fqn_to_index_mapping = self._files_of_the_index()

    def _files_of_the_index(self) -> dict[Any, int] | None:
        """Number of the file that each tensor is saved to, as it was loaded from."""
        if not self.hf_assets_path:
            return None
        index = Path(self.hf_assets_path) / "model.safetensors.index.json"
        if not index.exists():
            return None
        known = set(self.names.values())
        files = json.loads(index.read_text())["weight_map"]
        result = {}
        for name in sorted(known & set(files)):
            number = re.search(r"\d+", files[name])
            if number is None:
                raise ValueError(f"{index}: '{files[name]}' has no number")
            result[name] = int(number[0])
        # An index of another model: everything goes into one file.
        return result if len(result) == len(known) else None

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Ours to theirs.

        Raises:
            ValueError: a tensor that no checkpoint of this model has.
        """
        result = {}
        for name, x in state_dict.items():
            if name == "output.weight" and self.args.enable_weight_tying:
                continue
            if name not in self.names:
                raise ValueError(f"'{name}' is not a tensor of this model")
            result[self.names[name]] = self._turn(name, x, to_halves=True)
        return result

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Theirs to ours.

        Raises:
            ValueError: names tensors that are missing or surplus.
        """
        theirs = {
            name: x for name, x in hf_state_dict.items() if not name.endswith(IGNORED)
        }
        if self.args.enable_weight_tying:
            theirs.pop(TIED, None)
        same_names(theirs, self.names.values(), "the state to load")
        result = {
            ours: self._turn(ours, theirs[name], to_halves=False)
            for ours, name in self.names.items()
        }
        if self.args.enable_weight_tying:
            result["output.weight"] = result["tok_embeddings.weight"]
        return result

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        """The reader of a folder, which has been looked through.

        Raises:
            ValueError: as `check_folder`, or quantised weights were asked for.
        """
        if from_quantized:
            raise ValueError(
                "checkpoint.initial_load_in_hf_quantized (True) is not supported by "
                "this recipe: load weights that are not quantised"
            )
        check_folder(Path(path), self.args)
        return HuggingFaceStorageReader(path)

    def _turn(self, name: str, x: Any, to_halves: bool) -> Any:
        """Rows of a head in the other order of rotary pairs, where the two differ."""
        kind = name.split(".")[-2]
        if not self.interleaved or kind not in ("wq", "wk"):
            return x
        if isinstance(x, DTensor):
            # A view of heads would have to cut a shard where it does not end.
            whole = self._turn(name, x.full_tensor(), to_halves)
            return distribute_tensor(
                whole, x.device_mesh, x.placements, src_data_rank=None
            )
        half = head_dim(self.args) // 2
        sizes = (-1, half, 2) if to_halves else (-1, 2, half)
        return x.unflatten(0, sizes).transpose(1, 2).flatten(0, 2).contiguous()


class Llama3Adapter(_Adapter):
    interleaved = True


class Qwen2Adapter(_Adapter):
    interleaved = False
