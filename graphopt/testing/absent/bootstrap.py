"""Entry point of the process with a simulated device: `python bootstrap.py JOB RESULT`.

It is a script and no module, since nothing may import torch before the library is loaded.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
import traceback
from typing import Any


def main(job_file: str, result_file: str) -> None:
    """Runs the job in one file, and writes its result to another."""
    with open(job_file, "rb") as file:
        job: dict[str, Any] = pickle.load(file)
    for library in job["libraries"]:
        loaded = ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401  (the library is told once this is done)

    loaded.graphopt_believe()
    sys.path[:] = job["path"]
    from graphopt.testing.absent.pretended_process import run

    try:
        result = (True, run(job))
    except BaseException as error:
        result = (False, (_sendable(error), traceback.format_exc()))
    with open(result_file, "wb") as file:
        file.write(_pickled(result))


def _pickled(result: tuple[bool, Any]) -> bytes:
    from graphopt.errors import PretendError

    try:
        return pickle.dumps(result)
    except Exception as error:
        text = f"what the function returned cannot leave its process: {error}"
        hint = "its tensors are fake: return numbers or text, or save the graph to a file"
        return pickle.dumps((False, (PretendError(text, hint=hint), traceback.format_exc())))


def _sendable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


if __name__ == "__main__":
    main(*sys.argv[1:])
