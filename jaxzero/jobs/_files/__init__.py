"""`jaxzero inspect` and `jaxzero convert`: list a checkpoint, or convert it to another format.

In: paths. Out: tables and files. Needs the extra `torch`.
"""

from .convert import convert as convert
from .inspect import inspect as inspect
