"""Simulated devices and ranks, for preparing a step for a cluster on a laptop.

torch's own tools reach half of the way: a fake tensor may say that it is on a GPU, but autograd,
autocast and the choice of attention's kernels ask for the device. Here a process is started in
which a small library answers them. No kernel runs and no value exists; what is captured is the
graph that the device would get.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from graphopt.errors import PretendError
from graphopt.testing.absent import bootstrap
from graphopt.testing.absent.library import built, torch_libraries


@dataclass(frozen=True)
class Pretended:
    """Runs functions and scripts with a device and ranks that do not exist; see `pretended`.

    Attributes:
        capability: the compute capability of the device.
        ranks: of the default process group, of which this is rank 0.

    >>> from graphopt.testing import Pretended
    >>> Pretended((9, 0), ranks=2).run(torch.cuda.get_device_capability)
    (9, 0)
    """

    capability: tuple[int, int]
    ranks: int = 1

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function in a fresh process.

        Args:
            function: it, its arguments and what it returns go through pickle. All tensors that it
                makes are fake; ``device="cuda"`` makes them of the pretended device.

        Returns:
            What the function returns.

        Raises:
            PretendError: there is no compiler, the result cannot be sent, or the process ended.
            Exception: whatever the function raises, with the traceback of its process.

        >>> from graphopt.testing import pretended
        >>> pretended("cuda:90", ranks=64).run(torch.distributed.get_world_size)
        64
        """
        preparation = spawn.get_preparation_data("pretended")
        del preparation["authkey"]  # of processes that talk to each other
        call = pickle.dumps((function, args, kwargs))
        return self._run({"preparation": preparation, "call": call})

    def script(self, path: str | Path, *arguments: str) -> None:
        """Runs a script as ``python path arguments…`` in a fresh process; see `run`."""
        self._run({"script": str(path), "arguments": list(arguments)})

    def _run(self, job: dict[str, Any]) -> Any:
        libraries = [*map(str, torch_libraries()), str(built())]
        job |= {"libraries": libraries, "path": sys.path, "ranks": self.ranks}
        job["capability"] = self.capability
        with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
            given, found = Path(folder) / "job", Path(folder) / "result"
            given.write_bytes(pickle.dumps(job))
            command = [sys.executable, bootstrap.__file__, str(given), str(found)]
            done = subprocess.run(command, check=False)
            if not found.exists():
                raise PretendError(f"its process ended with {done.returncode}")
            return _received(*pickle.loads(found.read_bytes()))


def _received(succeeded: bool, result: Any) -> Any:
    if succeeded:
        return result
    error, text = result
    if error is None:
        raise PretendError(f"its process raised\n{text}")
    raise error from PretendError(f"in its process:\n{text}")


def pretended(device: str, ranks: int = 1) -> Pretended:
    """Returns an environment with a device, and ranks, that do not exist.

    Args:
        device: ``"cuda:90"``: CUDA of compute capability 9.0, as for `compile_triton`.
        ranks: how many processes the training has.

    Raises:
        PretendError: `device` is of another form, or there is no rank.

    >>> from graphopt.testing import pretended
    >>> pretended("cuda:80", ranks=8)
    Pretended(capability=(8, 0), ranks=8)
    """
    form = re.fullmatch(r"cuda:(\d+)(\d)", device)
    if form is None:
        raise PretendError(
            f"{device!r} is no device that can be pretended",
            hint='"cuda:" and a compute capability: "cuda:80" is an A100, "cuda:90" an H100',
        )
    if ranks < 1:
        raise PretendError(f"{ranks} ranks: a training has at least one")
    return Pretended((int(form[1]), int(form[2])), ranks)
