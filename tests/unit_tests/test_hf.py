"""The models against Hugging Face's own, and their checkpoints both ways."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mtraining_flex.config import Rope
from mtraining_flex.models.hf import Llama3Adapter, Qwen2Adapter
from mtraining_flex.models.hf_folder import (
    check_config,
    check_folder,
    hf_config,
    hf_names,
)
from mtraining_flex.models.llama3 import Llama3, llama3_flavors
from mtraining_flex.models.qwen2 import Qwen2, qwen2_flavors
from mtraining_flex.models.rope import RopeScaling, rotary_table
from tests.helpers import assert_close

transformers = pytest.importorskip("transformers")

SCALINGS = {
    "none": RopeScaling(),
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 64, 1.0, 4.0),
    "yarn": RopeScaling("yarn", 16.0, 64),
    "yarn, all set": RopeScaling(
        "yarn", 4.0, 128, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5
    ),
}
FAR = (0, 256, 15962, 262143, 524287)


def _args(kind: str, tied: bool, scaling: str = "none", **changes: Any) -> Any:
    flavor: Any = (qwen2_flavors if kind == "qwen2" else llama3_flavors)["tiny"]
    return dataclasses.replace(
        flavor,
        attn_type="sdpa",
        enable_weight_tying=tied,
        rope_scaling=SCALINGS[scaling],
        rope_theta=10000.0,
        vocab_size=96,
        max_seq_len=4096,
        **changes,
    )


def _ours(args: Any) -> nn.Module:
    return Qwen2(args) if hasattr(args, "hidden_dim") else Llama3(args)


def _adapter(args: Any) -> Any:
    build = Qwen2Adapter if hasattr(args, "hidden_dim") else Llama3Adapter
    return build(args, None)


def _theirs(args: Any, folder: Path) -> Any:
    """A random model of Hugging Face's class, saved and loaded by its own code."""
    config = hf_config(args, torch.float32)
    config_cls = getattr(transformers, f"{config['architectures'][0][:-11]}Config")
    model_cls = getattr(transformers, config["architectures"][0])
    config.pop("architectures")
    torch.manual_seed(5)
    model = model_cls(config_cls(**config, attn_implementation="eager"))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 1 else 0.15) + (p.ndim < 2))
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


both = pytest.mark.parametrize("kind", ["llama3", "qwen2"])
ties = pytest.mark.parametrize("tied", [False, True])


@both
@ties
@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_and_gradients_equal_theirs(
    kind: str, tied: bool, scaling: str, tmp_path: Path
) -> None:
    args = _args(kind, tied, scaling)
    theirs, ours, adapter = _theirs(args, tmp_path), _ours(args), _adapter(args)
    check_folder(tmp_path, args)
    ours.load_state_dict(adapter.from_hf(theirs.state_dict()))
    tokens = torch.randint(96, (2, 200))
    weights = torch.randn(2, 200, 96)
    logits, expected = ours(tokens), theirs(tokens).logits
    assert_close(logits, expected, 1e-5)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    if tied:
        gradients.pop("output.weight", None)
    converted = adapter.to_hf(gradients)
    count = 0
    for name, p in theirs.named_parameters():
        assert_close(converted[name], p.grad, 1e-5)
        count += 1
    assert count == len(hf_names(args))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_scaling_changes_the_logits(scaling: str) -> None:
    """Otherwise the test above would see none."""
    args = _args("llama3", False, scaling)
    model = _ours(args)
    torch.manual_seed(5)
    model.init_weights()
    with torch.no_grad():
        for layer in model.layers.values():
            layer.attention.wq.weight.mul_(30)
    tokens = torch.arange(90)[None]
    before = model(tokens)
    args.rope_scaling = RopeScaling()
    changed = (model(tokens) - before).abs().max() / before.abs().max()
    assert (changed > 1e-4) == (scaling != "none")


@pytest.mark.parametrize("scaling", [*SCALINGS, "qwen 512K", "llama 512K"])
def test_angles_equal_theirs(scaling: str) -> None:
    """Their formula in fp64: in fp32 their angles are off by 0.03 at the far end."""
    chosen, theta = SCALINGS.get(scaling), 10000.0
    if scaling == "qwen 512K":
        chosen, theta = RopeScaling("yarn", 16.0, 32768), 1e6
    if scaling == "llama 512K":
        chosen, theta = RopeScaling("yarn", 64.0, 8192), 1.28e8
    assert chosen is not None
    args = _args("qwen2", False, dim=512)
    args.rope_scaling, args.rope_theta = chosen, theta
    config = transformers.Qwen2Config(**hf_config(args, torch.float32))
    double = {"float": torch.float64, "float32": torch.float64}
    with mock.patch.multiple(torch, **double):
        if chosen.kind == "none":
            from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

            plain = Qwen2RotaryEmbedding
            frequencies, factor = plain.compute_default_rope_parameters(config)
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            function = ROPE_INIT_FUNCTIONS[chosen.kind]
            frequencies, factor = function(config, torch.device("cpu"))
    assert frequencies.dtype == torch.float64
    angles = torch.tensor(FAR).double()[:, None] * frequencies
    expected = torch.stack((angles.cos(), angles.sin()), -1) * factor
    table = rotary_table(torch.tensor([FAR]), 128, theta, chosen)
    assert table.dtype == torch.float32
    assert (table[0].double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("theta", "scaling", "first", "last"),
    [
        (1e6, RopeScaling("yarn", 16.0, 32768), 23, 40),
        (1.28e8, RopeScaling("yarn", 64.0, 8192), 12, 25),
    ],
)
def test_the_ramp_comes_from_the_original_length(
    theta: float, scaling: RopeScaling, first: int, last: int
) -> None:
    """mtraining-spec, section 6.1: the pairs between which yarn blends."""
    one = torch.ones(1, 1, dtype=torch.int64)
    table, plain = (rotary_table(one, 128, theta, s)[0, 0] for s in (scaling, None))
    ratio = table[:, 1] / scaling.magnitude / plain[:, 1]  # of angles, where small
    kept = (ratio - 1).abs() < 1e-4
    slowed = (ratio * scaling.factor - 1).abs() < 1e-2
    assert kept[: first + 1].all() and not kept[first + 1 :].any()
    assert slowed[last:].all() and not slowed[:last].any()
    assert round(RopeScaling("yarn", 16.0, 1).magnitude, 3) == 1.277
    assert round(RopeScaling("yarn", 64.0, 1).magnitude, 3) == 1.416


# --- checkpoints ----------------------------------------------------------------------


@both
@ties
def test_there_and_back_is_bit_identical(kind: str, tied: bool, tmp_path: Path) -> None:
    args = _args(kind, tied)
    saved = _theirs(args, tmp_path).state_dict()
    adapter, model = _adapter(args), _ours(args)
    model.load_state_dict(adapter.from_hf(saved))
    again = adapter.to_hf(model.state_dict())
    assert set(again) == set(hf_names(args).values())
    assert all(torch.equal(again[name], saved[name]) for name in again)
    if tied:
        assert model.output.weight is model.tok_embeddings.weight


def _saved(args: Any, folder: Path) -> dict[str, Tensor]:
    """A folder of one file; returns its tensors."""
    torch.manual_seed(3)
    model = _ours(args)
    model.init_weights()
    tensors = _adapter(args).to_hf(model.state_dict())
    tensors = {name: x.detach().clone() for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


@both
@ties
@pytest.mark.parametrize("fault", ["missing", "surplus", "shape", "bias", "untied"])
def test_a_folder_that_does_not_fit(
    kind: str, tied: bool, fault: str, tmp_path: Path
) -> None:
    args = _args(kind, tied)
    tensors = _saved(args, tmp_path)
    check_folder(tmp_path, args)
    name = "model.layers.1.mlp.up_proj.weight"
    match fault:
        case "missing":
            del tensors[name]
            parts = ["lacks 1", name]
        case "surplus":
            name = name.replace(".1.", ".2.")
            tensors[name] = torch.zeros(2)
            parts = ["surplus 1", name]
        case "shape":
            tensors[name] = tensors[name][:-1].clone()
            parts = [name, "[191, 64]", "[192, 64]"]
        case "bias":
            name = "model.layers.0.self_attn.q_proj.bias"
            if kind == "qwen2":
                del tensors[name]
                parts = ["lacks 1", name]
            else:
                tensors[name] = torch.zeros(64)
                parts = ["surplus 1", name]
        case _:
            name = "lm_head.weight"
            other = tensors["model.embed_tokens.weight"]
            if tied:
                tensors[name] = other.clone()
                save_file(tensors, tmp_path / "model.safetensors")
                check_folder(tmp_path, args)  # a copy of it is no fault
            tensors[name] = other + 1
            parts = [name, "enable_weight_tying"]
            if not tied:
                args.enable_weight_tying = True
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        check_folder(tmp_path, args)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        check_folder(tmp_path, _args("qwen2", True))


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    args = _args("llama3", False)
    tensors = _saved(args, tmp_path)
    save_file(
        {"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "n.safetensors"
    )
    with pytest.raises(ValueError, match=r"'model.norm.weight' is in model.*and n"):
        check_folder(tmp_path, args)


def test_unknown_names() -> None:
    adapter = _adapter(_args("llama3", False))
    with pytest.raises(ValueError, match="'layers.9.x' is not a tensor"):
        adapter.to_hf({"layers.9.x": torch.zeros(1)})
    with pytest.raises(ValueError, match="lacks 21: lm_head.weight"):
        adapter.from_hf({})
    with pytest.raises(ValueError, match="initial_load_in_hf_quantized"):
        adapter.get_hf_storage_reader(".", from_quantized=True)


@pytest.mark.parametrize("v5", [False, True])
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, ""),
        ({"rms_norm_eps": 1e-7}, "rms_norm_eps is 1e-07"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8"),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0, and the configured flavor"),
        ({"factor": 8.0}, "rope_scaling.factor is 8.0"),
        ({"rope_type": "linear"}, "rope_scaling.rope_type is 'linear'"),
        ({"truncate": False}, "rope_scaling.truncate is False"),
        ({"truncate": True, "beta_fast": 32}, ""),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ],
)
def test_a_config_of_another_model(
    changes: dict[str, Any], part: str, v5: bool, tmp_path: Path
) -> None:
    """Each fits the same tensors, or nearly."""
    args = _args("qwen2", True, "yarn")
    config = hf_config(args, torch.float32)
    angles = {"rope_type", "factor", "truncate", "beta_fast"}
    for name, value in changes.items():
        (config["rope_scaling"] if name in angles else config)[name] = value
    if v5:
        parameters = {**config.pop("rope_scaling"), "rope_theta": config["rope_theta"]}
        del config["rope_theta"]
        config["rope_parameters"] = parameters
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not part:
        check_config(tmp_path, args)
        return
    with pytest.raises(ValueError, match=re.escape(part)):
        check_config(tmp_path, args)
    if part.startswith("rope_"):  # the run sets its own
        check_config(tmp_path, args, theta=False, scaling=False)


def test_no_config_is_no_fault(tmp_path: Path) -> None:
    check_config(tmp_path, _args("qwen2", True))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", ["llama3", "qwen2"])
def test_a_config_of_theirs_is_ours(kind: str, scaling: str, tmp_path: Path) -> None:
    """Written by transformers itself."""
    args = _args(kind, True, scaling)
    _theirs(args, tmp_path)
    check_config(tmp_path, args)
    other = dataclasses.replace(args, rope_scaling=RopeScaling("linear", 3.0))
    with pytest.raises(ValueError, match="rope_scaling."):
        check_config(tmp_path, other)


def test_the_trainer_looks_before_anything_is_built(tmp_path: Path) -> None:
    from torchtitan.config import ConfigManager

    from mtraining_flex.train_spec import register
    from mtraining_flex.trainer import SparseTrainer

    register()
    args = dataclasses.replace(qwen2_flavors["tiny"], rope_theta=5e5)
    _theirs(args, tmp_path)
    flags = [
        "job.custom_config_module=mtraining_flex.config",
        f"job.dump_folder={tmp_path / 'run'}",
        "model.name=mtraining_qwen2",
        "model.flavor=tiny",
        f"model.hf_assets_path={tmp_path}",
        "training.seq_len=256",
        "checkpoint.enable",
        "checkpoint.initial_load_in_hf",
    ]

    def start(*more: str) -> None:
        every = [f"--{flag}" for flag in (*flags, *more)]
        SparseTrainer(ConfigManager().parse_args(every))

    with pytest.raises(ValueError, match="rope_theta is 500000.0.*has 1000000.0"):
        start()
    next(tmp_path.glob("model-00001-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"lacks \d+: "):
        start("rope.theta=5e5")
    assert not (tmp_path / "run").exists()


# --- flavors --------------------------------------------------------------------------

# Parameters as published, a tied embedding counted once.
PUBLISHED = {
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
}


@pytest.mark.parametrize(("kind", "name"), PUBLISHED)
def test_flavors_have_the_published_size(kind: str, name: str) -> None:
    args: Any = (qwen2_flavors if kind == "qwen2" else llama3_flavors)[name]
    with torch.device("meta"):
        model = _ours(args)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[kind, name]
    config = hf_config(args, torch.bfloat16)
    config_cls = (
        transformers.Qwen2Config if kind == "qwen2" else transformers.LlamaConfig
    )
    model_cls = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        theirs = model_cls(config_cls(**config))
    shapes = {n: tuple(p.shape) for n, p in theirs.named_parameters()}
    names = hf_names(args)
    assert shapes == {
        names[n]: tuple(p.shape) for n, p in model.named_parameters() if n in names
    }


# --- [rope] ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"scaling": "x"}, ["rope.scaling ('x')", "'yarn'"]),
        ({"factor": 2.0}, ["rope.factor (2.0)", "'model'"]),
        ({"scaling": "none", "factor": 2.0}, ["rope.factor (2.0)", "'none'"]),
        ({"scaling": "linear"}, ["rope.factor (1.0)", "more than 1"]),
        ({"scaling": "yarn", "factor": 4.0}, ["rope.original_length (0)"]),
        (
            {"scaling": "linear", "factor": 4.0, "original_length": 9},
            ["rope.original_length (9)", "'linear'"],
        ),
        (
            {
                "scaling": "yarn",
                "factor": 4.0,
                "original_length": 9,
                "beta_slow": 40.0,
            },
            ["rope.beta_slow (40.0)", "rope.beta_fast (32.0)"],
        ),
        (
            {
                "scaling": "llama3",
                "factor": 4.0,
                "original_length": 9,
                "high_freq_factor": 0.5,
            },
            ["rope.low_freq_factor (1.0)", "rope.high_freq_factor (0.5)"],
        ),
        (
            {
                "scaling": "yarn",
                "factor": 4.0,
                "original_length": 9,
                "attention_factor": -1.0,
            },
            ["rope.attention_factor (-1.0)"],
        ),
        ({"theta": 0.5}, ["rope.theta (0.5)"]),
    ],
)
def test_rope_errors(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Rope(**changes).validate()
    assert all(part in str(error.value) for part in parts), str(error.value)


@both
def test_rope_of_the_run(kind: str) -> None:
    args = _args(kind, False)
    rope = Rope("yarn", 5e5, 16.0, 1024)
    rope.validate()
    for _ in range(2):  # once or twice, the same
        rope.apply(args)
        assert args.rope_scaling == RopeScaling("yarn", 16.0, 1024)
        assert (args.rope_theta, args.max_seq_len) == (5e5, 16384)
    Rope().apply(args)
    assert args.rope_scaling.kind == "yarn"
