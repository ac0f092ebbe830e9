# Step 1 of RESUME.txt: the setting table of pycomm/options.py becomes pycomm/_settings.py.
s = open("pycomm/options.py").read()
a = s.index("_KIB = 1024")
b = s.index("_BY_FIELD = {")
moved = s[a:b].rstrip() + "\n"
moved = moved.replace("_OFF", "OFF")
new = '''"""The settings of a process group: their names, what they may be, and where they are looked for.

``pycomm.options`` reads them; nothing here looks at the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

OFF = "off"
''' + moved
open("pycomm/_settings.py", "w").write(new)
s = s[:a] + s[b:]
s = s.replace('_OFF = "off"\n', "").replace("_OFF", "OFF")
s = s.replace("from collections.abc import Callable, Iterable, Mapping\n", "from collections.abc import Iterable, Mapping\n")
s = s.replace("from typing import Any\n", "from typing import Any\n\nfrom pycomm._settings import OFF, SETTINGS, Setting\n", 1)
s = s.replace(
    '''            the same engine that serves CPU tensors; "nccl" hands them to NCCL, or is an error that
            says why not; "auto": NCCL where every rank has a GPU of its own and NCCL loads, else
            "tcp" (docs/cuda.md). ``PYCOMM_CUDA_MODE``.
''',
    '''            the same engine that serves CPU tensors. "auto", the default, is the same today
            (docs/cuda.md). ``PYCOMM_CUDA_MODE``.
''',
)
open("pycomm/options.py", "w").write(s)
p = "tools/check_layers.py"
t = open(p).read()
t = t.replace('    {"_build_info", "_C", "_version"},', '    {"_build_info", "_C", "_settings", "_version"},')
open(p, "w").write(t)
p = "tests/python/test_options.py"
t = open(p).read()
t = t.replace(
    '''    ("cuda_mode", "gpu",''',
    '''    ("cuda_mode", "nccl", "not available yet"),
    ("cuda_mode", "gpu",''',
)
open(p, "w").write(t)
