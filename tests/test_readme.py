"""The README's code blocks and commands, run as a reader would: top to bottom, in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SHELLS = ("sh", "bash", "shell", "console")
# Commands that set up the machine: looked at, not run.
SETUP = ("git", "cd", "make", "pip", "python", "python3", ".venv/bin/python")


class Block(NamedTuple):
    """A fenced code block of the README."""

    language: str
    section: str
    line: int
    text: str


def readme_blocks() -> list[Block]:
    assert README.is_file(), "README.md is missing"
    blocks: list[Block] = []
    section, opened, body = "", None, []
    for number, line in enumerate(README.read_text().splitlines(), start=1):
        fence = re.match(r"```(\w*)", line)
        if opened is None and line.startswith("#"):
            section = line.lstrip("# ")
        if fence and opened is None:
            opened, body = (fence[1], number + 1), []
        elif fence and opened is not None:
            blocks.append(Block(opened[0], section, opened[1], "\n".join(body)))
            opened = None
        elif opened is not None:
            body.append(line)
    assert opened is None, f"README.md:{opened[1]} opens a block that is never closed"
    return blocks


def readme_commands() -> list[str]:
    """Every command; where a block marks commands with `$ `, its other lines are output."""
    commands: list[str] = []
    for block in readme_blocks():
        if block.language in SHELLS:
            lines = block.text.replace("\\\n", " ").splitlines()
            marked = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            commands += [line for line in marked or lines if line.strip() and not line.lstrip().startswith("#")]
    return commands


def test_the_readme_has_code_and_commands() -> None:
    assert any(block.language == "python" for block in readme_blocks())
    assert readme_commands()


def test_the_setup_commands_name_things_that_exist() -> None:
    targets = set(re.findall(r"^([\w.]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for command in readme_commands():
        words = shlex.split(command, comments=True)
        if words[:1] == ["make"]:
            assert set(words[1:]) <= targets, f"{command!r} names no target of the Makefile"
        elif "pip" in words and "install" in words:
            for word in words[words.index("install") + 1 :]:
                package = re.fullmatch(r"(?P<name>[\w.-]+)(\[(?P<extras>[\w,-]+)\])?( @ .+)?", word)
                if word.startswith("-"):
                    continue
                assert package, f"{command!r}: {word!r} is not a package"
                assert package["name"] in (".", project["name"]), f"{command!r} installs something else"
                extras = set((package["extras"] or "").split(",")) - {""}
                assert extras <= set(project["optional-dependencies"]), f"{command!r} names an extra that isn't there"
        elif words and words[0].endswith(("python", "python3")):
            assert (ROOT / words[1]).is_file(), f"{command!r} runs a file that isn't there"


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespaces: dict[str, dict[str, object]] = {}
    for block in readme_blocks():
        if block.language == "python":
            namespace = namespaces.setdefault(block.section, {"__name__": "__main__"})
            # The empty lines in front make a traceback show the README's own line numbers.
            exec(compile("\n" * (block.line - 1) + block.text, str(README), "exec"), namespace)
    namespaces.clear()

    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in readme_commands():
        if shlex.split(command, comments=True)[0] not in SETUP:
            run = subprocess.run(
                command, shell=True, env=os.environ | {"PATH": scripts}, capture_output=True, text=True, check=False
            )
            assert run.returncode == 0, f"$ {command}\n{run.stdout}{run.stderr}"
