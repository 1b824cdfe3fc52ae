"""The plan's memory against real steps of the trainer, eager and compiled, on a CPU."""

import json
from pathlib import Path

import pytest

from recipes import plan
from recipes.planning.measure import CPU_CASES


def test_predicted_memory_is_what_a_step_allocates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To 3%, of which the command allows 10. No GPU: its time is not compared."""
    file = tmp_path / "measured.json"
    code = plan.main(["--measure", "--device=cpu", f"--json={file}"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "memory alone is compared" in out and "All predictions hold." in out
    results = json.loads(file.read_text())["results"]
    assert [each["case"] for each in results] == [case.name for case in CPU_CASES]
    moments = [each["predicted_moment"] for each in results]
    assert moments == ["last block", "loss", "loss"]
    for each in results:
        # Parameters and moments alone would not be near it.
        assert each["predicted_bytes"] == pytest.approx(
            each["measured_bytes"], rel=0.03
        )
        assert each["blocks"][0] > 0 and each["blocks"][1] > 0
