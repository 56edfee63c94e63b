"""`jaxzero report` and `jaxzero plan`: what training would take, without training.

In: the `Report` and `Plan` settings. Out: tables, and a plot on request. Needs the extra `train`.
"""

from .plan import plan as plan
from .report import report as report
