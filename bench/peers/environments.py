"""Sets up what `make bench-peers` needs: each peer in an environment of its own under ``build/peers``.

    python -m bench.peers.environments [llama_cpp] [openvino] [transformers] [bitsandbytes] [llama_server] [vllm]

llama-cpp-python is compiled here (5 minutes on two quiet cores), again without AMX where it crashes with it. Its
package serves one request at a time, so ``llama_server`` is llama.cpp's own server, with slots and continuous
batching, built from the sources inside that same package (10 to 15 minutes more; needs a C++ compiler, takes cmake
and ninja as packages). Knows nothing of measuring.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from bench.peers import vllm_environment

HOME = Path("build/peers")
LLAMA_CPP = "llama-cpp-python==0.3.36"
REQUIREMENTS = {
    "llama_cpp": (LLAMA_CPP,),
    "openvino": ("openvino-genai==2026.4.1.0", "numpy"),
    "transformers": ("torch==2.13.0", "transformers==5.23.0", "gguf==0.19.0", "accelerate"),
    "bitsandbytes": ("torch==2.13.0", "transformers==5.17.0", "bitsandbytes==0.50.2", "accelerate"),
    "llama_server": ("cmake", "ninja"),
    "llama_cpp_without_amx": (LLAMA_CPP,),
    "llmcompressor": ("torch==2.13.0", "transformers==5.17.0", "llmcompressor==0.14.0.1"),
    "gptqmodel": ("torch==2.13.0",),
    "autoawq": ("torch==2.13.0", "transformers==4.51.3", "accelerate", "datasets", "zstandard", "tokenizers"),
}
LATER = {  # arguments of a second install, of what can't be installed beside the others
    "gptqmodel": ("--no-build-isolation", "gptqmodel==7.7.0"),  # it looks at the torch that is there
    "autoawq": ("--no-deps", "autoawq==0.2.9"),  # it asks for a transformers that it doesn't run with
}
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"  # beats -march=native, wherever it stands
ON_DEMAND = {"llama_cpp_without_amx", "llmcompressor", "gptqmodel", "autoawq"}  # set up where they are needed alone
SERVER_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip


def main() -> int:
    """Set up the peers that are named, or all."""
    known = [*REQUIREMENTS, "vllm"]
    wanted = sys.argv[1:] or [name for name in known if name not in ON_DEMAND]
    unknown = set(wanted) - set(known)
    if unknown:
        print(f"no peer {', '.join(sorted(unknown))}; there is {', '.join(known)}", file=sys.stderr)
        return 2
    for name in wanted:
        print(f"{name}: {_set_up(name)}", flush=True)
    return 0


def _set_up(name: str) -> Path:
    if name == "vllm":
        return vllm_environment.set_up(HOME / name).python
    return server() if name == "llama_server" else python_of(name)


def python_of(name: str) -> Path:
    """The Python of a peer's environment, which is made on first use or where its requirements moved on."""
    requirements, later, home = REQUIREMENTS[name], LATER.get(name, ()), HOME / name
    python, stamp, wanted = home / "bin" / "python", home / "installed", " ".join((*requirements, *later))
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"setting up {home}: {' '.join(requirements)}", flush=True)
        _run(sys.executable, "-m", "venv", home)
        _run(python, "-m", "pip", "install", "--quiet", *_options(name), *requirements, **_flags(name))
        if later:
            _run(python, "-m", "pip", "install", "--quiet", *later)
        stamp.write_text(wanted)
    return python


def _options(name: str) -> tuple[str, ...]:
    """A build with other flags must not be found in pip's cache."""
    return ("--no-cache-dir",) if name == "llama_cpp_without_amx" else ()


def _flags(name: str) -> dict[str, str]:
    return {"CFLAGS": WITHOUT_AMX, "CXXFLAGS": WITHOUT_AMX} if name == "llama_cpp_without_amx" else {}


def server() -> Path:
    """llama.cpp's server, built on first use from the sources that LLAMA_CPP carries."""
    python, home = python_of("llama_server"), HOME / "llama_server"
    built = home / LLAMA_CPP.replace("==", "-")
    binary = built / "bin" / "llama-server"
    if not binary.exists():
        sources = _sources(python, home / "sources")
        tools = home.resolve() / "bin"
        _run(tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *SERVER_OPTIONS,
             "-S", sources, "-B", built)  # fmt: skip
        _run(tools / "ninja", "-C", built, "llama-server")
    return binary


def _sources(python: Path, folder: Path) -> Path:
    """llama.cpp's own tree, unpacked from the package's source archive."""
    pick = ("--no-deps", "--no-binary", LLAMA_CPP.split("==")[0])
    _run(python, "-m", "pip", "download", "--quiet", *pick, "--dest", folder, LLAMA_CPP)
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        packed.extractall(folder)
    return next(folder.glob("*/vendor/llama.cpp"))


def _run(*command: str | Path, **environment: str) -> None:
    subprocess.run([str(part) for part in command], check=True, env=os.environ | environment)


if __name__ == "__main__":
    sys.exit(main())
