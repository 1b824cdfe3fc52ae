"""Documents become sequences: nothing repeated, nothing lost, resume is bitwise."""

import json
import logging
import pickle
import random
import re
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig

from mtraining_flex.data import TOKENIZER_DIR
from mtraining_flex.data.corpus import (
    SKIPPED_DIRS,
    source_documents,
    stdlib_documents,
)
from mtraining_flex.data.loader import (
    TextSequences,
    build_dataloader,
    build_validation_dataloader,
)
from mtraining_flex.data.text import load_documents
from recipes.train_tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer

SEQ_LEN = 64
UNICODE = "naïve Ω ≤ 中文 🙂 \u202e\x00\r\n\tכ"


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """Keep the `datasets` cache of these tests out of the home directory."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf"))
    )
    datasets.disable_progress_bars()
    yield
    patch.undo()


@pytest.fixture(scope="module")
def tokenizer():
    return HuggingFaceTokenizer(str(TOKENIZER_DIR))


def make_texts(num: int, seed: int = 0) -> list[str]:
    """Different documents, from shorter to far longer than a sequence."""
    rng = random.Random(seed)
    return [
        f"document {i} " + " ".join(str(rng.random()) for _ in range(rng.randrange(40)))
        for i in range(num)
    ]


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    rows = [json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)]
    path.write_text("".join(rows), encoding="utf-8")
    return path


def as_documents(texts: list[str]) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"text": text} for text in texts])


def make_documents(kind: str, folder: Path) -> datasets.Dataset:
    """30 documents: by index, or streamed from one .jsonl, two, or a .parquet."""
    texts = make_texts(30)
    if kind == "map":
        return as_documents(texts)
    if kind == "parquet":
        path = str(folder / "rows.parquet")
        as_documents(texts).to_parquet(path, batch_size=4)  # several row groups
        return load_documents("local", path, streaming=True)
    files = 1 if kind == "stream" else 2
    for i in range(files):
        write_jsonl(folder / f"{i}.jsonl", texts[i::files])
    return load_documents("local", str(folder), streaming=True)


def job(section: str = "training", **settings) -> JobConfig:
    config = JobConfig()
    for name, value in settings.items():
        target = getattr(config, section)
        *parents, leaf = name.split("__")
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, leaf, value)
    return config


def take(iterable, num: int) -> list:
    iterator = iter(iterable)
    return [next(iterator) for _ in range(num)]


def assert_same(left: list, right: list) -> None:
    assert len(left) == len(right)
    for (a, a_labels), (b, b_labels) in zip(left, right, strict=True):
        assert torch.equal(a["input"], b["input"]) and torch.equal(a_labels, b_labels)


# ---- the line of tokens -------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("dp", [1, 2])
def test_200_steps_repeat_and_lose_nothing(tokenizer, dp, seed):
    texts = make_texts(40)
    documents = as_documents(texts)
    encoded = [tokenizer.encode(text, add_bos=True, add_eos=True) for text in texts]
    seen = []
    for rank in range(dp):
        sequences = TextSequences(
            documents,
            tokenizer,
            SEQ_LEN,
            dp_rank=rank,
            dp_world_size=dp,
            shuffle_seed=seed,
        )
        sequences.record = []
        loader = ParallelAwareDataloader(sequences, rank, dp, batch_size=2)
        batches = take(loader, 200)
        line = torch.cat([batch["input"].flatten() for batch, _ in batches])
        labels = torch.cat([batch.flatten() for _, batch in batches])
        assert line.dtype == labels.dtype == torch.int64
        # Each token is the label of the one before it, within and between sequences.
        assert torch.equal(line[1:], labels[:-1])

        spans = [span for sequence in sequences.record for span in sequence]
        assert [sum(s.stop - s.start for s in seq) for seq in sequences.record] == [
            SEQ_LEN
        ] * 400
        origin = [t for s in spans for t in encoded[s.document][s.start : s.stop]]
        assert line.tolist() == origin
        # The spans of a document follow each other from its first to its last token,
        # and each epoch has each document of the share once.
        orders: dict[int, list[int]] = {}
        end = 0
        for span in spans:
            assert span.start == end
            if span.start == 0:
                orders.setdefault(span.epoch, []).append(span.document)
            end = span.stop if span.stop < len(encoded[span.document]) else 0
        share = list(range(rank, 40, dp))
        assert len(orders) >= 2 and list(orders) == sorted(orders)
        for epoch, order in orders.items():
            assert len(set(order)) == len(order)
            if epoch < max(orders):
                assert sorted(order) == share
        assert (orders[0] == share) == (seed is None)
        assert (orders[0] == orders[1]) == (seed is None)
        seen.append({span.document for span in spans})
    assert sum(map(len, seen)) == len(set.union(*seen))


def test_context_parallel_peers_read_the_same(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(30))
    config = job(
        dataset="local", dataset_path=str(path), local_batch_size=2, seq_len=SEQ_LEN
    )
    # torchtitan gives the peers of a context-parallel group the same dp_rank.
    runs = [take(build_dataloader(2, r, tokenizer, config), 200) for r in (0, 0, 1, 1)]
    assert_same(runs[0], runs[1])
    assert_same(runs[2], runs[3])
    inputs = [
        {tuple(row.tolist()) for b, _ in run for row in b["input"]} for run in runs
    ]
    assert not inputs[0] & inputs[2]
    batch, labels = runs[0][0]
    assert list(batch) == ["input"]
    assert batch["input"].shape == labels.shape == (2, SEQ_LEN)


@pytest.mark.parametrize("kind", ["stream", "stream2", "parquet"])
def test_stream_shares_are_disjoint_and_complete(tokenizer, tmp_path, kind):
    documents = make_documents(kind, tmp_path)
    shares = []
    for rank in range(2):
        sequences = TextSequences(
            documents, tokenizer, 8, dp_rank=rank, dp_world_size=2, infinite=False
        )
        line = [t for batch, _ in sequences for t in batch["input"].tolist()]
        shares.append(tokenizer.decode(line, skip_special_tokens=False))
        shares[rank] = shares[rank].split(END_OF_TEXT)[:-1]
    assert not set(shares[0]) & set(shares[1])
    # Only the last document of a share can lack its tail.
    assert len(set(shares[0]) | set(shares[1])) >= 28
    assert set(shares[0]) | set(shares[1]) <= set(make_texts(30))


# ---- resume -------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("kind", ["map", "stream", "stream2", "parquet"])
def test_resume_equals_uninterrupted(tokenizer, tmp_path, kind, dp):
    documents = make_documents(kind, tmp_path)

    def loader() -> ParallelAwareDataloader:
        sequences = TextSequences(
            documents,
            tokenizer,
            SEQ_LEN,
            dp_rank=dp - 1,
            dp_world_size=dp,
            shuffle_seed=3,
        )
        return ParallelAwareDataloader(sequences, dp - 1, dp, batch_size=2)

    whole = take(loader(), 230)  # more than one epoch
    for stop in (0, 1, 2, 17, 101, 200):
        first = loader()
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        state = first.state_dict()
        second = loader()
        second.load_state_dict(state)
        iterator = iter(second)
        assert second.state_dict() == state  # before a first batch, too
        assert_same([next(iterator) for _ in range(30)], whole[stop : stop + 30])
    if kind == "map":
        assert first.dataset.state_dict()["epoch"] > 0


@pytest.mark.parametrize("kind", ["map", "stream", "stream2", "parquet"])
def test_resume_with_a_worker_process(tokenizer, tmp_path, kind):
    documents = make_documents(kind, tmp_path)

    def loader(workers: int) -> ParallelAwareDataloader:
        sequences = TextSequences(
            documents, tokenizer, SEQ_LEN, dp_rank=1, dp_world_size=2, shuffle_seed=0
        )
        return ParallelAwareDataloader(
            sequences, 1, 2, batch_size=2, num_workers=workers
        )

    whole = take(loader(0), 30)
    first = loader(1)
    assert_same(take(first, 13), whole[:13])
    second = loader(1)
    second.load_state_dict(first.state_dict())
    assert_same(take(second, 10), whole[13:23])


def test_state_is_small_and_outlives_a_longer_seq_len(tokenizer):
    documents = as_documents([" ".join(map(str, range(i, 40_000))) for i in range(2)])
    short = TextSequences(documents, tokenizer, 100)
    line = torch.cat([labels for _, labels in take(short, 3)])
    line = torch.cat([take(short, 1)[0][0]["input"][:1], line])
    take(short, 3)
    state = short.state_dict()
    assert len(pickle.dumps(state)) < 300
    assert state["token_idx"] == 300
    long = TextSequences(documents, tokenizer, 65_536)
    long.load_state_dict(state)
    sample, _ = take(long, 1)[0]
    assert len(pickle.dumps(long.state_dict())) < 300
    assert sample["input"][0] == line[-1]


@pytest.mark.parametrize("change", ["documents", "seed"])
def test_resume_on_other_data_is_refused(tokenizer, change):
    state = TextSequences(
        as_documents(make_texts(9)), tokenizer, SEQ_LEN, shuffle_seed=0
    ).state_dict()
    other = TextSequences(
        as_documents(make_texts(8 if change == "documents" else 9)),
        tokenizer,
        SEQ_LEN,
        shuffle_seed=1 if change == "seed" else 0,
    )
    with pytest.raises(ValueError, match="exclude_from_loading"):
        other.load_state_dict(state)


def test_resume_in_a_document_that_shrank_is_refused(tokenizer):
    state = {"epoch": 0, "document_idx": 0, "token_idx": 5000}
    sequences = TextSequences(as_documents(make_texts(9)), tokenizer, SEQ_LEN)
    sequences.load_state_dict({**sequences.state_dict(), **state})
    with pytest.raises(ValueError, match="token 5000"):
        next(iter(sequences))


# ---- finite passes ------------------------------------------------------------------


def test_validation_is_finite_counted_and_repeatable(tokenizer, tmp_path):
    texts = make_texts(37)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    config = job(
        "validation",
        dataset="local",
        dataset_path=str(path),
        local_batch_size=4,
        seq_len=SEQ_LEN,
    )
    counts = []
    for rank in range(2):
        loader = build_validation_dataloader(2, rank, tokenizer, config)
        first, second = list(loader), list(loader)
        assert_same(first, second)
        tokens = [len(tokenizer.encode(text, add_eos=True)) for text in texts[rank::2]]
        counts.append(sum(len(labels) for _, labels in first))
        assert counts[rank] == (sum(tokens) - 1) // SEQ_LEN
    assert counts[0] != counts[1]  # why a loop with collectives needs the minimum


def test_finite_pass_resumes_to_its_end(tokenizer):
    def loader() -> ParallelAwareDataloader:
        sequences = TextSequences(
            as_documents(make_texts(20)), tokenizer, SEQ_LEN, infinite=False
        )
        return ParallelAwareDataloader(sequences, 0, 1, batch_size=4)

    whole = list(loader())
    for stop in range(0, len(whole) + 1, 5):
        first, second = loader(), loader()
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        second.load_state_dict(first.state_dict())
        assert_same(list(second), whole[stop:])
        assert_same(list(second), whole)  # the pass after a resumed one starts over


# ---- BOS and EOS --------------------------------------------------------------------


def bos_tokenizer(folder: Path, template: bool) -> HuggingFaceTokenizer:
    """A tokenizer with BOS, which its template or torchtitan adds."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["some text"], trainer)
    if template:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    raw.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(str(folder))


@pytest.mark.parametrize("template", [False, True])
def test_one_bos_and_one_eos_for_each_document(tmp_path, template):
    tokenizer = bos_tokenizer(tmp_path, template)
    texts = ["one", "", "<s>two", "<s><s>three</s>", "four</s></s>", "fünf" * 30]
    sequences = TextSequences(as_documents(texts), tokenizer, 1, infinite=False)
    line = [batch["input"].item() for batch, _ in sequences]
    line.append(tokenizer.eos_id)  # the last token is a label only
    assert line.count(tokenizer.bos_id) == line.count(tokenizer.eos_id) == len(texts)
    starts = [i for i, token in enumerate(line) if token == tokenizer.bos_id]
    ends = [i for i, token in enumerate(line) if token == tokenizer.eos_id]
    assert starts == [0] + [end + 1 for end in ends[:-1]]


def test_our_tokenizer_adds_eos_alone(tokenizer):
    texts = make_texts(20)
    assert tokenizer.bos_id is None and tokenizer.eos_id == 0
    sequences = TextSequences(as_documents(texts), tokenizer, 1, infinite=False)
    line = [labels.item() for _, labels in sequences]
    assert line.count(tokenizer.eos_id) == 20


def test_tokenizer_without_eos_is_reported(tmp_path, caplog):
    bos_tokenizer(tmp_path, False)
    (tmp_path / "tokenizer_config.json").unlink()
    bare = HuggingFaceTokenizer(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        TextSequences(as_documents(["a"]), bare, 1)
    assert "no EOS" in caplog.text


# ---- the tokenizer ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [UNICODE, "", "  def f(x):\n\treturn x\n", "\n" * 9 + " " * 33, "a\r\nb"]
)
def test_tokenizer_is_lossless(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_of_the_repository(tokenizer):
    assert tokenizer.get_vocab_size() == 4096
    every_byte = "".join(map(chr, range(0x250)))
    assert tokenizer.decode(tokenizer.encode(every_byte)) == every_byte
    source = Path(json.__file__).read_text(encoding="utf-8")
    tokens = tokenizer.encode(source)
    assert tokenizer.decode(tokens) == source
    assert len(tokens) < len(source) / 2.5
    assert max(tokens) < 4096
    config = json.loads((TOKENIZER_DIR / "tokenizer_config.json").read_text())
    assert config["eos_token"] == config["pad_token"] == END_OF_TEXT


def test_training_a_tokenizer_is_deterministic(tmp_path):
    texts = make_texts(30) + [UNICODE * 5]
    for name in ("a", "b"):
        save_tokenizer(train_tokenizer(texts, vocab_size=400), tmp_path / name)
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in "ab"]
    assert files[0] == files[1]
    loaded = HuggingFaceTokenizer(str(tmp_path / "a"))
    assert loaded.get_vocab_size() == 400
    assert loaded.bos_id is None and loaded.eos_id == 0


# ---- the corpus ---------------------------------------------------------------------


def test_stdlib_is_long_sorted_and_has_no_tests(tokenizer):
    documents = stdlib_documents()
    names = documents["name"][:]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert {"argparse.py", "asyncio", "json"} <= set(names)
    texts = dict(zip(names, documents["text"][:], strict=True))
    assert sum(map(len, texts.values())) > 5_000_000
    assert len(tokenizer.encode(texts["asyncio"])) > 100_000
    assert texts["json"].startswith("# json/__init__.py\n")
    assert "\n# json/decoder.py\n" in texts["json"]
    paths = re.findall(r"^# (\S+/\S+\.py)$", "\n".join(texts.values()), re.MULTILINE)
    assert len(paths) > 300
    assert not any(set(path.split("/")[:-1]) & SKIPPED_DIRS for path in paths)


def test_source_documents_of_a_tree(tmp_path, caplog):
    files = {
        "b.py": "b = 1\n",
        "a/z.py": "z = 1\n",
        "a/__init__.py": "",
        "a/sub/m.py": "m = 'ü'\n",
        "a/tests/t.py": "t = 1\n",
        "test/t.py": "t = 1\n",
        "not-a-package/x.py": "x = 1\n",
        "site-packages/x.py": "x = 1\n",
        "notes.txt": "no\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "a/bad.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "latin.py").write_bytes(
        "# coding: latin-1\nx = 'ä'\n".encode("latin-1")
    )
    with caplog.at_level(logging.WARNING):
        documents = source_documents(tmp_path)
    assert documents == [
        {"name": "a", "text": "# a/sub/m.py\nm = 'ü'\n\n# a/z.py\nz = 1\n"},
        {"name": "b.py", "text": "# b.py\nb = 1\n"},
        {"name": "latin.py", "text": "# latin.py\n# coding: latin-1\nx = 'ä'\n"},
    ]
    assert "a/bad.py" in caplog.text


def test_stdlib_through_the_builder(tokenizer):
    config = job(dataset="stdlib", local_batch_size=1, seq_len=2048)
    batch, labels = take(build_dataloader(4, 3, tokenizer, config), 1)[0]
    assert batch["input"].shape == labels.shape == (1, 2048)
    config.debug.seed = 5
    other, _ = take(build_dataloader(4, 3, tokenizer, config), 1)[0]
    assert not torch.equal(batch["input"], other["input"])


# ---- local files and the hub --------------------------------------------------------


def write_mixed(folder: Path) -> dict[str, list[str]]:
    """Two documents in each format; returns the texts by suffix."""
    texts = {
        ".jsonl": ["json one", UNICODE],
        ".parquet": ["parquet one", UNICODE + "p"],
        ".txt": ["text\none\n\nwith lines\n", "text zwei ü"],
    }
    (folder / "deep").mkdir()
    write_jsonl(folder / "deep" / "a.jsonl", texts[".jsonl"], column="content")
    as_documents(texts[".parquet"]).to_parquet(str(folder / "b.parquet"))
    for i, text in enumerate(texts[".txt"]):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    (folder / ".hidden.txt").write_text("hidden")
    return texts


@pytest.mark.parametrize("streaming", [False, True])
def test_local_formats(tmp_path, streaming, caplog):
    texts = write_mixed(tmp_path)
    (tmp_path / "readme.md").write_text("not a document")

    def load(path) -> list[str]:
        documents = load_documents("local", str(path), streaming=streaming)
        assert isinstance(documents, datasets.IterableDataset) == streaming
        rows = list(documents)
        assert all(list(row) == ["text"] for row in rows)
        return [row["text"] for row in rows]

    assert load(tmp_path / "deep" / "a.jsonl") == texts[".jsonl"]
    assert load(tmp_path / "b.parquet") == texts[".parquet"]
    assert load(tmp_path / "1.txt") == texts[".txt"][1:]
    assert load(tmp_path / "*.txt") == texts[".txt"]
    assert load(tmp_path / "**" / "*.jsonl") == texts[".jsonl"]
    caplog.clear()
    assert load(tmp_path) == sum(texts.values(), [])
    assert "1 of 5 files" in caplog.text


def test_hub_reads_a_stream(tmp_path):
    # A folder stands in for a dataset id; the library treats both alike.
    write_jsonl(tmp_path / "train.jsonl", ["a", "b"])
    write_jsonl(tmp_path / "test.jsonl", ["c"], column="content")
    for path, expected in ((tmp_path, ["a", "b"]), (f"{tmp_path}::train", ["a", "b"])):
        documents = load_documents("hub", str(path))
        assert isinstance(documents, datasets.IterableDataset)
        assert [row["text"] for row in documents] == expected
    with pytest.raises(ValueError, match="training.dataset_path .*nosplit"):
        load_documents("hub", f"{tmp_path}:default:nosplit")


def test_hub_id_is_split_into_its_parts(monkeypatch):
    calls = []

    def load_dataset(path, config, split, streaming):
        calls.append((path, config, split, streaming))
        if streaming and path == "org/zip":
            raise NotImplementedError("no stream")
        return as_documents(["a"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for path in ("org/set", "org/set:en", "org/set:en:validation", "org/zip"):
        load_documents("hub", path)
    assert calls == [
        ("org/set", None, "train", True),
        ("org/set", "en", "train", True),
        ("org/set", "en", "validation", True),
        ("org/zip", None, "train", True),
        ("org/zip", None, "train", False),
    ]
    with pytest.raises(ValueError, match="id:config:split"):
        load_documents("hub", "a:b:c:d")


@pytest.mark.parametrize(
    "dataset, path, message",
    [
        ("c4", None, r"training\.dataset \('c4'\) must be one of \['stdlib'"),
        ("stdlib", "x", r"training\.dataset_path \('x'\)"),
        ("local", None, r"training\.dataset_path \(None\) must be set"),
        ("local", "", r"training\.dataset_path \(''\) must be set"),
        ("hub", None, r"training\.dataset_path \(None\) must be set"),
        ("local", "{}/no.txt", r"training\.dataset_path \('.*/no\.txt'\): no such"),
        ("local", "{}/no*", r"training\.dataset_path \('.*/no\*'\): matches no"),
        ("local", "{}/empty", r"training\.dataset_path \('.*empty'\): matches no"),
        ("local", "{}/a.csv", r"training\.dataset_path \('.*csv'\): .*\.jsonl"),
        ("local", "{}/cols.jsonl", r"columns \['id', 'body'\]"),
        ("local", "{}/number.jsonl", r"'text' .* int64, not text"),
        ("local", "{}/broken.jsonl", r"training\.dataset_path \('.*broken\.jsonl'\)"),
        (
            "local",
            "{}/latin.txt",
            r"training\.dataset_path \('.*latin\.txt'\): .*utf-8",
        ),
        ("local", "{}/blank.jsonl", r"training\.dataset_path \('.*blank\.jsonl'\)"),
    ],
)
def test_errors_name_the_setting(tmp_path, dataset, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("text\na\n")
    write_jsonl(tmp_path / "cols.jsonl", ["a"], column="body")
    (tmp_path / "number.jsonl").write_text('{"text": 1}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": \n')
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))
    (tmp_path / "blank.jsonl").write_text("")
    with pytest.raises(ValueError, match=message):
        load_documents(dataset, path and path.format(tmp_path))


def test_error_names_the_validation_section(tokenizer):
    with pytest.raises(ValueError, match=r"^validation\.dataset \('c4'\)"):
        config = job("validation", dataset="c4")
        build_validation_dataloader(1, 0, tokenizer, config)


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("infinite", [True, False])
def test_too_little_text_is_an_error_not_a_hang(tokenizer, tmp_path, kind, infinite):
    documents = make_documents(kind, tmp_path)
    sequences = TextSequences(
        documents, tokenizer, 10**6, dp_rank=1, dp_world_size=2, infinite=infinite
    )
    message = r"training\.seq_len \(1000000\).*degree \(2\) has \d{4,} tokens"
    with pytest.raises(ValueError, match=message):
        next(iter(sequences))


def test_exactly_enough_text_is_enough(tokenizer):
    text = make_texts(2)[1]
    num_tokens = len(tokenizer.encode(text, add_eos=True))
    documents = as_documents([text])
    exact = TextSequences(documents, tokenizer, num_tokens - 1, infinite=False)
    assert len(list(exact)) == 1
    for infinite in (True, False):
        short = TextSequences(documents, tokenizer, num_tokens, infinite=infinite)
        with pytest.raises(ValueError, match=f"has {num_tokens} tokens"):
            take(short, 2)


def test_fewer_documents_than_ranks(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"has 3 documents, .*degree \(4\)"):
        TextSequences(as_documents(["a"] * 3), tokenizer, 1, dp_world_size=4)
    stream = make_documents("stream", tmp_path)  # a stream's length shows at its end
    sequences = TextSequences(stream, tokenizer, 1, dp_rank=39, dp_world_size=40)
    with pytest.raises(ValueError, match="has 0 tokens"):
        next(iter(sequences))


def test_row_without_text(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n')
    documents = load_documents("local", str(path))
    with pytest.raises(ValueError, match="document 1 has no text"):
        list(TextSequences(documents, tokenizer, 1, infinite=False))


def test_more_than_one_worker_is_refused(tokenizer):
    config = job(dataset="stdlib", dataloader__num_workers=2)
    with pytest.raises(ValueError, match=r"num_workers \(2\) must be 0 or 1"):
        build_dataloader(1, 0, tokenizer, config)
