"""Define the tools of the command line; each is a function of a frozen dataclass of settings.

A command and the packages of its extra are imported on first use.

In: settings, made by the command line. Out: tables, texts and files. `cli` and scripts use
it.
"""

from typing import TYPE_CHECKING

from .._first_use import imported_on_first_use
from ._settings import Convert as Convert
from ._settings import Inspect as Inspect
from ._settings import Plan as Plan
from ._settings import Report as Report
from ._settings import Sample as Sample
from ._settings import Verify as Verify

if TYPE_CHECKING:
    from ._convert import convert as convert
    from ._decoder_job import decoder_job as decoder_job
    from ._inspect import inspect as inspect
    from ._plan import plan as plan
    from ._report import report as report
    from ._sample import sample as sample
    from ._verify import verify as verify

__getattr__ = imported_on_first_use(
    __name__,
    {
        "convert": ("_convert", "torch"),
        "decoder_job": ("_decoder_job", "torch"),
        "inspect": ("_inspect", "torch"),
        "plan": ("_plan", None),
        "report": ("_report", "torch"),
        "sample": ("_sample", "torch"),
        "verify": ("_verify", None),
    },
)
