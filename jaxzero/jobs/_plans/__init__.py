"""`jaxzero report`: what would be split how, and when it would travel, without training.

In: the `Report` settings. Out: tables, and a plot on request. Needs the extra `train`.
"""

from .report import report as report
