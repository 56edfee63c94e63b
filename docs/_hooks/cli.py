"""Write docs/reference/cli*.md from the output of `--help` of every command.

    python docs/_hooks/cli.py            # needs jaxzero installed
    python docs/_hooks/cli.py --check    # only compare; exit status 1 if a page is out of date

The pages are committed, so that building the site needs neither JAX nor tyro.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1] / "reference"
_PAGES = {  # title and commands of each; commands that are new go to the first
    "cli.md": ("Command line", ()),
    "cli_train.md": ("Command line: train", ("train",)),
    "cli_plan.md": ("Command line: plan, report, verify", ("plan", "report", "verify")),
}
_NOTE = "<!-- Written by docs/_hooks/cli.py from the commands' own help. -->"
_HEAD = """
`jaxzero` has these commands: [`train`](cli_train.md); [`plan`, `report` and `verify`](cli_plan.md);
and those below. Every flag is a field of a dataclass in `jaxzero/jobs/`, `jaxzero/commands/` or
`jaxzero/launch/`; `jaxzero COMMAND --help` prints the same text. The statuses with which the
commands end are listed under [exit codes](exit_codes.md).
"""


def main() -> int:
    pages = _pages()
    if "--check" not in sys.argv[1:]:
        for name, page in pages.items():
            (_FOLDER / name).write_text(page)
        return 0
    old = [name for name, page in pages.items() if (_FOLDER / name).read_text() != page]
    if old:
        print(f"{', '.join(old)}: out of date; run python docs/_hooks/cli.py")
    return 1 if old else 0


def _pages() -> dict[str, str]:
    """Each page of `_PAGES`, by name."""
    usage = re.search(r"\{([a-z,]+)\}", _help())
    assert usage, "jaxzero --help names no commands"
    elsewhere = {command for _, commands in _PAGES.values() for command in commands}
    rest = tuple(command for command in usage[1].split(",") if command not in elsewhere)
    pages = {}
    for name, (title, commands) in _PAGES.items():
        head = f"# {title}\n\n{_NOTE}\n" + ("" if commands else _HEAD)
        parts = [_section(command, _help(command)) for command in commands or rest]
        pages[name] = "\n".join([head, *parts])
    return pages


def _help(*arguments: str) -> str:
    """What a command prints: boxes, one below the other at this width."""
    from jaxzero import cli

    os.environ["COLUMNS"] = "80"
    os.environ["NO_COLOR"] = "1"
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*arguments, "--help"])
    printed.seek(0)
    return printed.read()


def _section(command: str, text: str) -> str:
    """A command as Markdown: what it does, then a list of definitions for each group of flags."""
    description, boxes = text.split("╭", 1)
    usage, *description = description.split("\n\n")
    lines = [f"## jaxzero {command}\n", f"```text\n{usage.removeprefix('usage: ').strip()}\n```\n"]
    lines += [_escaped(part.strip()) + "\n" for part in description if part.strip()]
    for box in boxes.split("╭"):
        title, *rows = box.splitlines()
        title = title.strip(" ─╮").capitalize()
        entries, before = _entries(rows)
        if entries:
            lines.append(f"### {title} {{ #{command}-{title.lower().replace(' ', '-')} }}\n")
            if before:
                lines.append(_escaped(before) + "\n")
            lines += [f"`{flag}`\n:   {_escaped(meaning)}\n" for flag, meaning in entries]
    return "\n".join(lines)


def _entries(rows: list[str]) -> tuple[list[tuple[str, str]], str]:
    """The flags of a box, each with what it means; and the text above them."""
    rows = [row.strip().strip("│").rstrip() for row in rows]
    rows = [row for row in rows if row.strip() and not set(row.strip()) <= set("╰╯")]
    rules = [i for i, row in enumerate(rows) if set(row.strip()) == {"─"}]
    first = rules[0] + 1 if rules else 0
    entries: list[list[str]] = []
    for row in rows[first:]:
        flag = re.match(r" (\S.*?)(?: {2,}(\S.*))?$", row)
        if flag:
            entries.append([flag[1], flag[2] or ""])
        elif entries and not row.startswith("╰"):
            entries[-1][1] = f"{entries[-1][1]} {row.strip()}".strip()
    known = [(flag, meaning) for flag, meaning in entries if not flag.startswith("-h,")]
    return known, " ".join(row.strip() for row in rows[: max(first - 1, 0)])


def _escaped(text: str) -> str:
    return re.sub(r"(?<!`)<|\*", lambda found: "\\" + found[0], text)


if __name__ == "__main__":
    sys.exit(main())
