"""Analyse programs that are compiled but not run, also for devices that are not present.

In: a jitted function and `jax.ShapeDtypeStruct`s, or the text of a scheduled HLO module. Out: its
collectives, its memory traffic, and a timeline that is predicted from the rates of a machine.
Nothing here runs on a device.
"""

from .cost import Rates as Rates
from .host_memory import compile_with_host_memory as compile_with_host_memory
from .host_memory import on_abstract_mesh as on_abstract_mesh
from .instructions import Program as Program
from .instructions import parse as parse
from .timeline import Timeline as Timeline
from .timeline import durations as durations
from .timeline import timeline as timeline
