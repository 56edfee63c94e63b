"""Write docs/reference/cli.md from the output of `--help` of every command.

    python docs/_hooks/cli.py            # needs jaxzero installed
    python docs/_hooks/cli.py --check    # only compare; exit status 1 if the page is out of date

The page is committed, so that building the site needs neither JAX nor tyro.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

_PAGE = Path(__file__).resolve().parents[1] / "reference" / "cli.md"
_HEAD = """\
# Command line

<!-- Written by docs/_hooks/cli.py from the commands' own help. -->

`jaxzero` has these commands. Every flag is a field of a dataclass in `jaxzero/jobs/`,
`jaxzero/commands/` or `jaxzero/launch/`; `jaxzero COMMAND --help` prints the same text. The
statuses with which the commands end are listed under [exit codes](exit_codes.md).
"""


def main() -> int:
    page = _page()
    if "--check" in sys.argv[1:]:
        if _PAGE.read_text() == page:
            return 0
        print("docs/reference/cli.md is out of date: run python docs/_hooks/cli.py")
        return 1
    _PAGE.write_text(page)
    return 0


def _page() -> str:
    usage = re.search(r"\{([a-z,]+)\}", _help())
    assert usage, "jaxzero --help names no commands"
    parts = [_HEAD]
    for command in usage[1].split(","):
        parts.append(_section(command, _help(command)))
    return "\n".join(parts)


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
