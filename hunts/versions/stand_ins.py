"""Stand-ins for NVIDIA's libraries, with which a torch that was built for CUDA imports, and finds no device.

Such a wheel links 4 GB of libraries that nobody needs on a CPU. In their place comes one small library that has all the
names that are looked up in them, and answers each call with "no device". Needs a C compiler and binutils.

    python -m hunts.versions.stand_ins TORCH/lib
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
from pathlib import Path

NVIDIA = r"lib(cu|nccl|nv)\w*\.so"
SYMBOL = r"(_?_?cu|nccl|nv|__nv|NVPW|_ZN5cudnn)\w*"  # where a library has no versions, by which its symbols are told

LIBRARY = "libno_device.so"
NO_DEVICE = 100
"""cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE."""


def make(folder: Path) -> list[str]:
    """Put what is missing into the folder of torch's libraries. Returns the names of the libraries stood in for."""
    libraries = [path for path in folder.iterdir() if ".so" in path.name]
    missing: set[str] = set()
    versions: dict[str, set[str]] = collections.defaultdict(set)  # of symbols
    for library in libraries:
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-dW", library))
        missing |= {name for name in needed if re.match(NVIDIA, name) and not (folder / name).exists()}
        owners = _owners(_output("readelf", "-VW", library))
        for symbol, version in re.findall(r" U (\w+)(?:@@?(\S+))?", _output("nm", "-D", library)):
            if re.match(NVIDIA, owners.get(version, "")) or (not version and re.fullmatch(SYMBOL, symbol)):
                versions[version].add(symbol)
    if missing:
        _compile(folder, versions)
    for name in missing:
        (folder / name).symlink_to(LIBRARY)
    return sorted(missing)


def _owners(sections: str) -> dict[str, str]:
    """Version of symbols -> the library that has it."""
    owners, library = {}, ""
    for word, name in re.findall(r"\b(File|Name): (\S+)", sections):
        library = name if word == "File" else library
        owners[name] = library
    return owners


def _compile(folder: Path, versions: dict[str, set[str]]) -> None:
    text = 'const char *{}(void) {{ return "no device"; }}'
    number = f"int {{}}(void) {{{{ return {NO_DEVICE}; }}}}"
    symbols = sorted(set().union(*versions.values()))
    code = "\n".join((text if re.search("String|Name", one) else number).format(one) for one in symbols)
    named = {version: sorted(found) for version, found in versions.items() if version}
    script = "\n".join(f"{version} {{ global: {'; '.join(found)}; }};" for version, found in named.items())
    source, map_file = folder / "no_device.c", folder / "no_device.map"
    source.write_text(code + "\n")
    map_file.write_text(script + "\n")
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-w", "-nostdlib", f"-Wl,-soname,{LIBRARY}"]
    command += [f"-Wl,--version-script={map_file}", "-o", str(folder / LIBRARY), str(source)]
    subprocess.run(command, check=True)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print(", ".join(make(Path(sys.argv[1]))))
