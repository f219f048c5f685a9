"""Runs headrace-shards in this process, with files in the place of its output: a process for each call takes long."""

import io
import subprocess
import sys
import tempfile

from headrace.webdatamodule.cli import main


def run(*words: object) -> "subprocess.CompletedProcess[bytes]":
    """What a process of its own would give: the exit code, and what came on stdout and stderr."""
    kept = sys.stdout, sys.stderr
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        sys.stdout, sys.stderr = (io.TextIOWrapper(stream, encoding="utf-8") for stream in (out, error))
        try:
            code = main(list(map(str, words)))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            streams = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = kept
            for stream in streams:
                stream.flush()
        texts = []
        for stream in streams:
            stream.buffer.seek(0)
            texts.append(stream.buffer.read())
            stream.detach()
        return subprocess.CompletedProcess([str(word) for word in words], code, *texts)
