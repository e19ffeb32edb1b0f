"""Ends with 0 where the server of this container makes progress. Settings are those that it has from variables."""

import os
import ssl
import urllib.request

port, root = os.environ.get("PENSTOCK_PORT", "8000"), os.environ.get("PENSTOCK_ROOT_PATH", "").rstrip("/")
scheme = "https" if os.environ.get("PENSTOCK_SSL_CERTFILE") else "http"
trusting = ssl._create_unverified_context()  # it is this container
urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}{root}/health", timeout=5, context=trusting).read()
