"""`jaxzero inspect` and `jaxzero convert`: what a checkpoint holds, and another format of it.

In: paths. Out: tables and files. Needs the extra `torch`.
"""

from .convert import convert as convert
from .inspect import inspect as inspect
