"""URLs of shards: what in them is secret, and how they look without it."""

from __future__ import annotations

import re
import traceback

# What stands before an "@": a name and a password; on the web a name alone, too, which may be a token. Elsewhere a name
# alone may be the container of a bucket, as in abfs://container@account.dfs.core.windows.net. A path leaves one slash.
_USER = re.compile(r"(?:(?<=http://)|(?<=https://)|(?:(?<=://)|(?<=:/))(?=[^/\s@]*:))[^/\s]*@", re.IGNORECASE)
_QUERY_IN_TEXT = re.compile(r"(https?:/[^\s?'\"<>]*)\?[^\s'\"<>]*", re.IGNORECASE)


class Secrets:
    """What is secret in a URL: user and password, and the query, which may be a signature.

    Only requests have these. In all else, and so in errors, a file goes by its `name`, the URL without them.
    """

    def __init__(self, url: str) -> None:
        path, mark, query = url.partition("?") if is_web(url) else (url, "", "")
        user = _USER.search(path)
        self._place, self._user = (user.start(), user[0]) if user else (0, "")
        self._query = mark + query
        self.name = _USER.sub("", path, count=1)

    def address(self, name: str) -> str:
        """The URL of a file at the same host, given by its name."""
        return f"{name[: self._place]}{self._user}{name[self._place :]}{self._query}"


def file_name(name: str) -> str:
    """The last part of a URL's path."""
    return name.rpartition("/")[2]


def is_web(url: str) -> bool:
    """Whether "?" and "#" end the path of a URL; elsewhere they are a part of it."""
    return url.lower().startswith(("http://", "https://"))


def redacted(text: str) -> str:
    """A text without what is secret in the URLs that it holds."""
    return _QUERY_IN_TEXT.sub(r"\1", _USER.sub("", text))


def redacted_cause(error: BaseException) -> BaseException:
    """An error that may be shown as the cause of another: itself, or a copy of its text where that has a secret."""
    text = "".join(traceback.format_exception(error))
    if redacted(text) == text:
        return error
    kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
    copied = kind(redacted(f"{type(error).__name__}: {error}"))
    vars(copied)["status"] = getattr(error, "status", None)
    return copied
