"""``python -m megatron_hexi.torchrun …`` in place of ``torchrun …``: exit codes are those of the ranks.

torchrun ends with exit code 1 and a traceback of its own, whatever its ranks printed. This ends with the exit
code of the rank that failed first, and without a traceback where that rank has printed an error.
"""

from __future__ import annotations

import logging
import sys

from megatron_hexi.errors import EXIT_NO_PLAN, EXIT_USER_ERROR, user_errors

#: Exit codes of ranks that have printed an error.
_SAID = (EXIT_USER_ERROR, EXIT_NO_PLAN)


def main() -> None:
    """Run torchrun with the words of the command line.

    Raises:
        SystemExit: with the exit code of the rank that failed first, or 128 and the signal that ended it.
    """
    with user_errors():
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

    # Its report of the failure is printed below, where no rank has printed an error. What else it logs of a
    # failure is about files of its own ("no error file defined for parent").
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun()
    except ChildFailedError as problem:
        _, failure = problem.get_first_failure()
        if failure.exitcode not in _SAID:
            print(problem, file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


if __name__ == "__main__":
    main()
