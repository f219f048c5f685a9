"""Starts the scripts of this folder and the examples as users do: with torchrun, accelerate's launcher, or fabric's."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent
LOOPS = Path(__file__).resolve().parents[2] / "examples" / "loops"
# accelerate starts several processes on CPUs only if it is told that they are GPUs; ACCELERATE_USE_CPU puts that right.
ONE_MACHINE = ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]


class Run(NamedTuple):
    code: int
    output: str


def launcher(name: str, world: int) -> list[str]:
    """As the example's docstring says it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if name == "fabric":
        return ["fabric", "run", "--accelerator=cpu", f"--devices={world}", "--strategy=ddp", f"--main-port={port}"]
    if name.startswith("accelerate"):
        processes = ["--cpu"] if world == 1 else ["--multi_gpu", f"--num_processes={world}"]
        return ["accelerate", "launch", *ONE_MACHINE, *processes, f"--main_process_port={port}"]
    return ["torchrun", "--standalone", f"--nproc-per-node={world}"]


def run(name: str, world: int, folder: Path, die_at: int = 0, workers: int = 0) -> Run:
    """Run an example, or a script of this folder, which is killed in a step if that is not 0."""
    folder_of = LOOPS if (LOOPS / f"{name}.py").exists() else HERE
    script = [str(HERE / "runner.py"), str(folder_of / f"{name}.py")]
    if name == "lightning_trainer":
        script.append(str(world))
    settings = {"CHECKPOINTS": str(folder / "checkpoints"), "DIE_AT": str(die_at), "WORKERS": str(workers)}
    return launch([*launcher(name, world), *script], folder, settings)


def launch(command: list[str], folder: Path, settings: dict[str, str]) -> Run:
    """Run a command of this environment, on CPUs."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONFAULTHANDLER"} | settings
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return Run(done.returncode, done.stdout)
