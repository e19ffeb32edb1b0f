#!/usr/bin/env bash
# Chromium (Debian's or Ubuntu's), Playwright and axe-core for tests/e2e/test_page.py. As root.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v chromium >/dev/null || {
    apt-get update
    apt-get install --yes --no-install-recommends chromium fonts-dejavu-core
}
.venv/bin/python -m pip install --quiet playwright axe-playwright-python
