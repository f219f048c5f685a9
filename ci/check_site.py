"""Check the built site: ``python ci/check_site.py site``.

Its search finds tasks by the words that people use, and it works from the folder, without a network.
"""

import json
import re
import sys
from pathlib import Path

FINDS = {
    "migrate webdataset": "choose/from-webdataset",
    "jupyter": "how-to/jupyter",
    "lightningcli": "how-to/config",
    "hydra": "how-to/config",
    "config": "how-to/config",
    "resume mixture": "how-to/mixtures",
    "append data": "how-to/new-data",
    "special tokens": "how-to/data",
    "mpo": "how-to/images-video",
    "signed url": "how-to/remote",
    "slurm array": "how-to/writing",
    "audio": "how-to/audio",
    "homogeneous batches": "how-to/kinds",
    "dpo pairs": "how-to/kinds",
    "get_eval_dataloader": "how-to/evaluation",
    "group_by_length": "how-to/loops",
    "loss spike": "how-to/spikes",
    "gradient accumulation": "how-to/tokens-per-step",
    "oom": "how-to/memory",
    "list": "reference/command-line",
    "stats": "reference/command-line",
}
_SCRIPT = r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["'](?:https?:)?//"""
_LINK = r"""<link\b[^>]*\brel=["'](?:stylesheet|preload|prefetch|shortcut icon)["'][^>]*\bhref=["'](?:https?:)?//"""
_LOADS = re.compile(f"{_SCRIPT}|{_LINK}")


def faults(site: Path) -> list[str]:
    """Return what is wrong with a site, a line each."""
    found = []
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    for words, page in FINDS.items():
        # Index entries come first in the results. [document, anchor, whether it is a main one]
        pages = {index["docnames"][entry[0]] for entry in index["indexentries"].get(words, ()) if entry[2]}
        if page not in pages:
            found.append(f'a search for "{words}" does not begin with {page}: say "found by: {words}" there')
    loads = {path.relative_to(site): _LOADS.search(path.read_text()) for path in site.rglob("*.html")}
    found += [f"{path} loads from the network: {match[0]}..." for path, match in loads.items() if match]
    found += [f"{name} is missing" for name in ("llms.txt", "llms-full.txt") if not (site / name).is_file()]
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(wrong) or "the site finds what it should, and loads nothing from elsewhere")
    sys.exit(bool(wrong))
