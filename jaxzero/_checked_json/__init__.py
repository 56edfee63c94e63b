"""Read JSON that others wrote: every value is checked against the kind that its key may hold.

In: the path of a JSON file, and a table of kinds by key. Out: values of the right type and range,
or a `ValueError` that names the file and the key. The readers of `config.json` and `ds_config.json`
use it.
"""

from .file import read_json as read_json
from .keys import JsonKeys as JsonKeys
from .kinds import ANYTHING as ANYTHING
from .kinds import FLAG as FLAG
from .kinds import OBJECT as OBJECT
from .kinds import TEXT as TEXT
from .kinds import Kind as Kind
from .kinds import exactly as exactly
from .kinds import integer as integer
from .kinds import list_of as list_of
from .kinds import number as number
from .kinds import one_of as one_of
from .kinds import optional as optional
from .kinds import shown as shown
from .kinds import whole as whole
from .kinds import zero_or as zero_or
