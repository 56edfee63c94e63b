"""`jaxzero sample`: continue texts with a decoder, and print them as they are written.

In: a directory with a decoder and its tokenizer, and prompts. Out: text. Needs the extra `torch`.
"""

from .sample import sample as sample
