"""Hugging Face checkpoints: names of weights, order of rotary pairs, config.json.

torchtitan loads and saves them with `checkpoint.initial_load_in_hf` and
`last_save_in_hf`; this module tells it which tensor is which. Nothing is left out
silently: a checkpoint must hold exactly the tensors of the model, in their shapes.

A tied output has no tensor of its own in a file; one that holds it all the same must
hold the embedding's numbers there.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from mtraining_flex.models.common import DecoderArgs, head_dim
from mtraining_flex.models.llama3 import Llama3, Llama3Args
from mtraining_flex.models.qwen2 import Qwen2, Qwen2Args
from mtraining_flex.models.rope import RopeScaling

_TIED, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BIASED = ("attention.wq", "attention.wk", "attention.wv")
_IGNORED = "rotary_emb.inv_freq"  # a buffer, in old checkpoints
_ROWS = 4096  # that are compared at a time


def hf_names(args: DecoderArgs) -> dict[str, str]:
    """Our name of every parameter, and Hugging Face's; without a tied output."""
    names = {"tok_embeddings.weight": _EMBEDDING, "norm.weight": "model.norm.weight"}
    if not args.enable_weight_tying:
        names["output.weight"] = _TIED
    for layer in range(args.n_layers):
        for ours, theirs in _BLOCK.items():
            kinds = ["weight"]
            if isinstance(args, Qwen2Args) and ours in _BIASED:
                kinds.append("bias")
            for kind in kinds:
                name = f"model.layers.{layer}.{theirs}.{kind}"
                names[f"layers.{layer}.{ours}.{kind}"] = name
    return names


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
            name: x for name, x in hf_state_dict.items() if not name.endswith(_IGNORED)
        }
        if self.args.enable_weight_tying:
            theirs.pop(_TIED, None)
        _same_names(theirs, self.names.values(), "the state to load")
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


# --- a folder of safetensors ----------------------------------------------------------


def _listed(names: Iterable[str]) -> str:
    """At most four names, and how many more."""
    names = sorted(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _same_names(found: Iterable[str], expected: Iterable[str], where: str) -> None:
    found, expected = set(found), set(expected)
    if found == expected:
        return
    parts = [
        f"{word} {len(names)}: {_listed(names)}"
        for word, names in (
            ("lacks", expected - found),
            ("has surplus", found - expected),
        )
        if names
    ]
    raise ValueError(
        f"{where} does not fit the configured flavor ({len(expected)} tensors): it "
        + "; it ".join(parts)
    )


def check_folder(folder: Path, args: DecoderArgs) -> None:
    """See that a folder holds exactly the weights of a model.

    Raises:
        ValueError: no safetensors, tensors missing or surplus, another shape, a tied
            output that is not the embedding.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  no mapping
                if name in files:
                    raise ValueError(
                        f"{folder}: '{name}' is in {files[name].name} and {file.name}"
                    )
                if not name.endswith(_IGNORED):
                    files[name] = file
                    shapes[name] = tuple(content.get_slice(name).get_shape())
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors with weights")
    found = set(files)
    if args.enable_weight_tying and _TIED in found:
        _check_tie(files, folder)
        found.discard(_TIED)
    names = hf_names(args)
    _same_names(found, names.values(), str(folder))
    expected = _shapes(args)
    for ours, name in names.items():
        if shapes[name] != expected[ours]:
            raise ValueError(
                f"{folder}: '{name}' is {list(shapes[name])}, and the configured "
                f"flavor has {list(expected[ours])}"
            )


def _check_tie(files: Mapping[str, Path], folder: Path) -> None:
    if _EMBEDDING not in files:
        return  # what is missing is said elsewhere
    with (
        safe_open(files[_TIED], framework="pt") as one,
        safe_open(files[_EMBEDDING], framework="pt") as other,
    ):
        a, b = one.get_slice(_TIED), other.get_slice(_EMBEDDING)
        same = a.get_shape() == b.get_shape() and all(
            torch.equal(a[i : i + _ROWS], b[i : i + _ROWS])
            for i in range(0, a.get_shape()[0], _ROWS)
        )
    if not same:
        raise ValueError(
            f"{folder}: 'lm_head.weight' differs from 'model.embed_tokens.weight', and "
            "the configured flavor ties the two (enable_weight_tying)"
        )


def _shapes(args: DecoderArgs) -> dict[str, tuple[int, ...]]:
    build: Any = Qwen2 if isinstance(args, Qwen2Args) else Llama3
    with torch.device("meta"):
        state: dict[str, Tensor] = build(args).state_dict()
    return {name: tuple(x.shape) for name, x in state.items()}


# --- config.json ----------------------------------------------------------------------


def hf_config(
    args: DecoderArgs, dtype: torch.dtype, tokens: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json of a model, as transformers 4.43 and later read it.

    Args:
        dtype: of the saved weights.
        tokens: `bos_token_id`, `eos_token_id` and the like.
    """
    qwen = isinstance(args, Qwen2Args)
    if not isinstance(args, Qwen2Args | Llama3Args):
        raise ValueError(f"no Hugging Face class for {type(args).__name__}")
    shapes = _shapes(args)
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen else "llama",
        "hidden_size": args.dim,
        "intermediate_size": shapes["layers.0.feed_forward.w1.weight"][0],
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "vocab_size": args.vocab_size,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "max_position_embeddings": args.max_seq_len,
        "tie_word_embeddings": args.enable_weight_tying,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if qwen:
        config["use_sliding_window"] = False
    else:
        config |= {
            "head_dim": head_dim(args),
            "attention_bias": False,
            "mlp_bias": False,
        }
    if args.rope_scaling.kind != "none":
        config["rope_scaling"] = _hf_scaling(args.rope_scaling)
    return config | dict(tokens or {})


def _hf_scaling(scaling: RopeScaling) -> dict[str, Any]:
    result: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return result
    result["original_max_position_embeddings"] = scaling.original_length
    names = (
        ("low_freq_factor", "high_freq_factor")
        if scaling.kind == "llama3"
        else ("beta_fast", "beta_slow")
    )
    result |= {name: getattr(scaling, name) for name in names}
    if scaling.attention_factor:
        result["attention_factor"] = scaling.attention_factor
    return result
