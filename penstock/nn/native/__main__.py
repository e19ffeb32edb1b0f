"""`python -m penstock.nn.native`: compile the kernels now rather than at an engine's first start."""

import sys

from penstock.nn.native.build import BuildError, build_library
from penstock.nn.native.isa import sets_here

if __name__ == "__main__":
    try:
        if not (found := sets_here()):
            raise BuildError("there are no kernels for this processor")
        print(f"kernels: {build_library(found[-1])}")
    except BuildError as error:
        print(f"kernels will run as plain torch ops: {error}", file=sys.stderr)
