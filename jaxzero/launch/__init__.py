"""`jaxzero launch`: run a script in several processes on one machine, simulating several hosts.

In: a command line. Out: its processes, and the exit status of the first that failed. Only `cli`
uses it; it imports no JAX.
"""

from ._launch import Launch as Launch
from ._launch import launch as launch
