"""`jaxzero report`, `plan` and `verify`: what training would take and compute, without training.

In: the `Report`, `Plan` and `Verify` settings. Out: tables, and a plot on request. Needs
the extra `train`.
"""

from .plan import plan as plan
from .report import report as report
from .verify import verify as verify
