"""A Hugging Face model goes in, trains, and comes out as transformers loads it."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtraining_flex.models.hf_folder import hf_config, hf_names
from mtraining_flex.models.llama3 import Llama3, llama3_flavors
from mtraining_flex.models.qwen2 import Qwen2, qwen2_flavors
from mtraining_flex.models.rope import RopeScaling
from tests.distributed.launch import ROOT, Launched
from tests.distributed.train_worker import load_run
from tests.integration_tests.conftest import SPARSE, Plans

transformers = pytest.importorskip("transformers")

YARN = RopeScaling("yarn", 4.0, 64)
YARN_FLAGS = [
    "--rope.scaling=yarn",
    "--rope.factor=4",
    "--rope.original_length=64",
]


@dataclass(frozen=True)
class Model:
    name: str
    flavor: str
    sharded: bool  # FSDP over two ranks, or a ring of two
    flags: tuple[str, ...] = ()

    @property
    def args(self) -> Any:
        flavors: Any = {
            "mtraining_llama3": llama3_flavors,
            "mtraining_qwen2": qwen2_flavors,
        }
        return flavors[self.name][self.flavor]


MODELS = {
    "llama": Model("mtraining_llama3", "tiny", sharded=True),
    "llama_tied": Model("mtraining_llama3", "tiny_tied", sharded=False),
    "qwen_tied": Model("mtraining_qwen2", "tiny_tied", True, tuple(YARN_FLAGS)),
    "qwen": Model("mtraining_qwen2", "tiny", sharded=False),
}


def _theirs(args: Any, folder: Path) -> None:
    """A random model as one finds it: several files, with a tokenizer beside them."""
    config = hf_config(args, torch.float32, {"eos_token_id": 0})
    model_cls = getattr(transformers, config.pop("architectures")[0])
    torch.manual_seed(2)
    model = model_cls(model_cls.config_class(**config))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.2 if p.ndim == 1 else 0.05) + (p.ndim < 2))
    model.save_pretrained(folder, max_shard_size="600KB")
    for file in (ROOT / "mtraining_flex/data/tokenizer").glob("*.json"):
        shutil.copy(file, folder)


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    plans = Plans(corpus, tmp_path_factory.mktemp("hf"), 2)
    for name, model in MODELS.items():
        folder = plans.folder / f"from_{name}"
        _theirs(model.args, folder)
        flags = [
            f"--model.name={model.name}",
            f"--model.flavor={model.flavor}",
            f"--model.hf_assets_path={folder}",
            "--checkpoint.enable",
            "--checkpoint.initial_load_in_hf",
            "--checkpoint.last_save_in_hf",
            "--training.steps=1",
            *SPARSE,
            *model.flags,
        ]
        if model.sharded:
            flags.append("--parallelism.context_parallel_degree=1")
        plans.add(f"{name}_still", *flags, "--optimizer.lr=0")
        plans.add(f"{name}_moved", *flags)
    return plans.launch()


def _saved(runs: Launched, run: str) -> Path:
    load_run(runs, run)
    return runs.folder / run / "checkpoint" / "step-1"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {k: v for file in files for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bit_identical(runs: Launched, name: str) -> None:
    before = _tensors(runs.folder / f"from_{name}")
    after = _tensors(_saved(runs, f"{name}_still"))
    assert set(after) == set(hf_names(MODELS[name].args).values())
    assert all(torch.equal(after[key], before[key]) for key in after)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_was_trained(runs: Launched, name: str) -> None:
    args, run = MODELS[name].args, f"{name}_moved"
    folder = _saved(runs, run)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    weight = state["model.embed_tokens.weight"]
    assert (
        state["lm_head.weight"] is weight
        or torch.equal(state["lm_head.weight"], weight)
    ) == args.enable_weight_tying
    # The numbers are those of the run, seen through the model's own functions.
    ours = load_run(runs, run)["parameters"]
    assert torch.equal(ours["tok_embeddings.weight"], weight)
    if args.enable_weight_tying:
        assert "output.weight" not in ours or torch.equal(ours["output.weight"], weight)
    if "yarn" in str(MODELS[name].flags):
        args = replace(args, rope_scaling=YARN)
    dense: Any = replace(args, attn_type="sdpa")
    twin = (Qwen2 if "qwen" in name else Llama3)(dense)
    twin.load_state_dict(ours, strict=not args.enable_weight_tying)
    tokens = torch.randint(4096, (1, 100))
    with torch.no_grad():
        expected, logits = twin(tokens), model(tokens).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    before = _tensors(runs.folder / f"from_{name}")["model.norm.weight"]
    assert not torch.equal(state["model.norm.weight"], before), "nothing was trained"


@pytest.mark.parametrize("name", MODELS)
def test_what_stands_beside_the_weights(runs: Launched, name: str) -> None:
    folder = _saved(runs, f"{name}_moved")
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == 0
    if "yarn" in str(MODELS[name].flags):
        assert config["rope_scaling"]["factor"] == 4.0
        assert config["max_position_embeddings"] == 256
    policy = json.loads((folder / "sparse_attention.json").read_text())
    assert policy["sparse_attention"]["budget"] == "top_k"
    assert policy["sparse_attention"]["num_slash"] == 4
    assert policy["ring"]["layout"] == "striped" and policy["seq_len"] == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("def f(x):").input_ids).strip() == "def f(x):"
    assert (folder / "generation_config.json").exists()
    assert not list(folder.glob("*.part"))
