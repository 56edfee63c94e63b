"""Programs that are compiled and not run: for absent devices, what they send, what they would take.

In: a jitted function and structs, or the text of a scheduled module. Out: collectives, memory
traffic, and a timeline predicted from stated rates. Nothing here runs on a device.
"""

from .cost import Rates as Rates
from .timeline import timeline as timeline
