"""Draw the pictures of How it works.

python docs/_pictures/draw.py            # writes docs/how_it_works/images/*.svg
python docs/_pictures/draw.py --check    # only compare; exit status 1 if one is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

import gather_and_reduce
import pipeline
import program
import step
import timeline

_FOLDER = Path(__file__).resolve().parents[1] / "how_it_works" / "images"
_PICTURES = {
    "step": step.draw,
    "program": program.draw,
    "gather": gather_and_reduce.draw_gather,
    "reduce": gather_and_reduce.draw_reduce,
    "pipeline": pipeline.draw,
    "timeline": timeline.draw,
}


def main() -> int:
    stale = []
    for name, draw in _PICTURES.items():
        file, svg = _FOLDER / f"{name}.svg", draw().svg()
        if "--check" in sys.argv[1:]:
            stale += [file.name] * (not file.exists() or file.read_text() != svg)
        else:
            file.write_text(svg)
    if stale:
        print(f"Out of date: {', '.join(stale)}. Run python docs/_pictures/draw.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
