"""`jaxzero launch`: run a script in several processes on one machine, simulating several hosts."""

from ._launch import Launch as Launch
from ._launch import launch as launch
