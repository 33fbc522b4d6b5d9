"""Code in a process of its own that has imported torch and nothing of Envoi or Triton.

As `python -c CODE`, but forked off a process that waits with torch imported, which takes longest.
"""

import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = "from tests.helpers import fresh; exec(compile(fresh.serve(), '<string>', 'exec'))"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code as a program, with this process's environment and folder; return its status and output."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        streams = [f"{folder}/stdout", f"{folder}/stderr"]
        asked = {"code": code, "argv": ["-c", *arguments], "env": dict(os.environ), "cwd": os.getcwd()}
        print(json.dumps(asked | {"streams": streams}), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(code, status, *(Path(stream).read_text() for stream in streams))


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a program, as `python -m NAME ARGUMENTS`."""
    return run(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments)


@functools.cache
def _server() -> subprocess.Popen[str]:
    command = (sys.executable, "-c", SERVER)
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> str:
    """Fork a process for each line of the input; in that, return the code that it runs. Ends with the input."""
    import torch  # noqa: F401  # what all of them share

    gc.collect()
    gc.freeze()  # else each looks at all of torch when it ends, and copies it: half a second
    while line := sys.stdin.readline():
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return _prepare(asked)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    raise SystemExit


def _prepare(asked: dict) -> str:
    """Give a forked process the environment, folder, arguments and streams of the one that asked."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(asked["streams"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = asked["argv"]
    return asked["code"]
