"""Report the bytes that devices and hosts hold, the bytes on each link, and a plan's timeline.

In: layouts and a `Plan`. Out: a `Report`, which prints five lines and the tables that are asked
for. Nothing is changed or run.
"""

from .data import Traffic as Traffic
from .local_report import LocalReport as LocalReport
from .report import Report as Report
from .report import make_report as make_report
from .text_table import TextTable as TextTable
from .timeline import activation_bytes as activation_bytes
from .timeline import live_bytes as live_bytes
from .timeline import spans as spans
