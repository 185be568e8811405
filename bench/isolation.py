"""Does a Python-busy I/O process slow the engine's step? Step time with and without, in pairs.

    .venv/bin/python bench/isolation.py [--rounds 5] [--seconds 6]

Starts the same worker twice, once plain and once with a thread that spins in pure Python inside the I/O
process, loads each with decoding sequences in turn, and prints the engine's own median step and ratios. The
engine runs on one thread, so both processes have a core of the two. Where the two cores share an execution
unit or a clock budget, any busy neighbour slows the engine; so each round also measures the plain worker
beside a spinning process that has nothing to do with it. busy / neighbour is what the I/O process adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc

from baton.protos import convert, nouns
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as wg

ROOT = Path(__file__).resolve().parent.parent
SPIN = """
import sys, threading
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
from baton.worker.host import main
sys.exit(main())
"""


def launch(folder: Path, slot: str, busy: bool) -> subprocess.Popen[bytes]:
    """A decode worker of the demo model with one engine thread."""
    spec = {
        "slot": slot,
        "role": "decode",
        "model": str(ROOT / "models/demo"),
        "model_name": "demo",
        "threads": 1,
        "pages": 512,
        "slot_dir": str(folder),
        "metrics": False,
    }
    host = ["-c", SPIN] if busy else ["-m", "baton.worker.host"]
    return subprocess.Popen([sys.executable, *host, "--spec", json.dumps(spec)], start_new_session=True)


async def address(folder: Path, slot: str) -> str:
    """host:port, once the worker wrote its slot file."""
    for _ in range(600):
        try:
            found = json.loads((folder / f"{slot}.json").read_text()).get("address", "")
            if found:
                return found
        except (OSError, ValueError):
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the worker did not come up")


async def decode_steps(target: str, sequences: int, seconds: float) -> float:
    """Median engine step, seconds, while ``sequences`` decode."""
    async with grpc.aio.insecure_channel(target) as channel:
        session = wg.DecodeWorkerStub(channel).Session()
        await session.write(w.SessionUp(hello=w.Hello(router_id="bench", protocol=nouns.PROTOCOL)))
        sampling = convert.sampling_to_pb(nouns.Sampling(temperature=0, max_tokens=1900, ignore_eos=True))
        for i in range(sequences):
            admit = w.Admit(
                request_id=f"b{i}", model_id="demo", token_ids=range(300 + i, 320 + i), prompt_tokens=20,
                sampling=sampling, local=True,
            )  # fmt: skip
            await session.write(w.SessionUp(admit=admit))
        reader = asyncio.create_task(_drain(session))
        await asyncio.sleep(seconds)
        snapshot = await wg.WorkerStub(channel).Snapshot(w.SnapshotRequest())
        assert snapshot.running, "no sequence ran to the end of the measurement: give fewer --seconds"
        session.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await asyncio.sleep(0.3)
        return snapshot.step_seconds_p50


async def _drain(session: grpc.aio.StreamStreamCall) -> None:
    async for _ in session:
        pass


async def compare(rounds: int, sequences: int, seconds: float) -> None:
    """Plain, busy, plain, busy … one at a time; a worker that isn't measured is stopped, not merely idle."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        workers = {slot: launch(folder, slot, slot == "busy") for slot in ("plain", "busy")}
        try:
            targets = {slot: await address(folder, slot) for slot in workers}
            rounds_done: list[dict[str, float]] = []
            for _ in range(rounds):
                steps = {}
                for slot, process in workers.items():
                    others = [p for s, p in workers.items() if s != slot]
                    for other in others:
                        os.killpg(other.pid, signal.SIGSTOP)
                    steps[slot] = await decode_steps(targets[slot], sequences, seconds)
                    for other in others:
                        os.killpg(other.pid, signal.SIGCONT)
                    assert process.poll() is None
                steps["neighbour"] = await beside_a_spinner(workers["busy"], targets["plain"], sequences, seconds)
                rounds_done.append(steps)
                print(", ".join(f"{name} {step * 1e3:.3f} ms" for name, step in steps.items()), flush=True)
        finally:
            for process in workers.values():
                os.killpg(process.pid, signal.SIGKILL)
    for over in ("plain", "neighbour"):
        ratios = [steps["busy"] / steps[over] for steps in rounds_done]
        print(f"busy / {over}: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


async def beside_a_spinner(idle: subprocess.Popen[bytes], target: str, sequences: int, seconds: float) -> float:
    """The plain worker's step while an unrelated process spins; the busy worker is stopped meanwhile."""
    os.killpg(idle.pid, signal.SIGSTOP)
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return await decode_steps(target, sequences, seconds)
    finally:
        spinner.kill()
        spinner.wait()
        os.killpg(idle.pid, signal.SIGCONT)


def main() -> None:
    """Parses the command line and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    asyncio.run(compare(args.rounds, args.sequences, args.seconds))


if __name__ == "__main__":
    main()
