"""Import every module that wheels brought: ``python ci/import_all.py some.whl ...``, outside the repository."""

import importlib
import sys
import zipfile
from pathlib import Path


def modules(wheel: str) -> list[str]:
    """Return the modules in a wheel, scripts that run on import left out."""
    paths = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return sorted(name for name in names if not name.endswith("__main__"))


def main(wheels: list[str]) -> None:
    """Import them; the first that fails ends the script with its error."""
    names = [name for wheel in wheels for name in modules(wheel)]
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules import with the declared dependencies alone")


if __name__ == "__main__":
    main(sys.argv[1:])
