"""A folder of Hugging Face's: its weights by name and shape, config.json, all the rest.

Nothing is left out silently: a folder must hold exactly the tensors of the model, in
their shapes, and its config.json must mean the same model, since another base of the
angles fits the same tensors. A tied output has no tensor of its own in a file; one that
holds it all the same must hold the embedding's numbers there.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mtraining_flex.models.common import DecoderArgs, head_dim
from mtraining_flex.models.llama3 import Llama3, Llama3Args
from mtraining_flex.models.qwen2 import Qwen2, Qwen2Args
from mtraining_flex.models.rope import RopeScaling

TIED, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
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
IGNORED = "rotary_emb.inv_freq"  # a buffer, in old checkpoints
_ROWS = 4096  # that are compared at a time


def hf_names(args: DecoderArgs) -> dict[str, str]:
    """Our name of every parameter, and Hugging Face's; without a tied output."""
    names = {"tok_embeddings.weight": EMBEDDING, "norm.weight": "model.norm.weight"}
    if not args.enable_weight_tying:
        names["output.weight"] = TIED
    for layer in range(args.n_layers):
        for ours, theirs in _BLOCK.items():
            kinds = ["weight"]
            if isinstance(args, Qwen2Args) and ours in _BIASED:
                kinds.append("bias")
            for kind in kinds:
                name = f"model.layers.{layer}.{theirs}.{kind}"
                names[f"layers.{layer}.{ours}.{kind}"] = name
    return names


# --- a folder of safetensors ----------------------------------------------------------


def _listed(names: Iterable[str]) -> str:
    """At most four names, and how many more."""
    names = sorted(names)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def same_names(found: Iterable[str], expected: Iterable[str], where: str) -> None:
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
                if not name.endswith(IGNORED):
                    files[name] = file
                    shapes[name] = tuple(content.get_slice(name).get_shape())
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors with weights")
    found = set(files)
    if args.enable_weight_tying and TIED in found:
        _check_tie(files, folder)
        found.discard(TIED)
    names = hf_names(args)
    same_names(found, names.values(), str(folder))
    expected = _shapes(args)
    for ours, name in names.items():
        if shapes[name] != expected[ours]:
            raise ValueError(
                f"{folder}: '{name}' is {list(shapes[name])}, and the configured "
                f"flavor has {list(expected[ours])}"
            )


def _check_tie(files: Mapping[str, Path], folder: Path) -> None:
    if EMBEDDING not in files:
        return  # what is missing is said elsewhere
    with (
        safe_open(files[TIED], framework="pt") as one,
        safe_open(files[EMBEDDING], framework="pt") as other,
    ):
        a, b = one.get_slice(TIED), other.get_slice(EMBEDDING)
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


def _angles(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Base and scaling of a config.json, of transformers 4 or 5."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = dict(scaling)
    theta = config.get("rope_theta", scaling.pop("rope_theta", None))
    scaling.pop("rope_theta", None)
    kind = scaling.pop("type", "default")
    scaling["rope_type"] = scaling.get("rope_type", kind)
    if scaling.get("truncate"):  # whole pairs, as here
        del scaling["truncate"]
    return theta, {} if scaling["rope_type"] == "default" else scaling


def check_config(
    folder: Path, args: DecoderArgs, theta: bool = True, scaling: bool = True
) -> None:
    """See that a folder's config.json, if it has one, means the same model.

    Args:
        theta, scaling: whether to compare them; not, where the run sets its own.

    Raises:
        ValueError: names the first setting that differs, and both values.
    """
    file = folder / "config.json"
    if not file.exists():
        return
    theirs = json.loads(file.read_text())
    ours = hf_config(args, torch.float32)
    base, stretched = _angles(theirs)
    wanted = {"model_type", "rms_norm_eps", "tie_word_embeddings", "hidden_act"}
    wanted |= {"num_attention_heads", "num_key_value_heads", "num_hidden_layers"}
    pairs = {name: (theirs.get(name, ours[name]), ours[name]) for name in wanted}
    pairs["use_sliding_window"] = (theirs.get("use_sliding_window", False), False)
    if theta and base is not None:
        pairs["rope_theta"] = (base, ours["rope_theta"])
    if scaling:
        expected = ours.get("rope_scaling", {})
        for name in sorted(set(expected) | (set(stretched) & _SCALING_FIELDS)):
            found = stretched.get(name, getattr(_PLAIN, name, None))
            pairs[f"rope_scaling.{name}"] = (found, expected.get(name))
    for name, (found, expected_value) in sorted(pairs.items()):
        if found != expected_value:
            raise ValueError(
                f"{file}: {name} is {found!r}, and the configured flavor has "
                f"{expected_value!r}"
            )


_PLAIN = RopeScaling()
_SCALING_FIELDS = {
    "rope_type",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    # These do not exist here:
    "truncate",
    "mscale",
    "mscale_all_dim",
    "partial_rotary_factor",
}


# --- all the rest ---------------------------------------------------------------------

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_assets(
    folder: Path,
    args: DecoderArgs,
    dtype: torch.dtype,
    assets: Path,
    policy: Mapping[str, Any],
    tokens: Mapping[str, int | None],
) -> None:
    """What stands beside the weights: config, tokenizer, generation, the sparse policy.

    Args:
        folder: where the weights are.
        dtype: of them.
        assets: folder of the tokenizer, perhaps of a whole model.
        policy: of the attention that the model was trained with.
        tokens: `bos_token_id`, `eos_token_id`, where `assets` does not say.
    """
    generation: dict[str, Any] = {}
    file = assets / "generation_config.json"
    if file.exists():
        generation = json.loads(file.read_text())
    before: dict[str, Any] = {}
    if (assets / "config.json").exists():
        before = json.loads((assets / "config.json").read_text())
    ids = {name: tokens[name] for name in _TOKEN_IDS if tokens.get(name) is not None}
    ids |= {name: before[name] for name in _TOKEN_IDS if before.get(name) is not None}
    _write(folder / "config.json", hf_config(args, dtype, ids))
    _write(folder / "generation_config.json", generation or ids)
    _write(folder / "sparse_attention.json", policy)
    for name in TOKENIZER_FILES:
        if (assets / name).exists():
            shutil.copyfile(assets / name, folder / name)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """All of it or nothing."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(file)
