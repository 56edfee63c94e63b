"""Analyse programs that are compiled but not run, also for devices that are not present.

In: a jitted function and structs, or the text of a scheduled module. Out: collectives, memory
traffic, and a timeline predicted from stated rates. Nothing here runs on a device.
"""

from .cost import Rates as Rates
from .host_memory import compile_with_host_memory as compile_with_host_memory
from .host_memory import on_abstract_mesh as on_abstract_mesh
from .instructions import Program as Program
from .instructions import parse as parse
from .timeline import Timeline as Timeline
from .timeline import durations as durations
from .timeline import timeline as timeline
