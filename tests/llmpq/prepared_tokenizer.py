"""What a tokenizer's process imports, without torch as there, for `tests.llmpq.forked_tokenizers`.

transformers says once on stderr that torch is not there, which the tokenizer's process has closed.
"""

import io
import sys
from contextlib import redirect_stderr

sys.modules["torch"] = None  # type: ignore[assignment]
with redirect_stderr(io.StringIO()):
    from jinja2.ext import loopcontrols  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401
