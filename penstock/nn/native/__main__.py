"""`python -m penstock.nn.native`: compile the kernels now rather than at an engine's first start."""

import sys

from penstock.nn.native.build import BuildError, build_library

if __name__ == "__main__":
    try:
        print(f"kernels: {build_library()}")
    except BuildError as error:
        print(f"kernels will run as plain torch ops: {error}", file=sys.stderr)
