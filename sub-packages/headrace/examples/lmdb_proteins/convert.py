"""Put the proteins of a FASTA file into an LMDB file: ``python convert.py proteins.fasta.gz proteins.lmdb``."""

import argparse
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from fasta import records
from store import write


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion and return the exit status."""
    parser = argparse.ArgumentParser(prog="convert.py", description=__doc__)
    parser.add_argument("fasta", type=Path, help="FASTA, plain or .gz")
    parser.add_argument("lmdb", type=Path, help="file to make")
    options = parser.parse_args(argv)
    try:
        count = write(options.lmdb, (sequence for _, sequence in records(options.fasta)))
    except (EOFError, OSError, ValueError, zlib.error) as error:
        print(f"convert.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.lmdb}: {count:,} proteins")
    return 0


if __name__ == "__main__":
    sys.exit(main())
