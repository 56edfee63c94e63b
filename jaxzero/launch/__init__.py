"""`jaxzero launch`: a script in several processes on one machine, as if they were on several."""

from ._launch import Launch as Launch
from ._launch import launch as launch
