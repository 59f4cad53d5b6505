"""A child that is as mortal as a process started anew, without seconds of imports."""

import faulthandler
import os
import sys
import threading
import traceback

from tqdm import tqdm


def fork(body, out, err):
    """The pid of a fork that writes to the file descriptors `out` and `err` and exits with what `body()` returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        # tqdm's lock is a semaphore that forks share: a child killed inside it would hold it for ever.
        tqdm.set_lock(threading.RLock())
        faulthandler.dump_traceback_later(100, exit=True, file=sys.stderr)  # where it hangs, if it does
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
