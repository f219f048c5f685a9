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
    """Import them; the first that fails without naming the extra that it needs ends the script with its error."""
    names = [name for wheel in wheels for name in modules(wheel)]
    extras = 0
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if "pip install headrace-" not in str(error).replace('"', ""):  # a shell needs quotes around brackets
                raise
            extras += 1
    print(f"{len(names) - extras} modules import with the declared dependencies alone, {extras} name their extra")


if __name__ == "__main__":
    main(sys.argv[1:])
