"""Let the processes of a run communicate outside of collectives, and define their exit codes.

In: small texts and files. Out: values exchanged over JAX's coordination service, exit codes, and
files and folders that are written as a whole or not at all. Any package may use it; nothing here
uses arrays.
"""

from .atomic import all_write as all_write
from .atomic import flush_tree as flush_tree
from .atomic import hidden as hidden
from .atomic import new_directory as new_directory
from .atomic import new_file as new_file
from .atomic import put_in_place as put_in_place
from .atomic import remove as remove
from .coordination import all_succeed as all_succeed
from .coordination import barrier as barrier
from .coordination import describe_process as describe_process
from .coordination import detect_cluster as detect_cluster
from .coordination import exchange as exchange
from .coordination import exchange_json as exchange_json
from .coordination import has_backend as has_backend
from .coordination import hosts as hosts
from .coordination import meet_processes as meet_processes
from .coordination import notices_sigterm as notices_sigterm
from .coordination import of_first as of_first
from .coordination import process_count as process_count
from .coordination import process_index as process_index
from .coordination import publish as publish
from .coordination import published as published
from .coordination import set_hosts as set_hosts
from .exit_codes import DIVERGED as DIVERGED
from .exit_codes import FILE_ERROR as FILE_ERROR
from .exit_codes import INTERRUPTED as INTERRUPTED
from .exit_codes import MISTAKE as MISTAKE
from .exit_codes import PEER_LOST as PEER_LOST
from .exit_codes import STOPPED as STOPPED
from .exit_codes import describe as describe
from .exit_codes import exit_status as exit_status
