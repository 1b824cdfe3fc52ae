"""A run that goes wrong stops, says what is wrong, and loses nothing.

Two ranks, compiled blocks, selective checkpointing, FSDP2, a checkpoint at every step.
"""

import re
from pathlib import Path

import pytest

from recipes import replay
from tests.distributed.launch import Launched, launch
from tests.distributed.sentinel_worker import WRONG_STEP
from tests.distributed.train_worker import load_run, save_plan
from tests.integration_tests.conftest import COMPILED, SPARSE, Plans

RUN = [*SPARSE, *COMPILED, "--sentinel.every=2", "--training.steps=6"]


@pytest.fixture(scope="module")
def launched(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    plans = Plans(corpus, tmp_path_factory.mktemp("sentinel"), 2)
    checkpoint = ["--checkpoint.enable", "--checkpoint.interval=1"]
    plans.add("wrong", *RUN, *checkpoint)
    folder = f"--job.dump_folder={plans.folder / 'wrong'}"
    plans.add("goes_on", *RUN, *checkpoint, folder)
    save_plan(plans.folder, plans.runs)
    return launch("tests.distributed.sentinel_worker", 2, plans.folder)


def test_all_ranks_stop_with_one_message(launched: Launched) -> None:
    launched.check("wrong")
    messages = [(launched.folder / f"message.rank{r}").read_text() for r in (0, 1)]
    assert len({text.split(" Saved:")[0] for text in messages}) == 1
    expected = (
        rf"sentinel: step {WRONG_STEP}, layer \d, head \d .* differs by .*, "
        r"more than .*, on ranks \[[01, ]+\] of the ring of 2 \(processes \[[01, ]+\]\)"
    )
    assert re.match(expected, messages[0]), messages[0]


def test_the_last_checkpoint_is_kept_and_the_run_goes_on(launched: Launched) -> None:
    result = load_run(launched, "goes_on")
    assert result["steps"] == [4, 5, 6]


def test_what_is_left_can_be_replayed(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    launched.check("wrong")
    (folder,) = (launched.folder / "wrong" / "sentinel").iterdir()
    assert folder.name.startswith(f"step_{WRONG_STEP}_layer_")
    assert replay.main([str(folder)]) == 0  # the transport was wrong, not the code
    assert "The new result is right" in capsys.readouterr().out


def test_the_log_shows_each_check(launched: Launched) -> None:
    logs = "".join(p.read_text() for p in launched.folder.glob("logs/**/stdout.log"))
    start = "sentinel: start-up check of 128 tokens on 2 ranks: needle pattern 0"
    assert logs.count(start) == 2  # of two runs, by one rank
    steps = re.findall(r"sentinel: step (\d+), layer (\d), head \d, (\w+): ", logs)
    for number, layer in (("1", "0"), ("2", "1"), ("6", "1")):
        assert (number, layer, "forward") in steps and (
            number,
            layer,
            "backward",
        ) in steps
    # Of the wrong run and of the one that goes on.
    wrong = [step for step in steps if step[0] == str(WRONG_STEP)]
    assert len(wrong) in (2, 3)
    assert {number for number, _, _ in steps} == {"1", "2", "4", "6"}
