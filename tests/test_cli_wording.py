"""Messages of the package, as the command line words them."""

from pathlib import Path

import pytest
from diskbuf_tools import cli
from diskbuf_tools.wording import in_shell_words

import diskbuf


def test_lines_become_one_with_something_between_them() -> None:
    assert in_shell_words("a differs from b.\n  lanes: 2, not 3\nGive lanes=1 to put lanes one after another.") == (
        "a differs from b. lanes: 2, not 3; Give --one-lane to put lanes one after another."
    )


def test_other_words_stay_as_they_are() -> None:
    text = "leaf 'observation/camera' must be uint8 [4], got float32 [4]. Cast it, or create the store with that spec."
    assert in_shell_words(text) == text


@pytest.mark.parametrize("verb", ["info", "verify", "stats", "tail"])
def test_a_wrong_path_is_told_without_python(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, str(tmp_path / "none.zarr")]) == 1
    err = capsys.readouterr().err
    assert err == f"diskbuf: cannot open {tmp_path}/none.zarr: there is nothing at that path. Check the path.\n"


def test_a_store_in_use_is_told_without_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with diskbuf.UniformReplayBuffer({"x": diskbuf.ArraySpec([], "int64")}, path=tmp_path / "a"):
        assert cli.main(["delete", str(tmp_path / "a"), "--yes"]) == 1
    err = capsys.readouterr().err
    assert "diskbuf.open" not in err
    assert "has it open" in err


def test_a_misspelt_verb_is_asked_back_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hed", "a"]) == 2
    assert capsys.readouterr().err == "diskbuf: No such command 'hed'. Did you mean 'head'? See diskbuf --help.\n"


def test_help_has_a_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "-h"]) == 0
    assert "Example:" in capsys.readouterr().out


def test_no_help_text_is_taken_for_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["split", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "ids:LOW:HIGH" in out
