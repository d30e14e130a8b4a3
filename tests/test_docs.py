"""What the docs tell people to type: code that runs, commands and options that there are."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from longspan import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WHOLE = ["README.md", "docs/decoding.md"]  # pages whose first code needs nothing that is not there


def blocks(page: Path, *languages: str) -> list[str]:
    """The text between fences of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [text for language, text in found if language in languages]


def commands(page: Path) -> list[list[str]]:
    """Every `longspan` command of a page, in words: those in blocks, and those in a line of text."""
    lines = [line for text in blocks(page, "sh", "console", "") for line in text.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(longspan [^`]+)`", page.read_text(encoding="utf-8"))
    typed = [line.removeprefix("$ ") for line in lines]
    return [shlex.split(line, comments=True) for line in typed if line.startswith("longspan ")]


def complaint(words: list[str]) -> str | None:
    """What is wrong with a command, if anything: a subcommand or an option that there is not."""
    command, rest = get_command(cli.app), words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"there is no `{rest[0]}`"
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in rest if re.match("--?[a-z]", word) and word.split("=")[0] not in known | {"--help"}]
    return f"it takes no {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", WHOLE)
def test_code_of_the_docs_runs(page: str) -> None:
    torch.manual_seed(0)
    exec(compile(blocks(ROOT / page, "python")[0], page, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_docs_exist(page: Path) -> None:
    wrong = [f"{shlex.join(words)}: {found}" for words in commands(page) if (found := complaint(words))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        ("longspan lm perplexity RUN --length 512", None),
        ("longspan lm perplexity RUN --longness 512", "it takes no --longness"),
        ("longspan lm perplex RUN", "there is no `perplex`"),
    ],
)
def test_what_is_wrong_with_a_command_is_seen(typed: str, wrong: str | None) -> None:
    assert complaint(typed.split()) == wrong


def test_commands_are_found_in_blocks_and_in_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Say `longspan demo` or\n\n```sh\nlongspan sweep a \\\n    --seeds 3  # many\ncd elsewhere\n```\n"
        "\n```console\n$ longspan table\n```\n"
    )
    assert commands(page) == [["longspan", "sweep", "a", "--seeds", "3"], ["longspan", "table"], ["longspan", "demo"]]
