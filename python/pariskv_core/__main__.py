"""`python -m pariskv_core`: --include_dir or --cmake_dir for build scripts, else like `pariskv`."""

import sys

import pariskv_core

_PLACES = {"--include_dir": pariskv_core.get_include, "--cmake_dir": pariskv_core.cmake_dir}


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1] in _PLACES:
        print(_PLACES[sys.argv[1]]())
        return 0
    # Only now: a build script must not need what the command line needs.
    from pariskv_core.cli import main as cli

    return cli()


if __name__ == "__main__":
    sys.exit(main())
