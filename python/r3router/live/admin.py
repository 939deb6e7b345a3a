"""Calls to a router's admin listener: no proxies from the environment, no redirects, the key in no message."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

Json = dict[str, Any]


class AdminError(Exception):
    """The listener cannot be reached, or refused; the text says what to do."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Admin:
    """One admin listener."""

    def __init__(self, url: str, key: str | None, timeout_s: float = 5.0) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._key = key
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def get(self, path: str) -> Json:
        """The answer to a GET.

        Raises:
            AdminError: no answer, or none that is JSON with 200.
        """
        return self._call(path, None)

    def post(self, path: str, body: Json) -> Json:
        """The answer to a POST.

        Raises:
            AdminError: as `get`.
        """
        return self._call(path, json.dumps(body).encode())

    def _call(self, path: str, data: bytes | None) -> Json:
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310 (the person names the URL)
            with self._opener.open(request, timeout=self._timeout_s) as reply:
                answer = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise AdminError(refusal(error.code, error.read())) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise AdminError(
                f"{self.url} does not answer ({reason}); is it the --admin-host and --admin-port of a running router?"
            ) from None
        except ValueError as error:
            raise AdminError(f"{self.url} is no admin listener: {error}") from None
        if not isinstance(answer, dict):
            raise AdminError(f"{self.url} is no admin listener: {path} answered no object")
        return answer


def refusal(status: int, body: bytes) -> str:
    """The router's own words for an error."""
    try:
        error = json.loads(body)["error"]
        text = f"{status} {error['message']}"
        return f"{text}; {error['advice']}" if error.get("advice") else text
    except (ValueError, KeyError, TypeError):
        return f"{status}: this is no admin listener of a router"
