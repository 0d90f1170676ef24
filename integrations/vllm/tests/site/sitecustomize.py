"""On the path of every process of the tests: vLLM's V2 runner on a CPU.

The runner's kernels are Triton's, which its interpreter runs anywhere. vLLM asks which driver there
is before it believes that there is Triton, so a driver by the name of this device is put there.
"""

import os
from types import SimpleNamespace


class Driver:
    @staticmethod
    def is_active() -> bool:
        return True


if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton import backends
    except ImportError:  # pip, in an environment that is being made
        pass
    else:
        backends.backends.setdefault("cpu", SimpleNamespace(driver=Driver, compiler=None))
