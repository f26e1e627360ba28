"""Asks the service in this container whether it is well: healthcheck.py [PATH [PORT]].

Exit status 0 means yes.

``/readiness`` is the gateway's, ``/health`` the worker's. Neither generates a token:
the images set SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false. Neither needs a key.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def answers(path: str = "/health", port: str = "30000") -> bool:
    """True when GET ``path`` on this host is answered with 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=4) as got:
            return bool(got.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(0 if answers(*sys.argv[1:]) else 1)
