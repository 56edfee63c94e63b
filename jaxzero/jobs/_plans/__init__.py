"""`jaxzero report`: how arrays would be split and when they would be sent, without training.

In: the `Report` settings. Out: tables, and a plot on request. Needs the extra `train`.
"""

from .report import report as report
